"""Lazy partitioning on keys alone: the paper's example, and cuts only where something differs."""

import random
from itertools import pairwise

import pytest

from coserve.zoo.equivalence import corresponding
from coserve.zoo.partition import Comparison, PlaceGroup, distinct, partition

BASE = ("e", "a1", "f1", "a2", "f2", "h")


def measured(one: str, other: str, similarities: tuple[float, ...]) -> Comparison:
    return Comparison(
        one,
        other,
        tuple(PlaceGroup((place, place + 1), (place, place + 1), s) for place, s in enumerate(similarities)),
    )


# Figure 12: the first layer of a full fine-tune is equivalent to the foundation's, the second is not.
TUNED = tuple(f"{key}*" for key in BASE)
ALIKE = measured("base", "tuned", (1.0, 0.999, 0.99, 0.9, 0.8, 0.7))


def test_one_model_alone_is_one_block() -> None:
    (block,) = partition({"base": BASE})["base"]
    assert (block.start, block.stop) == (0, 6)


def test_a_full_fine_tune_beside_its_foundation_gives_four_blocks_two_of_them_equivalent() -> None:
    blocks = partition({"base": BASE, "tuned": TUNED}, [ALIKE])
    assert len(distinct(blocks)) == 4
    assert [(b.start, b.stop) for b in blocks["base"]] == [(0, 3), (3, 6)]
    assert [(b.start, b.stop) for b in blocks["tuned"]] == [(0, 3), (3, 6)]
    assert blocks["base"][0].equivalents == {"tuned"} and blocks["tuned"][0].equivalents == {"base"}
    assert not blocks["base"][1].equivalents and not blocks["tuned"][1].equivalents


def test_a_lora_on_attention_then_splits_to_nine_with_the_feed_forward_shared() -> None:
    lora = ("e", "a1+l1", "f1", "a2+l2", "f2", "h")
    blocks = partition({"base": BASE, "tuned": TUNED, "lora": lora}, [ALIKE])
    assert len(distinct(blocks)) == 9
    assert [b.keys for b in blocks["base"]] == [("e",), ("a1",), ("f1",), ("a2",), ("f2", "h")]
    assert [b.keys for b in blocks["tuned"]] == [TUNED[:3], TUNED[3:]]  # nothing there had to be cut
    shared = {b.keys for b in blocks["lora"] if "base" in b.users}
    assert shared == {("e",), ("f1",), ("f2", "h")}


def test_equal_components_are_shared_and_no_alternatives() -> None:
    same = ("e", "a1", "f1", "a2", "f2*", "h")
    blocks = partition({"base": BASE, "same": same}, [measured("base", "same", (1.0,) * 6)])
    assert [b.keys for b in blocks["base"]] == [("e", "a1", "f1", "a2"), ("f2",), ("h",)]
    assert [b.equivalents for b in blocks["base"]] == [set(), {"same"}, set()]


def test_the_threshold_decides() -> None:
    assert len(partition({"base": BASE, "tuned": TUNED}, [ALIKE], threshold=0.95)["base"]) == 2
    assert len(partition({"base": BASE, "tuned": TUNED}, [ALIKE], threshold=0.5)["base"]) == 1
    assert len(partition({"base": BASE, "tuned": TUNED}, [ALIKE], threshold=0.9999)["tuned"]) == 2


def test_a_comparison_with_what_is_gone_is_ignored() -> None:
    assert len(partition({"base": BASE}, [ALIKE])["base"]) == 1


@pytest.mark.parametrize("seed", range(20))
def test_blocks_cover_chains_and_shared_ones_are_the_same_in_all(seed: int) -> None:
    draws = random.Random(seed)
    chains = {
        f"app{n}": tuple(f"{place}.{draws.choice('xyz')}" for place in range(10)) for n in range(6)
    }  # fmt: skip
    alike = [
        measured("app0", f"app{n}", tuple(draws.choice((0.5, 0.99)) for _ in range(10))) for n in range(1, 4)
    ]
    blocks = partition(chains, alike)
    for name, own in blocks.items():
        assert tuple(key for block in own for key in block.keys) == chains[name]
        assert [block.start for block in own] == [0, *(block.stop for block in own[:-1])]
        for block in own:
            assert block.users == {
                other for other, theirs in blocks.items() if block.id in {one.id for one in theirs}
            }, "all users of a component have the same block around it"
    order = dict(sorted(chains.items(), reverse=True))
    assert distinct(partition(order, alike[::-1])) == distinct(blocks), "whatever came first"


def test_models_of_other_depth_correspond_in_proportion() -> None:
    found = corresponding(2 + 2 * 3, 2 + 2 * 4)  # three layers and four
    assert found == [
        ((0, 1), (0, 1)), ((1, 3), (1, 3)), ((3, 5), (3, 5)), ((5, 7), (5, 9)), ((7, 8), (9, 10)),
    ]  # fmt: skip
    for one, other in ((8, 34), (34, 26), (66, 82)):
        for side, count in enumerate((one, other)):
            ranges = [pair[side] for pair in corresponding(one, other)]
            assert ranges[0] == (0, 1) and ranges[-1] == (count - 1, count)
            assert all(a[1] == b[0] and b[0] < b[1] for a, b in pairwise(ranges))
