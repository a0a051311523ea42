"""Whichever forward rows of a step share a pass, it computes the same: tokens, losses, weights.

Graphs are their plain twin, which computes anew from what a graph reads. Float64 throughout, in which two
ways to the same result differ by rounding only.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.core.plan import BasePlan
from coserve.core.sequence import Direction
from coserve.executors.local import LocalExecutor
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.train.example import Example
from coserve.worker import cuda_graphs
from coserve.worker.cuda_graphs import Record, Run
from coserve.worker.fused_pass import FusedPass
from coserve_benchmarks.plans import watch_plans
from models import Exact, tiny

Ran = tuple[list[list[int]], list[float], dict[str, Tensor]]  # answers, losses, weights
SCHEDULER = {
    "max_prefill_rows": 8, "bounded_prefill_rows": 8, "min_prefill_rows": 4, "max_training_rows": 24,
    "min_training_rows": 3, "slowdown": 8.0,
}  # fmt: skip


def run(
    record: Record | None, mixed: float, monkeypatch: pytest.MonkeyPatch, carried: Counter[tuple[bool, ...]]
) -> Ran:
    """An engine answers and trains; its prompts come in chunks while others decode, which it takes for
    `mixed` seconds in a pass with others. `carried` counts the steps with decode rows: whether they carry a
    prompt, a window, and one that shares a pass with answers, and have decode rows apart from the prompt."""
    monkeypatch.setattr(FusedPass, "recorder", lambda _: record)
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)  # it knows no better

    def look(plan: BasePlan) -> None:
        if any(segment.length == 1 for segment in plan.inference):
            prompt = any(segment.length > 1 for segment in plan.inference)
            window = any(segment.direction is Direction.TRAIN_FORWARD for segment in plan.training)
            carried[prompt, window, bool(plan.fused), plan.passes.decodes_apart] += 1

    with Exact():
        config = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4, scheduler=SCHEDULER)
        engine = Engine(tiny("llama", torch.float64), config)
        engine.cost._start({**DEFAULT_WEIGHTS, "mixed_layers": mixed})
        training = TrainingConfig(
            learning_rate=1e-2, batch_size=4, max_steps=4, epochs=4, rows=64, keep=SavePolicy.EVERYTHING
        )
        data = [Example(tuple(range(1, n)), (*range(2, n), -100)) for n in (12, 30, 9, 21)]
        job = engine.finetune(data, "trained", LoRAConfig(rank=3), training)
        with watch_plans(engine, look):
            handles = []
            for number in range(6):
                sampling = SamplingParams(max_tokens=12, ignore_eos=True)
                handles.append(
                    engine.generate([1 + number] * (5 + 6 * number), sampling=sampling, text=False)
                )
                engine.step()
            engine.run()
    assert job.status == "succeeded" and isinstance(engine.executor, LocalExecutor)
    assert not engine.executor.worker._pauses, "what has passed is told of, and does not pass again"
    weights = {name: x.clone() for name, x in engine.adapters.weights("trained").parameters().items()}
    return [handle.tokens for handle in handles], [update.loss for update in job.history], weights


@pytest.mark.local
def test_rows_may_share_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    replayed = Counter[str]()

    def record(work: Run) -> Run:
        def replay() -> Tensor:
            replayed["rows"] += 1
            return work()

        return replay

    shared, parted, graphs, mixed = (Counter[tuple[bool, ...]]() for _ in range(4))
    answers, losses, weights = run(None, 0.0, monkeypatch, shared)
    assert len({*map(tuple, answers)}) > 3
    # A base without graphs: windows share the pass of answers, or of those that have prompts.
    assert all(fused is window and not apart for _, window, fused, apart in shared)
    assert {carried[:2] for carried in shared} >= {(False, True), (True, True)}
    found = [run(None, 0.02, monkeypatch, parted)]
    assert all(fused == (prompt and window) and not apart for prompt, window, fused, apart in parted)
    assert {carried[:2] for carried in parted} >= {(False, True), (True, True)}
    assert not replayed
    # With graphs decode rows are apart from prompts, too, where windows pass beside these and where not.
    found.append(run(record, 0.02, monkeypatch, graphs))
    assert replayed["rows"] >= graphs.total() + graphs[True, False, False, True]
    assert graphs[True, True, True, True] >= 3 <= graphs[True, False, False, True]
    assert all(fused == (prompt and window) for prompt, window, fused, _ in graphs)
    assert all(decodes_apart is prompt for prompt, _, _, decodes_apart in graphs)
    # One graph holds both kinds of rows.
    found.append(run(record, 0.0, monkeypatch, mixed))
    assert mixed[True, False, False, False] >= 3 and not any(apart for *_, apart in mixed)
    for found_answers, found_losses, found_weights in found:
        assert found_answers == answers and found_losses == pytest.approx(losses, rel=1e-10)
        for name, wanted in weights.items():
            assert float((found_weights[name] - wanted).norm() / wanted.norm()) <= 1e-9
