"""Windowed gradients against whole-sequence autograd in float64: relative error at most 1e-10.

The rounding of float64 leaves about 1e-15 here; a wrong window, mask or put-down shows at 1e-3 and above.
"""

import random
from collections.abc import Iterator, Sequence

import pytest

from coserve.core.sequence import Span
from coserve.train.tape import Keep
from models import ARCHITECTURES, Exact
from passages import Case, Passage, make_case, worst

TOLERANCE = 1e-10
LENGTHS = (9, 40, 1, 25, 12)  # packed end to end; some longer than the sliding windows
ROWS = sum(LENGTHS)


def windows(size: int) -> list[tuple[int, int]]:
    return [(start, min(size, ROWS - start)) for start in range(0, ROWS, size)]


def spans(depth: int, draws: random.Random | None) -> Iterator[Span]:
    """The layers from below in random pieces: where one ends the window is put down."""
    first = 0
    while first < depth:
        last = depth if draws is None else draws.randint(first + 1, depth)
        yield Span(first, last)
        first = last


def travel(case: Case, keep: Keep, there: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]],
           draws: random.Random | None) -> float:  # fmt: skip
    passage = Passage(case, keep)
    for start, rows in there:
        for span in spans(case.depth, draws):
            passage.forward(start, rows, span)
    for start, rows in reversed(back):
        for span in reversed(list(spans(case.depth, draws))):
            passage.backward(start, rows, span)
    return passage.error()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_windows_give_the_gradients_of_whole_sequences(name: str) -> None:
    draws = random.Random(f"windows/{name}")
    errors = {}
    with Exact():
        case = make_case(name, LENGTHS)
        for keep in Keep:
            for size in (7, 64, ROWS):
                for pieces in (None, draws):
                    cut = windows(size)
                    errors[keep.value, size, pieces is not None] = travel(case, keep, cut, cut, pieces)
        one_by_one = windows(1)
        errors["inputs", 1, True] = travel(case, Keep.INPUTS, one_by_one, one_by_one, draws)
        errors["products", 1, False] = travel(case, Keep.PRODUCTS, one_by_one, one_by_one, None)
        # The way back need not be cut like the way there.
        errors["products", "7 and 64", True] = travel(case, Keep.PRODUCTS, windows(7), windows(64), draws)
        errors["inputs", "64 and 7", False] = travel(case, Keep.INPUTS, windows(64), windows(7), None)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("keep", Keep)
def test_windows_of_one_row_without_put_downs(keep: Keep) -> None:
    with Exact():
        case = make_case("llama", LENGTHS)
        assert travel(case, keep, windows(1), windows(1), None) <= TOLERANCE


@pytest.mark.parametrize("keep", Keep)
def test_put_down_windows_go_on_as_one(keep: Keep) -> None:
    """Windows that rest between the same two layers can be picked up together, and apart again."""
    with Exact():
        case = make_case("mistral", LENGTHS)
        passage = Passage(case, keep)
        whole = Span(0, case.depth)
        passage.forward(0, ROWS, whole)
        middle = Span(1, case.depth - 1)
        for start, rows in reversed(windows(7)):
            passage.backward(start, rows, Span(middle.last, case.depth))
        for start, rows in reversed(windows(30)):
            passage.backward(start, rows, middle)
        for start, rows in reversed(windows(11)):
            passage.backward(start, rows, Span(0, middle.first))
        assert passage.error() <= TOLERANCE


def test_an_adapter_on_some_layers_only_has_the_gradients_it_has_among_others() -> None:
    """The walk stops below the lowest adapter; the other adapters are there in one run, with B at zero."""
    with Exact():
        case = make_case("qwen2", LENGTHS)
        layers = {p: s.stage for p, s in case.engine.base.sites.items() if p in case.adapter}
        for layer in range(case.depth):
            some = [path for path, of in layers.items() if of == layer and "up_proj" not in path]
            for path, (_, b) in case.adapter.items():
                if path not in some:
                    b.zero_()
            whole = Passage(case, Keep.INPUTS)
            part = Passage(case, Keep.PRODUCTS, paths=some)
            for passage, size in ((whole, ROWS), (part, 16)):
                case.engine.runner.runs["probe"] = passage.run
                for start, rows in windows(size):
                    passage.forward(start, rows, Span(0, case.depth))
                for start, rows in reversed(windows(size)):
                    passage.backward(start, rows, Span(0, case.depth))
                passage.finish()
            assert part.gradients.keys() == set(some)
            assert worst(part.gradients, whole.gradients) <= TOLERANCE
            case = make_case("qwen2", LENGTHS)
