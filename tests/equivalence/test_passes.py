"""A step whose decode rows pass apart, by graph, computes what the shared pass does: tokens, losses, weights.

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


def run(record: Record | None, monkeypatch: pytest.MonkeyPatch, carried: Counter[str]) -> Ran:
    """An engine answers and trains; its prompts come in chunks while others decode. `carried` counts the
    steps with decode rows by what else they carry."""
    monkeypatch.setattr(FusedPass, "_recorder", lambda _: record)

    def look(plan: BasePlan) -> None:
        if any(segment.length == 1 for segment in plan.inference):
            prompt = any(segment.length > 1 for segment in plan.inference)
            window = any(segment.direction is Direction.TRAIN_FORWARD for segment in plan.training)
            carried["prompt and window" if prompt and window else "prompt" if prompt else "no prompt"] += 1
            assert plan.apart is (record is not None) and bool(plan.fused) <= (record is None)

    with Exact():
        config = EngineConfig(calibrate=False, cache_tokens=1024, page_size=4, scheduler=SCHEDULER)
        engine = Engine(tiny("llama", torch.float64), config)
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
    assert job.status == "succeeded"
    weights = {name: x.clone() for name, x in engine.adapters.weights("trained").parameters().items()}
    return [handle.tokens for handle in handles], [update.loss for update in job.history], weights


@pytest.mark.local
def test_decode_rows_pass_by_graph_beside_a_prompt_and_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    carried, replayed = Counter[str](), Counter[str]()

    def record(work: Run) -> Run:
        def replay() -> Tensor:
            replayed["rows"] += 1
            return work()

        return replay

    answers, losses, weights = run(record, monkeypatch, carried)
    assert replayed["rows"] == carried.total() and carried["prompt and window"] >= 3
    shared_answers, shared_losses, shared_weights = run(None, monkeypatch, Counter())
    assert answers == shared_answers and len({*map(tuple, answers)}) > 3
    assert losses == pytest.approx(shared_losses, rel=1e-10)
    for name, wanted in shared_weights.items():
        assert float((weights[name] - wanted).norm() / wanted.norm()) <= 1e-9
