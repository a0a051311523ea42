"""Every counter that a figure is made of, against an independent count: examples times their length, tokens
in the handles of answers, rows in the plans, bytes of the tensors that are there."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.events import Event, StepDone, TokenEvent, TrainingProgress
from coserve.core.plan import BasePlan, Updated
from coserve.core.request import SLO
from coserve.core.sequence import Direction
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.loop import StepLoop
from coserve.errors import ServerError
from coserve.executors.local import LocalExecutor
from coserve.memory.arena import Lease
from coserve.simulate import driven
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.train.fresh import fresh_adapter
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import TimedJob, TimedRequest, Workload, greedy, training_tokens
from coserve.workload.shapes import shape_named
from coserve_benchmarks import coserving, drive, finetune, inference, ours, overhead, remote, stepping
from coserve_benchmarks.adapters import decode, figure, swap, training
from coserve_benchmarks.adapters.approaches import Batch
from coserve_benchmarks.adapters.run import run_adapters
from coserve_benchmarks.adapters.sizes import AdapterSizes, adapter_bytes
from coserve_benchmarks.floors import decode_bytes, pairs_flops, prefill_flops
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.memory import activations, eight_bits, limited, quantized
from coserve_benchmarks.memory.peers import OURS, peer_of
from coserve_benchmarks.methods import mixed
from coserve_benchmarks.ours import (
    Bench,
    batch_tokens,
    make_engine,
    seconds_of_steps,
    seconds_of_tokens,
)
from coserve_benchmarks.peers import PeftTraining, StaticGenerate
from coserve_benchmarks.plans import local_sessions, watch_plans
from coserve_benchmarks.policies.without.training import PeftTrainer
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import TINY
from coserve_benchmarks.streams import StreamRequest, StreamResult, Streams
from coserve_benchmarks.timing import Timing

SHAPE = shape_named("tiny")
LENGTH = 24


class AnyKey(dict[str, None]):
    """Bars of a table that has every key."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> None:
        return None


@pytest.fixture
def bench() -> Bench:
    results = Results({})
    results._bars = AnyKey()
    return Bench(SHAPE, TINY, measure_machine(quick=True), results)


class StepClock:
    """A clock in place of a module's `time`: a second for every step of an engine and none beside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.steps = 0
        step = StepLoop.step

        def counted(loop: StepLoop[Engine], interruptible: bool) -> list[Event]:
            self.steps += 1
            return step(loop, interruptible)

        monkeypatch.setattr(StepLoop, "step", counted)
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return float(self.steps)


# Answers and training under a load


class Watch:
    """An engine's clock and a module's `time`: a look takes a tenth of a millisecond, a nap what it says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)

    def process_time(self) -> float:
        return self.now


def job_of(examples: int, batch: int, epochs: int = 1, name: str = "trained") -> TimedJob:
    data = training_tokens([LENGTH] * examples, SHAPE.vocabulary)
    return TimedJob(0.0, name, tuple(data), batch, epochs=epochs)


@pytest.mark.parametrize("keep", [SavePolicy.EVERYTHING, SavePolicy.INPUTS])
def test_a_load_counts_tokens_of_answers_and_of_whole_optimizer_steps(
    keep: SavePolicy, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, of 5 examples twice and of 4 once, two at a time: 3 + 3 and 2 optimizer steps. The clock
    hardly moves while there is work, so all of it lies within the load."""
    watch = Watch()
    monkeypatch.setattr(driven, "time", watch)
    jobs: list[Any] = []
    start = drive.start_job

    def started(engine: Engine, job: TimedJob) -> Any:
        jobs.append(start(engine, job, keep))
        return jobs[-1]

    monkeypatch.setattr(drive, "start_job", started)
    engine = make_engine(bench, calibrate=False)
    engine.clock = watch
    asked: list[Completion] = []
    generate = engine.generate

    def kept(*given: Any) -> Completion:
        asked.append(generate(*given))
        return asked[-1]

    monkeypatch.setattr(engine, "generate", kept)
    lengths = (7, 1, 4)
    requests = tuple(TimedRequest(i, (5, 6, 7 + i), n) for i, n in enumerate(lengths))
    given = job_of(5, 2, epochs=2), job_of(4, 2, name="other")
    load = drive.serve(engine, Workload("w", "W", 4.0, requests, given))
    assert [job.status for job in jobs] == ["succeeded"] * 2
    assert [len(answer.tokens) for answer in load.answers] == list(lengths)
    assert [len(handle.tokens) for handle in asked] == list(lengths)
    assert load.output_rate() * load.seconds == pytest.approx(sum(lengths))
    tokens = (5 * 2 + 4) * LENGTH
    assert sum(trained for _, trained in load.trained) == pytest.approx(tokens)
    assert load.training_rate() * load.seconds == pytest.approx(tokens)
    assert sum(row[2] for row in load.per_second()) == pytest.approx(tokens)
    assert sum(row[1] for row in load.per_second()) == sum(lengths)
    assert len(load.losses) == 3 * 2 + 2
    assert sorted(load.losses) == sorted(updated.loss for job in jobs for updated in job.history)


class ScriptedEngine:
    """An engine whose steps bring what is written down."""

    def __init__(self, *steps: list[Event]) -> None:
        self._steps, self.ran = steps, 0

    def step(self) -> list[Event]:
        self.ran += 1
        return self._steps[(self.ran - 1) % len(self._steps)]

    def perf_counter(self) -> float:
        return float(self.ran)


def passed(rows: float) -> TrainingProgress:
    return TrainingProgress("job", 1, Direction.BACKWARD, rows)


def stepped() -> StepDone:
    return StepDone("job", Updated(1, 1.0, 1, 1.0, 1.0, "version"))


def test_seconds_of_tokens_and_of_steps_by_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens a second: twelve take 2.4 of three seconds. Steps count wherever they come."""
    script = ScriptedEngine([passed(6), passed(4)])
    monkeypatch.setattr(ours, "time", script)
    assert seconds_of_tokens(script, 12) == pytest.approx(2.4)  # type: ignore[arg-type]
    script = ScriptedEngine([], [stepped(), stepped()], [passed(9)], [stepped()])
    monkeypatch.setattr(ours, "time", script)
    assert seconds_of_steps(script, 3) == 4.0  # type: ignore[arg-type]
    assert seconds_of_steps(script, 1) == 2.0  # type: ignore[arg-type]


def trained_rows(engine: Engine, work: Callable[[], object]) -> Counter[Direction]:
    """Rows of training in the plans that the engine runs meanwhile, each as often as layers' share it passes,
    by direction."""
    rows: Counter[Direction] = Counter()

    def look(plan: BasePlan) -> None:
        for segment in plan.training:
            rows[segment.direction] += segment.length * len(segment.span)

    with watch_plans(engine, look):
        work()
    return rows


def test_seconds_of_tokens_are_those_of_tokens_that_went_there_and_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many that the job makes three whole optimizer steps, each step of the engine a second."""
    engine = make_engine(bench, cache_tokens=1024)
    job = ours.start_training(engine, bench, "bench", SavePolicy.EVERYTHING)
    tokens = 3 * bench.settings.batch * bench.settings.length
    clock = StepClock(monkeypatch, ours)
    seconds = seconds_of_tokens(engine, tokens)
    assert seconds == pytest.approx(clock.steps)  # what it trained is what it was asked for, to the row
    engine.step()  # the update that is due
    assert len(job.history) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_seconds_of_steps_are_those_of_the_jobs_own_history(
    count: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(bench, cache_tokens=1024)
    job = ours.start_training(engine, bench, "bench", SavePolicy.EVERYTHING)
    clock = StepClock(monkeypatch, ours)
    assert seconds_of_steps(engine, count) == clock.steps
    assert len(job.history) == count
    assert sum(u.tokens for u in job.history) == count * bench.settings.batch * bench.settings.length


# Tokens of a round


def figures_of(bench: Bench) -> Mapping[str, float]:
    return {name: figure.value for name, figure in bench.results.figures.items()}


def test_fine_tuning_tokens_are_those_of_a_mini_batch_of_ours_and_of_the_peers(bench: Bench) -> None:
    """Two seconds a round: the rate is half of the rows that are in the plans of an optimizer step, over the
    layers and the tail, and half of the ids that the peer is given."""
    finetune._figure(bench, "finetune.ours", Timing((2.0, 2.0, 2.0)), recompute=False)
    engine = finetune._training_engine(bench, SavePolicy.EVERYTHING)
    rows = trained_rows(engine, lambda: seconds_of_steps(engine))
    tokens = 2 * figures_of(bench)["finetune.ours"]
    assert rows[Direction.TRAIN_FORWARD] == rows[Direction.BACKWARD] == tokens * SHAPE.layers
    assert rows[Direction.LOSS] == tokens
    peer = PeftTraining(SHAPE, batch_tokens(bench), 8, matched=True)
    seen = ids_seen(peer._base)
    peer.step(checkpointing=False)
    assert seen == [tokens]


def test_output_tokens_are_those_in_the_handles_and_in_the_peers_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference._figure(bench, "inference.ours", Timing((2.0,)))
    tokens = 2 * figures_of(bench)["inference.ours"]
    engine, prompts = make_engine(bench, calibrate=False), inference._prompts(bench)
    came = 0
    step = engine.loop.step

    def counted(interruptible: bool) -> list[Event]:
        nonlocal came
        events = step(interruptible)
        came += sum(isinstance(event, TokenEvent) and event.token is not None for event in events)
        return events

    monkeypatch.setattr(engine.loop, "step", counted)
    inference.answer_all(engine, prompts, bench.settings.answer)
    assert came == tokens
    peer = StaticGenerate(SHAPE, prompts, bench.settings.answer)
    made: list[Tensor] = []
    generate = peer._model.generate

    def kept(*given: Any, **more: Any) -> Tensor:
        made.append(generate(*given, **more))
        return made[-1]

    peer._model.generate = kept
    peer()
    assert made[0].numel() - sum(map(len, prompts)) == tokens


class Counted:
    """In place of a module's `alternate`: every contestant has one round of a second. `rounds` are the tokens
    that engines answered and trained in each, by events and by optimizer steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.rounds: list[tuple[str, int, int]] = []
        self._answered = self._trained = 0
        step = StepLoop.step

        def counted(loop: StepLoop[Engine], interruptible: bool) -> list[Event]:
            events = step(loop, interruptible)
            for event in events:
                self._answered += isinstance(event, TokenEvent) and event.token is not None
                self._trained += event.updated.tokens if isinstance(event, StepDone) else 0
            return events

        monkeypatch.setattr(StepLoop, "step", counted)
        for module in modules:
            monkeypatch.setattr(module, "alternate", self)

    def __call__(
        self, contestants: Mapping[str, Callable[[], float]], *_: Any, **__: Any
    ) -> dict[str, Timing]:
        for name, run in contestants.items():
            self._answered = self._trained = 0
            run()
            self.rounds.append((name, self._answered, self._trained))
        return {name: Timing((1.0,)) for name in contestants}


def test_rates_of_answers_are_the_tokens_of_a_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, inference, eight_bits, quantized)
    monkeypatch.setattr(eight_bits, "logit_errors", lambda texts: (0.0, 0.0))
    assert inference.capacity(bench) == counted.rounds[-1][1] > 0
    eight_bits.measure_eight_bits(bench)
    figures = figures_of(bench)
    for kind, answered, _ in counted.rounds[-2:]:
        assert figures[f"cache8.{kind}_rate"] == answered > 0
    before = len(counted.rounds)
    monkeypatch.setattr(quantized, "QUANTIZED", ())
    monkeypatch.setattr(quantized, "_BATCHES", (2, 5))
    quantized._speeds(bench)
    figures = figures_of(bench)
    (_, few, _), (_, many, _), (_, _, trained) = counted.rounds[before:]
    assert figures["quantized.decode[none,2]"] == few > 0
    assert figures["quantized.decode[none,5]"] == many > few
    assert figures["quantized.training[none]"] == trained > 0


def test_rates_of_training_are_the_tokens_of_a_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, finetune, activations, training)
    assert finetune.peak(bench) == counted.rounds[-1][2] > 0
    peer = peer_of("ia3", SHAPE, activations.held_tokens(bench))
    activations._measure(bench, "ia3", peer, 1000, "", SavePolicy.PRUNED)
    figures = figures_of(bench)
    assert figures["activations.ours_speed[ia3]"] == counted.rounds[-2][2] > 0
    assert figures["activations.peer_speed[ia3]"] == peer._ids.numel()
    before = len(counted.rounds)
    training.run(bench, AdapterSizes.of(TINY, SHAPE, quick=True))
    figures = figures_of(bench)
    ours = {name: trained for name, _, trained in counted.rounds[before:] if trained}
    assert ours == {
        "one": figures["train.tokens[one]"],
        "many": figures["train.tokens[many]"],
        "together": figures["train.small[together]"],
    }


def test_tokens_through_http_are_those_that_clients_received(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second each; a client that does not get all of its tokens ends the bench."""
    received: list[int] = []
    short = 0

    class Clients:
        processor_seconds = 0.0

        def __init__(self, url: str, model: str, asks: Sequence[StreamRequest]) -> None:
            self._asks = asks

        def __enter__(self) -> "Clients":
            return self

        def __exit__(self, *_: object) -> None: ...

        def result(self) -> list[StreamResult]:
            received[:] = [ask.answer - short for ask in self._asks]
            return [StreamResult(0.0, ended=1.0, written=count, attempts=1) for count in received]

    monkeypatch.setattr(overhead, "Clients", Clients)
    counted = Counted(monkeypatch, overhead)
    served: Any = SimpleNamespace(url="", name="")
    overhead.run(bench, served)
    figures = figures_of(bench)
    assert figures["overhead.http"] == sum(received) > 0
    assert figures["overhead.direct"] == counted.rounds[-1][1]
    short = 1
    with pytest.raises(ServerError, match="cut short"):
        overhead.run(bench, served)


def test_products_beside_a_decode_step_are_those_of_the_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(bench, calibrate=False)
    assert isinstance(engine.executor, LocalExecutor)
    answers = [engine.generate([1, 2, number], sampling=greedy(8)) for number in range(3, 8)]
    while any(len(answer.tokens) < 2 for answer in answers):
        engine.step()
    called: Counter[tuple[int, int]] = Counter()  # the placement, and its rows
    for linear in engine.executor.worker.base.linears.values():
        own = linear.placement

        def counted(x: Tensor, own: Any = own, forward: Any = own.forward) -> Tensor:
            called[id(own), x.shape[:-1].numel()] += 1
            return forward(x)  # type: ignore[no-any-return]

        monkeypatch.setattr(own, "forward", counted)
    engine.step()
    by_the_step = Counter(called)
    called.clear()
    for product in stepping.products(engine.executor.worker.base, len(answers)):
        product()
    assert called == by_the_step and called.total() == len(engine.executor.worker.base.linears)


def test_a_kernel_clock_counts_kernels_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes a second by this time, and whatever else happens is not counted."""
    passed, names = 0.0, list[str]()

    class Library:
        def __getattr__(self, name: str) -> Any:
            def kernel(*args: Any) -> None:
                nonlocal passed
                passed += 1.0
                names.append(name)

            return kernel

    library = Library()
    monkeypatch.setattr(stepping.ops, "loaded", lambda like: library)
    monkeypatch.setattr(stepping.time, "perf_counter", lambda: passed)
    clock = stepping.KernelClock()
    x, weight = torch.ones(2, 4).bfloat16(), torch.ones(4).bfloat16()
    for _ in range(2):  # a round begins anew
        with clock:
            passed += 5.0  # of anything else
            stepping.ops.rms_norm(x, weight, 1e-6, False)
            stepping.ops.silu_mul(x, x)
        assert clock.seconds == 2.0
    stepping.ops.silu_mul(x, x)
    assert clock.seconds == 2.0 and names == ["rms_norm", "silu_mul"] * 2 + ["silu_mul"]


def test_a_decode_step_is_one_of_the_engines(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts steps each bench's figure of a step is one second, and of a round its steps."""
    engine = make_engine(bench, calibrate=False)
    clock = StepClock(monkeypatch, decode, mixed, remote)
    sizes = AdapterSizes.of(TINY, SHAPE, quick=True)
    assert decode.decode_seconds(engine, bench, sizes, [None]) == 1.0
    assert mixed._decode_seconds(engine, bench, [None, None], 5) == 5.0  # type: ignore[list-item]
    assert remote.decode_step(bench, engine, 3)() == 1.0
    updated: list[int] = []
    with watch_plans(engine, lambda plan: updated.extend(clock.steps for _ in plan.updates)):
        a_step = remote._train(bench, engine, SavePolicy.INPUTS)()
    assert a_step == (updated[remote._TRAINING_STEPS] - updated[0]) / remote._TRAINING_STEPS


def ids_seen(model: Any) -> list[int]:
    """Ids that each call of a transformers model is given, as they come."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    return seen


@pytest.mark.parametrize(("jobs", "batch", "length", "steps"), [(1, 3, 8, 1), (4, 1, 6, 1), (2, 1, 16, 3)])
def test_trainers_train_the_tokens_they_are_timed_by(
    jobs: int, batch: int, length: int, steps: int, bench: Bench
) -> None:
    trainers = training.Trainers(bench, jobs, batch, length, steps)
    trainers()
    assert [len(job.history) for job in trainers.jobs] == [steps] * jobs
    assert sum(updated.tokens for job in trainers.jobs for updated in job.history) == trainers.tokens
    training._figure(bench, "train.tokens", trainers.tokens, Timing((2.0, 1.0, 4.0)))
    assert figures_of(bench)["train.tokens"] == jobs * batch * length * steps / 2.0


def test_one_after_the_other_trains_what_all_do_together(bench: Bench) -> None:
    sizes = AdapterSizes.of(TINY, SHAPE, quick=True)
    peer = PeftTraining(SHAPE, training_tokens([sizes.job_tokens], SHAPE.vocabulary), 8, matched=True)
    seen = ids_seen(peer._base)
    training._one_after_the_other(peer, sizes)
    together = training.Trainers(bench, sizes.jobs, 1, sizes.job_tokens, sizes.job_steps)
    assert sum(seen) == together.tokens


def test_points_of_the_figure_count_rows_times_their_length() -> None:
    batch = Batch(ranks=(8, 16), shares=(3, 2), length=7)
    point = figure._point("task", "batch", 2, batch, "coserve", Timing((2.0, 1.0, 4.0)))
    ids = torch.arange(batch.tokens).view(batch.rows, batch.length)
    assert ids.shape == (5, 7)
    assert (point["tokens_per_s"], point["batch"], point["present"]) == (35 / 2.0, 5, 2)


def test_jobs_of_the_alternatives_count_the_ids_that_the_model_saw() -> None:
    trainer = PeftTrainer(SHAPE, (job_of(5, 2),), matched=True)
    seen = ids_seen(trainer._model)
    steps = []
    while trainer.has_work(1.0):
        steps.append(trainer.step()[0])
    assert steps == [2 * LENGTH, 2 * LENGTH, LENGTH] == seen


# Shares of a co-serving run


def test_efficiency_is_the_sum_of_both_shares() -> None:
    """80 output tokens and 300 fine-tuning tokens in two seconds, of 100 and 600 a second."""
    answers = [AnswerTimes(0.0, [0.02 * i for i in range(1, 81)])]
    load = LoadResult(0.0, 2.0, answers, trained=[(1.0, 100.0), (2.0, 200.0)])
    terms = coserving._Terms(1.0, SLO(), capacity=100.0, peak=600.0)
    assert terms.efficiency(load) == pytest.approx(80 / 2 / 100 + 300 / 2 / 600)
    assert terms.score("x", load).efficiency == terms.efficiency(load)
    assert terms.efficiency(load, 0.5, 1.0) == pytest.approx(31 / 100 + 200 / 600)


def test_the_fused_share_is_of_the_plans_that_ran(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs without end beside every answer: all plans with answers could train."""
    engine = make_engine(bench, calibrate=False)
    plans: list[BasePlan] = []
    start = coserving._start_jobs

    def started(*given: Any) -> None:
        start(*given)
        plans.clear()

    monkeypatch.setattr(coserving, "_start_jobs", started)
    with watch_plans(engine, plans.append):
        scored, share, steps = coserving._ours(bench, engine, coserving._Terms(20.0, SLO(), 1.0, 1.0))
    asked, answers = len(scored.load.answers), [len(answer.tokens) for answer in scored.load.answers]
    assert asked > 3 and answers == [bench.settings.answer] * asked
    answering = [plan for plan in plans if plan.inference]
    fused = [plan for plan in answering if plan.training]
    assert fused and share == pytest.approx(len(fused) / len(answering))
    recorded = [step.inference for step in steps if step.inference and step.training]
    assert recorded == [sum(segment.length for segment in plan.inference) for plan in fused]


# Bytes


def storages(*roots: object) -> dict[int, int]:
    """Bytes of the storages of all tensors in these objects, by address, each once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    open_ = list(roots)
    while open_:
        thing = open_.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, Mapping):
            open_ += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            open_ += thing
        elif type(thing).__module__.startswith("coserve.") and not isinstance(thing, Lease):
            open_ += [getattr(thing, name) for name in (*vars_of(thing),)]
    return found


def vars_of(thing: object) -> Iterator[str]:
    yield from getattr(thing, "__dict__", ())
    for kind in type(thing).__mro__:
        yield from (name for name in getattr(kind, "__slots__", ()) if hasattr(thing, name))


def held_now(engine: Engine, job: str) -> int:
    """Bytes of all tensors that the micro-batches of a job store for the way back."""
    stores = [m.store for m in local_sessions(engine)[job].micro_batches.values() if "store" in vars(m)]
    return sum(storages(*((store.hidden, store.saved, store.kv) for store in stores)).values())


def forget_pieces(engine: Engine) -> None:
    """Frees what calibration has left in the arena: a tensor may lie in a piece of up to twice its size, of
    which its own bytes count."""
    assert isinstance(engine.executor, LocalExecutor)
    engine.executor.worker.arena.empty()


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("keep", [SavePolicy.PRUNED, SavePolicy.INPUTS, SavePolicy.EVERYTHING])
def test_held_bytes_are_those_of_the_tensors_that_are_there(
    method: str, keep: SavePolicy, bench: Bench
) -> None:
    engine = activations.training_engine(bench, method, keep, window=32)
    forget_pieces(engine)
    most: list[int] = []
    border: list[int] = []

    def look(plan: BasePlan) -> None:
        for segment in plan.training:
            most.append(held_now(engine, segment.job))
            if segment.direction is Direction.TRAIN_FORWARD and segment.span.last == segment.layers:
                border.append(most[-1])

    with watch_plans(engine, look):
        found = activations.held_bytes(engine)
    assert found.peak == max(most) > 0
    assert found.border == border[-1]


def test_bytes_of_a_fine_tuning_row_are_those_of_the_tensors_that_are_there(bench: Bench) -> None:
    engine = finetune._training_engine(bench, SavePolicy.INPUTS)
    forget_pieces(engine)
    found: list[int] = []

    def look(plan: BasePlan) -> None:
        found.extend(
            held_now(engine, segment.job)
            for segment in plan.training
            if segment.direction is Direction.TRAIN_FORWARD and segment.span.last == segment.layers
        )

    with watch_plans(engine, look):
        counted = finetune._activation_bytes(engine)
    assert counted == found[-1] > 0


@pytest.mark.parametrize("method", OURS)
def test_bytes_of_a_peer_are_those_that_autograd_saves(method: str) -> None:
    """By hooks that keep every saved tensor alive, each storage once, without weights."""
    peer = peer_of(method, SHAPE, training_tokens([16] * 3, SHAPE.vocabulary))
    found = peer.saved_bytes()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = peer._model(input_ids=peer._ids, labels=peer._ids, use_cache=False).loss
    weights = {parameter.untyped_storage().data_ptr() for parameter in peer._model.parameters()}
    logits = {t.untyped_storage().data_ptr() for t in saved if t.dim() and t.shape[-1] == SHAPE.vocabulary}
    sizes = {key: size for key, size in storages(*saved).items() if key not in weights}
    assert loss.requires_grad
    assert found == (
        sum(size for key, size in sizes.items() if key not in logits),
        sum(size for key, size in sizes.items() if key in logits),
    )


def test_a_peer_that_checkpoints_keeps_the_input_of_each_layer() -> None:
    """And little else: no more than half as much again. Without, it keeps some twenty times as much."""
    peer = peer_of("lora", SHAPE, training_tokens([16] * 3, SHAPE.vocabulary))
    inputs = 2 * 3 * 16 * SHAPE.hidden * SHAPE.layers
    assert inputs <= peer.saved_bytes(checkpointing=True)[0] < 2 * inputs < peer.saved_bytes()[0] / 4


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_bytes_of_a_cache_are_those_of_its_tensors(kind: str, bench: Bench) -> None:
    engine = make_engine(bench, cache_dtype=kind, calibrate=False)
    assert isinstance(engine.executor, LocalExecutor)
    attention = engine.executor.worker.attention
    keys_and_values = storages(attention._keys, attention._values)
    assert engine.executor.spec.cache_nbytes == sum(keys_and_values.values()) > 0


def test_bytes_that_steps_read_are_those_of_the_tensors(bench: Bench) -> None:
    """An adapter's file and the weights of every linear, by torch's own count."""
    engine = make_engine(bench, calibrate=False)
    drawn = fresh_adapter(engine.base, "one", LoRAConfig(rank=8), 0).in_type(torch.bfloat16)
    assert adapter_bytes(SHAPE, [8]) == sum(storages(*drawn.parameters().values()).values())
    model = SHAPE.build()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    cached = 5 * 7 * SHAPE.layers * 2 * SHAPE.groups * (SHAPE.hidden // SHAPE.heads)
    assert decode_bytes(SHAPE, 5, 7) == 2 * (sum(m.weight.numel() for m in linears) + cached)


def test_operations_of_a_prompt_are_those_that_torch_counts() -> None:
    """Attention of torch's count is over all pairs, of ours over causal ones: half of it and the diagonal."""
    model, ids = SHAPE.build(), torch.arange(2 * 16).view(2, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, logits_to_keep=1)
    linears = sum(
        count for kind, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(kind)
    )
    assert prefill_flops(SHAPE, 2, 16) - 2 * pairs_flops(SHAPE, 2, 16) == linears
    assert pairs_flops(SHAPE, 2, 16) == SHAPE.layers * 2 * sum(
        2 * SHAPE.hidden * (row + 1) for row in range(16)
    )


# Requests


def test_answers_under_a_limit_are_counted_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the job ends; those that are under way then do not count."""
    order = limited.LimitedOrder("tiny", 1, 2, 4, 3, 1, 16, 4, 0)
    engine = limited._engine(order, SHAPE, "auto")
    job = limited._start(engine, order, SHAPE, "one")
    handles: list[Completion] = []
    generate = engine.generate

    def kept(*given: Any, **more: Any) -> Completion:
        handles.append(generate(*given, **more))
        return handles[-1]

    monkeypatch.setattr(engine, "generate", kept)
    counted = limited._load(engine, order, SHAPE, job)
    assert job.status == "succeeded"
    whole = sum(len(handle.tokens) == order.answer for handle in handles)
    assert 0 < counted <= whole <= counted + order.prompts


def test_hits_and_loads_of_paging_are_those_that_requests_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cold rounds alone. A request that finds its adapter under way already has missed, too."""
    loads: list[LoadResult] = []
    serve = swap.serve

    def kept(engine: Engine, workload: Workload) -> LoadResult:
        loads.append(serve(engine, workload))
        return loads[-1]

    monkeypatch.setattr(swap, "serve", kept)
    results = run_adapters("tiny", quick=True, only=["swap"])
    cold = loads[1].answers  # after one that is not counted
    figures = {name: figure["value"] for name, figure in results["figures"].items()}
    missed = sum(answer.kept for answer in cold)
    assert figures["swap.hit_rate"] == pytest.approx(1 - missed / len(cold)) and 0 < missed < len(cold)
    assert 6 < figures["swap.loaded"] <= missed and figures["swap.known"] == 40
    each = adapter_bytes(SHAPE, [8]) / 1e6
    assert figures["swap.loaded_bytes"] == pytest.approx(figures["swap.loaded"] * each, rel=0.01)
    assert results["swap.others_p99_ratio"] > 0 and figures["swap.cold_first_token_p50"] > 0
    assert {f"swap.others_gap_p99[{arm}]" for arm in ("cold", "warm", "alone")} <= figures.keys()


# On the wire


def events_of(tokens: Sequence[int], per_event: int) -> list[bytes]:
    """An answer as a server streams it, so many tokens in a chunk, with its own count at the end."""
    lines = [
        {"choices": [{"index": 0, "text": "w", "token_ids": list(part)}]}
        for part in (tokens[i : i + per_event] for i in range(0, len(tokens), per_event))
    ]
    lines.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens)}})
    return [*(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines), b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("per_event", "piece", "is_cut"), [(1, 7, False), (3, 1, True), (2, 10_000, False), (2, 10_000, True)]
)
def test_streams_count_the_tokens_that_were_sent(per_event: int, piece: int, is_cut: bool) -> None:
    """The server's pieces end anywhere. The second of three connections breaks after half of its bytes and is
    made again; tokens that come twice count once."""
    answers = {5: range(10, 17), 6: range(30, 41), 7: [3]}
    broken: set[int] = {6}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        length = int(size.split(b":")[1])
        first = json.loads(await reader.readexactly(length))["prompt"][0]
        body = events_of(list(answers[first]), per_event)
        if is_cut:  # the end's own event over two chunks
            body[-1:] = [body[-1][:8], body[-1][8:]]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in body)
        wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        sent = wire[: len(wire) // 2] if first in broken else wire
        broken.discard(first)
        for start in range(0, len(sent), piece):
            writer.write(sent[start : start + piece])
            await writer.drain()
        writer.close()

    async def load() -> list[StreamResult]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asks = [
            StreamRequest((first, 1), len(tokens), tells_tokens=True) for first, tokens in answers.items()
        ]
        try:
            return await Streams(f"http://127.0.0.1:{port}", "model", lambda: None).run(asks)
        finally:
            server.close()

    for heard, tokens in zip(asyncio.run(load()), answers.values(), strict=True):
        assert heard.tokens == list(tokens) and heard.agrees
        assert heard.written == len(heard.stamps) == len(tokens)
        assert heard.chunks == -(-len(tokens) // per_event)
        assert heard.attempts == (2 if tokens == answers[6] else 1)
        assert heard.asked <= heard.first_byte <= heard.stamps[0] <= heard.stamps[-1] <= heard.ended
