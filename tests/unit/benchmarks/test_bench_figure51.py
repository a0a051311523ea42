"""The report's figure: the approaches compute the same, everything is a point of it, and it can be drawn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve.workload.shapes import shape_named
from coserve_benchmarks.adapters.approaches import (
    APPROACHES,
    NAIVE,
    Batch,
    DecodeStep,
    SharedModel,
    TrainStep,
    passes_of,
)
from coserve_benchmarks.adapters.drawing import draw
from coserve_benchmarks.adapters.figure import drawn, extents, ranks_for
from coserve_benchmarks.adapters.peers import AtBestThreads, Context
from coserve_benchmarks.adapters.run import run_adapters

BATCH = Batch(ranks=(16, 32, 32), shares=(2, 1, 3), length=4)


@pytest.fixture(scope="module")
def shared() -> SharedModel:
    model = SharedModel(shape_named("tiny"), sum(BATCH.ranks))
    draws = torch.Generator().manual_seed(4)
    for linear in model.linears:  # no two rows alike, so that a wrong one would show
        for table in (linear.a, linear.b):
            table.copy_(0.1 * torch.randn(table.shape, generator=draws))
    return model


def test_the_naive_approach_has_a_pass_for_each_adapter_and_the_others_one() -> None:
    naive = list(passes_of(BATCH, NAIVE))
    ranks = slice(0, 16), slice(16, 48), slice(48, 80)
    assert [(p.rows, p.ranks) for p in naive] == [
        (slice(0, 2), ranks[:1]),
        (slice(2, 3), ranks[1:2]),
        (slice(3, 6), ranks[2:]),
    ]
    for approach in set(APPROACHES) - {NAIVE}:
        (only,) = passes_of(BATCH, approach)
        assert (only.rows, only.ranks) == (slice(0, 6), ranks)
        assert only.tokens == (slice(0, 8), slice(8, 12), slice(12, 24))


def logits(shared: SharedModel, approach: str) -> torch.Tensor:
    ids = torch.arange(BATCH.tokens).view(BATCH.rows, BATCH.length)
    found = []
    for own in passes_of(BATCH, approach):
        shared.use(shared.segments(own))
        with torch.no_grad():
            found.append(shared.model(input_ids=ids[own.rows], use_cache=False).logits)
    return torch.cat(found).float()


@pytest.mark.parametrize("approach", sorted(set(APPROACHES) - {NAIVE}))
def test_approaches_give_the_same_logits_and_gradients(shared: SharedModel, approach: str) -> None:
    """Within bfloat16's rounding over four layers; without adapters it is another answer altogether."""
    wanted, got = logits(shared, NAIVE), logits(shared, approach)
    assert float((got - wanted).norm() / wanted.norm()) < 2e-2
    for linear in shared.linears:
        linear.segments = None
    with torch.no_grad():
        ids = torch.arange(BATCH.tokens).view(BATCH.rows, BATCH.length)
        bare = shared.model(input_ids=ids, use_cache=False).logits.float()
    assert float((bare - wanted).norm() / wanted.norm()) > 0.2
    trained, alone = gradients(shared, approach), gradients(shared, NAIVE)
    for mine, theirs in zip(trained, alone, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 5e-2


def gradients(shared: SharedModel, approach: str) -> list[torch.Tensor]:
    """Of the summed loss, all adapters' end to end, for A and for B of each linear."""
    ids = torch.arange(BATCH.tokens).view(BATCH.rows, BATCH.length)
    found: list[list[torch.Tensor]] = []
    for own in passes_of(BATCH, approach):
        leaves = shared.leaves(own)
        shared.use(shared.segments(own, leaves))
        scores = shared.model(input_ids=ids[own.rows], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), ids[own.rows].flatten(), reduction="sum"
        )
        given = [gradient.float().flatten() for gradient in torch.autograd.grad(loss, leaves)]
        of_linear = 2 * len(own.ranks)  # A and B of each adapter
        starts = [first + side for first in range(0, len(given), of_linear) for side in (0, 1)]
        found.append([torch.cat(given[start : start - start % 2 + of_linear : 2]) for start in starts])
    return [torch.cat(of_table) for of_table in zip(*found, strict=True)]


@pytest.mark.parametrize("approach", APPROACHES)
def test_decoding_repeats_itself_and_training_moves_the_adapters(shared: SharedModel, approach: str) -> None:
    decoding = DecodeStep(shared, replace(BATCH, length=1), approach, context=3)
    assert decoding() > 0 and decoding() > 0
    before = [linear.a.clone() for linear in shared.linears]
    assert TrainStep(shared, BATCH, approach)() > 0
    for linear, was in zip(shared.linears, before, strict=True):
        moved = (linear.a != was).any(1)
        assert moved.all(), "ranks that did not step"
        linear.a.copy_(was)


def test_a_context_is_as_long_in_every_round() -> None:
    context = Context(shape_named("tiny"), rows=2, length=3)
    for _ in range(3):
        ids, cache = context.begin()
        assert ids.shape == (2, 1) and cache.get_seq_length() == 3
        k = torch.zeros(2, 2, 1, 16)
        for layer in range(4):
            cache.update(k, k, layer)
        assert cache.get_seq_length() == 4


def test_rows_are_drawn_as_in_the_report() -> None:
    extent = extents("255m", quick=False)["fine-tuning"]
    batch = drawn(extent, 24, 64)
    assert batch == drawn(extent, 24, 64) and batch.rows == 64 and batch.tokens == 64 * extent.length
    assert 16 < len(batch.ranks) <= 24 and min(batch.shares) >= 1 and max(batch.shares) > 3
    assert ranks_for(2) == [60, 60] and ranks_for(8) == [16, 16, 32, 32, 64, 64, 128, 128]
    points = extents("255m", quick=False)["inference"].points
    assert ("adapters", 32, 64) in points and ("batch", 24, 8) in points and len(points) == 10


@pytest.mark.slow
def test_every_point_is_measured_and_drawn(tmp_path: Path) -> None:
    results = run_adapters("tiny", quick=True, only=["figure"], json_path=tmp_path / "figure.json")
    swept = extents("tiny", quick=True)
    points = results["figure"]["points"]
    keys = {(p["task"], p["sweep"], p["approach"], p["adapters"], p["batch"]) for p in points}
    assert keys == {
        (task, sweep, approach, count, rows)
        for task in ("inference", "fine-tuning")
        for sweep, count, rows in swept[task].points
        for approach in (*APPROACHES, "coserve")
    }
    assert len(keys) == len(points) and all(p["low"] <= p["tokens_per_s"] <= p["high"] for p in points)
    picture = tmp_path / "made" / "figure.svg"
    draw(results, picture)
    text = picture.read_text()
    for said in ("block-sparse", "coserve", "fine-tuning, 4 adapters", results["command"].split()[0]):
        assert said in text


def test_a_peer_has_the_threads_that_suit_it() -> None:
    before = torch.get_num_threads()
    try:
        for best in (1, 2):
            peer = AtBestThreads(lambda best=best: 1.0 + abs(torch.get_num_threads() - best), 2)  # type: ignore[misc]
            assert peer.threads == best and peer() == 1.0
    finally:
        torch.set_num_threads(before)
