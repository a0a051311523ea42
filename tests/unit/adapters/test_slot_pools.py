"""Slot pools: adapters of a step that are computed together, their results, and slots that are freed."""

import pytest
import torch
from torch import Tensor

from coserve.adapters import slot_pools
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.kernels.lora.slots import SlotTables

SIZES = {"q": (12, 8), "k": (12, 4), "o": (8, 12)}
GROUPS = (("q", "k"), ("o",))


def adapter(seed: int, rank: int, paths: tuple[str, ...] = ("q", "k", "o"), bias: bool = False) -> Bypasses:
    draws = torch.Generator().manual_seed(seed)
    outputs = {}
    for path in paths:
        inside, outside = SIZES[path]
        outputs[path] = LoRABypass(
            torch.randn(rank, inside, generator=draws, dtype=torch.float64),
            torch.randn(outside, rank, generator=draws, dtype=torch.float64),
            0.5 + seed,
            bias=torch.randn(outside, generator=draws, dtype=torch.float64) if bias else None,
        )
    return Bypasses({}, outputs)


def added(
    pools: LoraSlotPools, adapters: list[tuple[slice, Bypasses]], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The terms that a step's adapters add at each linear, low-rank ones and the others."""
    batch = pools.batch(adapters)
    found = {}
    for path, x in given.items():
        y = torch.zeros(len(x), SIZES[path][1], dtype=torch.float64)
        batch.add_(path, x, y)
        for rows, bypasses in batch.rest:
            if path in bypasses.outputs:
                bypasses.outputs[path].add_(x[rows], y[rows])
        found[path] = y
    return found


def one_by_one(adapters: list[tuple[slice, Bypasses]], given: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for path, x in given.items():
        y = torch.zeros(len(x), SIZES[path][1], dtype=torch.float64)
        for rows, bypasses in adapters:
            if path in bypasses.outputs:
                bypasses.outputs[path].add_(x[rows], y[rows])
        found[path] = y
    return found


def inputs(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """As the model gives them: q and k the same tensor."""
    draws = torch.Generator().manual_seed(seed)
    shared = torch.randn(rows, 12, generator=draws, dtype=torch.float64)
    return {"q": shared, "k": shared, "o": torch.randn(rows, 8, generator=draws, dtype=torch.float64)}


def expect_equal(
    pools: LoraSlotPools, adapters: list[tuple[slice, Bypasses]], given: dict[str, Tensor]
) -> None:
    got, wanted = added(pools, adapters, given), one_by_one(adapters, given)
    for path in given:
        assert torch.allclose(got[path], wanted[path], rtol=1e-12, atol=1e-12), path


def make(slots: int = 8) -> LoraSlotPools:
    return LoraSlotPools(GROUPS, slots, torch.device("cpu"))


def test_adapters_of_several_pools_and_of_none_add_what_each_adds_alone() -> None:
    """Two pools whose rows interleave, one adapter alone in its pool, one with a bias (which has no slot),
    one at some linears only, one with two ranges, rows of nobody."""
    eights = [adapter(seed, 8) for seed in (1, 2)]
    threes = [adapter(3, 3), adapter(4, 4), adapter(5, 4)]
    loose = [adapter(6, 16), adapter(7, 8, bias=True), adapter(8, 8, ("o",))]
    order = [eights[0], threes[0], loose[0], eights[1], threes[1], loose[1], threes[2], loose[2], eights[0]]
    starts = [0, 1, 3, 4, 5, 7, 8, 10, 11]  # row 12 belongs to nobody
    ends = [*starts[1:], 12]
    adapters = [(slice(a, b), one) for a, b, one in zip(starts, ends, order, strict=True)]
    pools = make()
    assert len(pools.batch(adapters).slots) == 2
    assert [one for _, one in pools.batch(adapters).adapters] == [loose[1], loose[0], loose[2]]
    expect_equal(pools, adapters, inputs(13))


def test_the_first_product_is_not_taken_for_that_of_another_input() -> None:
    """k is given something else than q; and the next step's tensor has the same shape."""
    adapters = [(slice(0, 1), adapter(1, 4)), (slice(1, 3), adapter(2, 4))]
    pools = make()
    given = inputs(3)
    expect_equal(pools, adapters, given | {"k": given["k"] + 1})
    expect_equal(pools, adapters, inputs(3, seed=1))


def test_what_else_an_adapter_has_stays_with_it() -> None:
    bias = BitFitBypass(torch.ones(8, dtype=torch.float64), None)
    first, second = adapter(1, 4, ("k", "o")), adapter(2, 4, ("k", "o"))
    mixed = Bypasses({}, {**first.outputs, "q": bias})
    adapters = [(slice(0, 1), mixed), (slice(1, 2), second)]
    pools = make()
    batch = pools.batch(adapters)
    assert len(batch.slots) == 1 and len(batch.rest) == 1
    assert list(batch.rest[0][1].outputs) == ["q"]
    expect_equal(pools, adapters, inputs(2))


def test_long_segments_and_a_lone_adapter_are_left_alone() -> None:
    one, two = adapter(1, 4), adapter(2, 4)
    pools = make()
    assert not pools.batch([(slice(0, 4), one)]).slots
    assert not pools.batch([(slice(0, 400), one), (slice(400, 401), two)]).slots
    assert pools.nbytes == 0


def test_slots_are_used_again_by_whoever_comes_and_versions_that_are_gone_leave() -> None:
    """Three slots, five adapters in turns: each step's products are right, and bytes stop growing."""
    pools = make(slots=3)
    known = [adapter(seed, 4) for seed in range(5)]
    for step in range(12):
        chosen = [known[(step + i) % 5] for i in range(3)]
        adapters = [(slice(i, i + 1), one) for i, one in enumerate(chosen)]
        expect_equal(pools, adapters, inputs(3, step))
    weights = sum(rank_bytes for rank_bytes in (4 * (a + b) * 8 for a, b in SIZES.values()))
    assert pools.nbytes == 3 * weights
    for one in known:
        pools.forget(one)
    assert pools.nbytes == 0, "a pool without entries gives its memory back"
    fresh = [adapter(seed, 4) for seed in (11, 12)]
    expect_equal(pools, [(slice(i, i + 1), one) for i, one in enumerate(fresh)], inputs(2))
    assert pools.nbytes == 2 * weights == sum(map(pools.slot_nbytes, fresh))


def test_a_step_with_the_same_rows_is_made_once() -> None:
    adapters = [(slice(0, 1), adapter(1, 4)), (slice(1, 2), adapter(2, 4))]
    pools = make()
    first = pools.batch(adapters)
    assert pools.batch([]).is_empty and pools.batch(list(adapters)) is first
    assert pools.batch([*adapters, (slice(2, 3), adapter(3, 4))]) is not pools.batch(adapters)


def test_who_stays_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full pool one leaves and another comes, whose rows are the step's first."""
    copied: list[int] = []
    put = SlotTables.put
    monkeypatch.setattr(
        SlotTables, "put", lambda self, slot, *rest: (copied.append(slot), put(self, slot, *rest))[1]
    )
    pools = make(slots=3)
    known = [adapter(seed, 4) for seed in range(4)]
    pools.batch([(slice(i, i + 1), one) for i, one in enumerate(known[:3])])
    assert copied == [slot for slot in range(3) for _ in SIZES]
    copied.clear()
    again = [(slice(i, i + 1), known[number]) for i, number in enumerate((3, 0, 1))]
    expect_equal(pools, again, inputs(3))
    assert copied == [2] * len(SIZES), "only the newcomer, where the one that left was"


def test_the_version_whose_sequences_began_or_ended_longest_ago_gives_up_its_slot() -> None:
    """Three slots, of which the second adapter's has to go: the first one's sequence has just ended."""
    pools = make(slots=3)
    first, second, third, fourth = (adapter(seed, 4) for seed in range(4))
    for one in (first, second, third):
        pools.use(one)
    pools.batch([(slice(i, i + 1), one) for i, one in enumerate((first, second, third))])
    pools.use(first)
    (pool,) = pools._pools.values()
    left = set(pool._slots)
    pools.use(fourth)
    expect_equal(pools, [(slice(0, 1), third), (slice(1, 2), fourth)], inputs(2))
    assert left - set(pool._slots) == {id(second)}
    pools.forget(first)
    expect_equal(pools, [(slice(0, 1), second), (slice(1, 2), fourth)], inputs(2))
    assert set(pool._slots) == {id(second), id(third), id(fourth)}


def test_tables_of_a_device_that_takes_memory_at_once_grow_with_their_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters keep their slots, tables never exceed the pool's limit, and unused tables take no memory."""
    monkeypatch.setattr(slot_pools, "_FIRST_SLOTS", 2)
    entries = [slot_pools._entry(adapter(seed, 3), frozenset(SIZES)) for seed in range(6)]
    pool, whole = (slot_pools.LoraSlotPool(GROUPS, 5, entries[0], grows) for grows in (True, False))
    given, sizes = [], []
    for number, entry in enumerate(entries[:5]):
        entry.used = number
        given.append(pool.slot(entry, set()))
        sizes.append(pool.nbytes)
        whole.slot(entry, set())
    assert sorted(given) == [0, 1, 2, 3, 4] and pool.nbytes == whole.nbytes
    assert [size * 5 // pool.nbytes for size in sizes] == [2, 2, 4, 4, 5]
    for path in SIZES:
        weights = pool.weights[path]
        for slot, entry in zip(given, entries, strict=False):
            bypass = entry.plain[path]
            assert torch.equal(weights.up[slot, :3], bypass.b.t() * bypass.scale)
            assert torch.equal(weights.down[slot].t()[weights.ranks][:3], bypass.a)
    assert pool.slot(entries[5], set()) == given[0], "then whoever is used least gives up its slot"
    assert pool.nbytes == whole.nbytes
