"""`coserve bench ranks`: candidates compute one thing, orders are compared, and the whole run."""

from pathlib import Path

import pytest
import torch

from coserve.parallel.links import link_named
from coserve_benchmarks.ranks.candidates import (
    RANKS,
    Case,
    PlanRun,
    Sizes,
    cases_of,
    chosen_plans,
    replicates_all,
    spearman,
)
from coserve_benchmarks.ranks.run import BARS, run_ranks
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.rows_page import BEGIN, END
from forked_executors import fork_executors
from threaded_ranks import ThreadRanks, on_ranks

SIZES = Sizes(rows=6, width=16, inner=4, candidates=12, rounds=2)
LINK = link_named("processes")


@pytest.mark.parametrize("case", cases_of(SIZES), ids=lambda case: case.name)
def test_all_candidates_compute_one_thing(case: Case) -> None:
    plans = chosen_plans(case, LINK, SIZES)
    assert any(map(replicates_all, plans)) and len(plans) >= SIZES.candidates

    def run(ranks: ThreadRanks) -> list[list[torch.Tensor]]:
        found = []
        for plan in plans:
            own = PlanRun(plan, ranks, SIZES)
            y = own.passed()
            own.complete()
            if plan.output.is_shard():
                y = ranks.columns(y)
            elif plan.output.is_partial():
                y = ranks.sum(y)
            grads = []
            for step in plan.steps:
                if (weight := own.weights.get(step.operator.name)) is not None:
                    assert weight.grad is not None and step.weight is not None
                    state = step.weight
                    grads.append(ranks.whole(weight.grad, state.dim) if state.is_shard() else weight.grad)  # type: ignore[attr-defined]
            found.append([y, *grads])
        return found

    for found in on_ranks(RANKS, run):
        for one in found[1:]:
            torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-5)


def test_orders() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)


@pytest.mark.slow
def test_memory_of_a_rank_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    found = run_ranks(quick=True, only=["memory"], json_path=tmp_path / "ranks.json")
    assert 0.25 <= found["tp.memory_per_rank[4]"] <= 0.30
    page = tmp_path / "ranks.md"
    page.write_text(f"# Ranks\n\n{BEGIN}\nold figures\n{END}\n")
    redraw(tmp_path / "ranks.json", page)
    assert "`tp.memory_per_rank[4]`" in page.read_text() and "old figures" not in page.read_text()


@pytest.mark.slow
def test_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    found = run_ranks(quick=True)
    assert found.keys() >= BARS.keys()
    assert all(found[key] > 0 for key in BARS if key not in ("plan.spearman", "failover.lost"))
    assert found["failover.lost"] == 0
