"""Jobs whose windows pass layers together get the gradients that each gets alone, in float64; examples,
weights and cuts are drawn anew in every run."""

import itertools
import math
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.plan import BasePlan, BaseResult, TrainingSegment
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.kernels.lora.segments import LoraSegments
from coserve.schedule.segments import training_segment
from coserve.train import backward
from coserve.train.backward import BackwardWindow, LayerGradients
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.worker.deterministic import DeterministicWorker
from models import VOCABULARY, Exact, tiny
from training_runs import TrainingRun, adopt

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Job:
    """A job on examples of these lengths. Its windows are cut at row `cut`, and paused at layer `rests` of
    their backward pass."""

    method: object
    lengths: tuple[int, ...] = (24,)
    keep: SavePolicy = SavePolicy.EVERYTHING
    cut: int | None = None
    rests: int | None = None
    poison: bool = False
    seed: int = field(default_factory=lambda: secrets.randbits(32))


LORA = LoRAConfig(rank=4)
GROUPS: dict[str, list[Job]] = {
    "alike": [Job(LORA), Job(LORA), Job(LORA), Job(LORA)],
    "of many examples": [Job(LORA, (9, 3, 12)), Job(LORA, (24,)), Job(LORA, (23, 1))],
    "cut": [Job(LORA, (10, 14), cut=5), Job(LORA, (24,), cut=9), Job(LORA, (7, 17), cut=17)],
    "put down": [Job(LORA, rests=1), Job(LORA, rests=2), Job(LORA), Job(LORA, cut=11, rests=1)],
    "unlike": [
        Job(LoRAConfig(rank=3, alpha=2.0), keep=SavePolicy.PRUNED),
        Job(LoRAConfig(rank=4, targets=("up_proj", "down_proj")), (8, 8, 8), SavePolicy.INPUTS),
        Job(LoRAConfig(rank=4, targets=("layers.2.mlp.gate_proj",))),
        Job(LoRAConfig(rank=4, dora=True), (16,)),
        Job(LoRAConfig(rank=4, dropout=0.3), (30, 2), cut=11),
        Job(IA3Config(), (20,), SavePolicy.PRUNED),
        Job(BottleneckConfig(width=4), (12, 12)),
        Job(PrefixTuningConfig(tokens=3), (9, 15), cut=12),
        Job(PromptTuningConfig(tokens=3), (11, 10), rests=2),
    ],
}

# Of these also where layers read others' keys and values.
SHARING = ("of many examples", "cut", "put down")


def drawn(engine: Engine, name: str, job: Job) -> AdapterVersion:
    """A fresh adapter, moved: B at zero would have A's gradient be zero."""
    generator = torch.Generator().manual_seed(job.seed)
    fresh = fresh_adapter(engine.base, name, job.method, job.seed)
    moved = {
        n: p + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in fresh.parameters().items()
    }
    if job.poison:
        moved[next(iter(moved))].fill_(math.nan)
    return fresh.with_parameters(moved)


def examples(job: Job) -> list[Example]:
    draws = random.Random(job.seed)
    made = []
    for length in job.lengths:
        tokens = [draws.randrange(1, VOCABULARY) for _ in range(length)]
        made.append(Example(tuple(tokens), (*tokens[1:], -100)))
    return made


def begin(engine: Engine, name: str, job: Job) -> MicroBatch:
    config = TrainingConfig(batch_size=len(job.lengths), keep=job.keep)
    run = TrainingRun(
        engine.base, engine.executor.worker.loaded, name, drawn(engine, name, job), examples(job), config
    )
    adopt(engine, run)
    (micro_batch,) = run.next_step(itertools.count(secrets.randbits(30)))
    return micro_batch


def pieces(job: Job, batch: MicroBatch, direction: Direction) -> Iterator[TrainingSegment]:
    """A job's segments one way, in their order."""
    parts = [(0, batch.length)]
    if job.cut is not None:
        parts = [(0, job.cut), (job.cut, batch.length - job.cut)]
    depth = batch.layers
    if direction is Direction.LOSS:
        yield training_segment(batch, 0, batch.length, direction, Span(depth, depth + 1))
        return
    spans = [Span(0, depth)]
    if direction is Direction.BACKWARD:
        parts.reverse()
        spans = [Span(0, depth)] if job.rests is None else [Span(job.rests, depth), Span(0, job.rests)]
    for start, rows in parts:
        for span in spans:
            yield training_segment(batch, start, rows, direction, span)


def travel(engine: Engine, jobs: dict[str, Job]) -> dict[str, dict[str, Tensor]]:
    """All jobs there and back, the n-th pieces of all in one step; their gradients."""
    batches = {name: begin(engine, name, job) for name, job in jobs.items()}
    for direction in (Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD):
        columns = [list(pieces(job, batches[name], direction)) for name, job in jobs.items()]
        for step in itertools.zip_longest(*columns):
            engine.executor.run(BasePlan(training=tuple(segment for segment in step if segment is not None)))
    found = {}
    for name in jobs:
        masters = engine.executor.worker.sessions.pop(name).weights.optimizer.weights
        found[name] = {n: m.grad.clone() for n, m in masters.items() if m.grad is not None}
    return found


def make_engine(name: str = "llama", **fields: object) -> Engine:
    config = EngineConfig(calibrate=False, cache_tokens=64, **fields)  # type: ignore[arg-type]
    return Engine(tiny(name, torch.float64), config)


def named(jobs: Sequence[Job]) -> dict[str, Job]:
    return {f"job {i}": job for i, job in enumerate(jobs)}


def expect_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], whose: str) -> None:
    assert got.keys() == wanted.keys() and got, whose
    for name, gradient in wanted.items():
        error = float((got[name] - gradient).norm() / gradient.norm().clamp_min(1e-30))
        assert error <= TOLERANCE, f"{whose}, {name}: {error}"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of windows that passed a layer together, pass by pass."""
    found: list[int] = []
    real = backward.layer_gradients

    def counting(layer: int, windows: Sequence[BackwardWindow], *check: object) -> list[LayerGradients]:
        if len(windows) > 1:
            found.append(len(windows))
        return real(layer, windows, *check)  # type: ignore[arg-type]

    monkeypatch.setattr(backward, "layer_gradients", counting)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "llama") for kind in GROUPS), *((kind, "gemma4_text") for kind in SHARING)]
)
def test_gradients_are_those_of_a_job_alone(kind: str, name: str, passes: list[int]) -> None:
    jobs = named(GROUPS[kind])
    with Exact():
        engine = make_engine(name)
        together = travel(engine, jobs)
        assert max(passes) > 1, "nothing went together"
        passes.clear()
        for name, job in jobs.items():
            expect_equal(together[name], travel(engine, {name: job})[name], name)
        assert not passes


def test_low_rank_products_of_all_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """At all seven linears of every layer, there and back, whatever their ranks and numbers of rows."""
    together: list[int] = []
    real = LoraSegments.__init__

    def counting(self: LoraSegments, *given: object) -> None:
        real(self, *given)  # type: ignore[arg-type]
        together.append(len(self.weights.a))

    engine = make_engine()  # which trains a little itself, to prove its base
    monkeypatch.setattr(LoraSegments, "__init__", counting)
    linears = 7 * engine.base.depth
    travel(engine, named(GROUPS["alike"]))
    assert together == [len(GROUPS["alike"])] * 2 * linears
    together.clear()
    other = LoRAConfig(rank=3)
    travel(engine, named([Job(LORA), Job(other), Job(LORA), Job(other), Job(LORA, (12,))]))
    assert together == [5] * 2 * linears


def test_a_nan_in_one_job_reaches_no_other() -> None:
    jobs = named([Job(LORA), Job(LORA, poison=True), Job(LORA, poison=True, lengths=(20, 4)), Job(LORA)])
    with Exact():
        engine = make_engine()
        together = travel(engine, jobs)
        for name, job in jobs.items():
            if job.poison:
                assert any(gradient.isnan().any() for gradient in together[name].values())
            else:
                expect_equal(together[name], travel(engine, {name: job})[name], name)


def test_where_memory_is_short_they_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with what later windows owe to earlier ones, which the store gives once."""
    jobs = named(GROUPS["cut"])
    tried = []

    def failing(layer: int, windows: Sequence[BackwardWindow], *check: object) -> list[LayerGradients]:
        found = real(layer, windows, *check)  # type: ignore[arg-type]
        if len(windows) == 1:
            return found
        tried.append(layer)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    real = backward.layer_gradients
    with Exact():
        engine = make_engine()
        wanted = {name: travel(engine, {name: job})[name] for name, job in jobs.items()}
        monkeypatch.setattr(backward, "layer_gradients", failing)
        together = travel(engine, jobs)
        assert tried
        for name in jobs:
            expect_equal(together[name], wanted[name], name)


def test_a_job_that_breaks_their_pass_fails_alone_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is no lack of memory, which narrower passes would mend: the others' plan runs to its end, and
    nobody is told to plan them alone."""
    jobs, results = named(GROUPS["alike"][:3]), list[BaseResult]()

    def broken(layer: int, windows: Sequence[BackwardWindow], *check: object) -> list[LayerGradients]:
        batches = engine.executor.worker.sessions["job 1"].micro_batches.values()
        if any(vars(batch).get("backward") is window.backward for window in windows for batch in batches):
            raise ValueError("shapes do not match")
        return real(layer, windows, *check)  # type: ignore[arg-type]

    def run(plan: BasePlan) -> BaseResult:
        results.append(plain(plan))
        return results[-1]

    real = backward.layer_gradients
    with Exact():
        engine = make_engine()
        wanted = {name: travel(engine, {name: job})[name] for name, job in jobs.items()}
        plain = engine.executor.run
        monkeypatch.setattr(engine.executor, "run", run)
        monkeypatch.setattr(backward, "layer_gradients", broken)
        together = travel(engine, jobs)
        for name in ("job 0", "job 2"):
            expect_equal(together[name], wanted[name], name)
    assert [str(error) for result in results for error in result.failed.values()] == [
        "job job 1 failed: ValueError: shapes do not match"
    ]
    assert not any(result.together_failed or result.paused for result in results)


def test_no_more_rows_go_together_than_there_is_memory_for(passes: list[int]) -> None:
    engine = make_engine(scheduler={"max_training_rows": 50})
    travel(engine, named([Job(LORA) for _ in range(5)]))
    assert set(passes) == {2}


@pytest.mark.local
def test_jobs_of_an_engine_learn_what_they_learn_alone(passes: list[int]) -> None:
    """Through the scheduler, whole jobs of several steps, one of which is cancelled on its way."""
    config = TrainingConfig(batch_size=2, epochs=3, learning_rate=1e-3)
    draws = random.Random(secrets.randbits(32))
    data = {f"job {i}": examples(Job(LORA, tuple(draws.randint(8, 40) for _ in range(4)))) for i in range(4)}

    def learn(names: Sequence[str], cancelled: str | None = None) -> dict[str, dict[str, Tensor]]:
        engine = make_engine()
        handles = {n: engine.finetune(data[n], n, LORA, config, job=n) for n in names}
        while any(handle.is_under_way for handle in handles.values()):
            engine.step()
            if cancelled is not None and len(handles[cancelled].history) == 2 and passes:
                handles[cancelled].cancel()
                cancelled = None
        return {n: dict(engine.adapters.weights(n).parameters()) for n in names}

    with Exact():
        together = learn(list(data), cancelled="job 1")
        assert max(passes, default=0) > 1
        for name in data.keys() - {"job 1"}:
            alone = learn([name])[name]
            for parameter, value in together[name].items():
                torch.testing.assert_close(value, alone[parameter], rtol=1e-8, atol=1e-11)


@pytest.mark.local
def test_the_deterministic_mode_keeps_everybody_apart(passes: list[int]) -> None:
    engine = make_engine(deterministic=True)
    assert isinstance(engine.executor.worker, DeterministicWorker)
    travel(engine, named(GROUPS["alike"]))
    assert not passes
