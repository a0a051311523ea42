"""Windows of training by graph compute what launched ones do: losses, and weights after several steps.

Graphs are their plain twin, which computes anew from the tensors that a graph reads. Float64 throughout, in
which two ways to the same result differ by rounding only.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.schedule.cost import CostModel
from coserve.train.example import Example
from coserve.worker import training_graphs
from coserve.worker.cuda_graphs import Record, rerun
from coserve.worker.fused_pass import FusedPass
from coserve.worker.training_graphs import TrainingGraphs
from models import Exact, tiny

VOCABULARY, KEEPS = 97, (SavePolicy.INPUTS, SavePolicy.PRUNED, SavePolicy.EVERYTHING)
Found = tuple[dict[str, list[float]], dict[str, dict[str, Tensor]], Counter[tuple[bool, int, int]]]


def trained(
    record: Record | None,
    model: str,
    jobs: Sequence[tuple[LoRAConfig, SavePolicy, Sequence[int]]],
    rows: int,
    patch: pytest.MonkeyPatch,
    **config: Any,
) -> Found:
    """Losses of jobs (method, what is kept, lengths of examples) that train at once in windows of up to
    `rows` rows, beside an answer that ends early; their weights; and replays, by direction and buckets."""
    replays = Counter[tuple[bool, int, int]]()
    captured = TrainingGraphs._captured

    def noted(self: TrainingGraphs, kind: Any, *given: Any) -> Any:
        graph = captured(self, kind, *given)
        assert graph is not None

        def replay() -> Tensor:
            replays[kind.is_back, kind.store.rows, kind.store.past] += 1
            return graph()

        return replay

    patch.setattr(TrainingGraphs, "_captured", noted)
    patch.setattr(training_graphs, "WORTH", 1)
    patch.setattr(CostModel, "observe", lambda *_: None)  # the same plans
    patch.setattr(FusedPass, "recorder", lambda _: record)
    draws = random.Random(3)
    with Exact():
        scheduler = {"max_training_rows": rows, "min_training_rows": rows, "quantum": 1e3, "max_quantum": 1e3}
        settings = {"calibrate": False, "cache_tokens": 1024, "page_size": 16, **config}
        base = tiny(model, torch.float64, vocab_size=VOCABULARY, max_position_embeddings=4096)
        engine = Engine(base, EngineConfig(scheduler=scheduler, **settings))
        answer = engine.generate(
            [5, 6, 7], sampling=SamplingParams(max_tokens=2, ignore_eos=True), text=False
        )
        handles = []
        for number, (method, keep, lengths) in enumerate(jobs):
            data = [[draws.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
            examples = [Example(tuple(one), tuple(one)) for one in data]
            training = TrainingConfig(batch_size=len(data), epochs=2, rows=4096, keep=keep, seed=number)
            handles.append(engine.finetune(examples, f"job {number}", method, training))
        engine.run()
        assert len(answer.tokens) == 2
        for handle in handles:
            handle.result()
        losses = {handle.adapter: [step.loss for step in handle.history] for handle in handles}
        weights = {handle.adapter: engine.adapters.weights(handle.adapter).parameters() for handle in handles}
    return losses, weights, replays


def expect_same(found: Sequence[Found]) -> Counter[tuple[bool, int, int]]:
    (losses, weights, launched), (got, have, replays) = found
    assert not launched and got.keys() == losses.keys()
    for job in losses:
        assert got[job] == pytest.approx(losses[job], rel=0, abs=1e-9) and len(got[job]) == 2
        for name, tensor in weights[job].items():
            torch.testing.assert_close(have[job][name], tensor, rtol=0, atol=1e-9)
    return replays


@pytest.mark.local
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_windows_by_graph_are_what_launched_ones_are(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are cut and packed anywhere, so that windows go on with some, and have padding behind them;
    jobs of two ranks share no tensor, those of one rank take turns with it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draws = random.Random(seed)
    rows = draws.choice([48, 100, 128])
    methods = [LoRAConfig(rank=rank, alpha=alpha) for rank, alpha in ((4, 8), (4, 8), (3, 16))]
    jobs = []
    for method in methods:
        lengths = [draws.randint(2, 2 * rows) for _ in range(draws.randint(1, 3))]
        jobs.append((method, draws.choice(KEEPS), lengths))
    found = []
    for record in (None, rerun):
        with monkeypatch.context() as patch:
            found.append(trained(record, model, jobs, rows, patch))
    replays = expect_same(found)
    assert {is_back for is_back, *_ in replays} == {False, True}
    print(rows, jobs, replays)
