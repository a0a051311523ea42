"""The contract of executors: a new one joins the list."""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from weakref import WeakKeyDictionary

import pytest
import torch

from coserve import EngineConfig
from coserve.adapters.bypass import Bypass
from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.plan import (
    BasePlan,
    BaseResult,
    Moved,
    OptimStep,
    PassesAlone,
    SwapIn,
    SwapOut,
    TrainingSegment,
)
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import AdapterNotFound
from coserve.executors.executor import (
    CloseSession,
    Command,
    CompileGrammar,
    DropAdapters,
    Executor,
    ExecutorSpec,
    FetchAdapter,
    FreshAdapter,
    LoadAdapter,
    MarkState,
    OpenSession,
    R,
    ReadMemory,
    ReadState,
    SetLimits,
)
from coserve.executors.local import BackgroundExecutor, LocalExecutor
from coserve.executors.remote import RemoteExecutor
from coserve.executors.step_executor import StepExecutor
from coserve.memory.ledger import Account
from coserve.model.load import load_base
from coserve.schedule.cost import CostModel
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from coserve.simulate.pipelined import PipelinedExecutor, StageSeconds
from coserve.simulate.simulated import SimulatedExecutor
from coserve.simulate.virtual_clock import VirtualClock
from coserve.streamed.load import load_streamed
from coserve.train.session import SessionConfig
from coserve.train.state import Identity
from coserve.worker.deterministic import DeterministicWorker
from coserve.worker.opening import Opened, open_local, open_remote
from coserve_benchmarks.metered_machine import MeteredExecutor
from forked_executors import fork_executors, run_short_here, short_memory
from models import save, tiny
from scripted_executor import ScriptedExecutor
from steps import step_plan

PAGE = 8
CONFIG = EngineConfig(page_size=PAGE, cache_tokens=40 * PAGE, max_running=8)
MODEL = "llama"


def open_deterministic(model: object, config: EngineConfig) -> Opened:
    return open_local(model, replace(config, deterministic=True))  # type: ignore[arg-type]


def open_background(model: object, config: EngineConfig) -> Opened:
    opened = open_local(model, config)  # type: ignore[arg-type]
    assert isinstance(opened.executor, LocalExecutor)
    return replace(opened, executor=BackgroundExecutor(opened.executor.worker))


OPENS: dict[str, Callable[..., Opened]] = {
    "background": open_background,
    "deterministic": open_deterministic,
    "remote": open_remote,
    "ranks": lambda model, config: open_remote(model, replace(config, tensor_parallel=2)),
    "stages": lambda model, config: open_remote(model, replace(config, pipeline_parallel=2)),
}
ELSEWHERE = "remote", "ranks", "stages"
IDENTITY = Identity("digest", 0, 1, 1)
PAUSES: WeakKeyDictionary[Executor, int] = WeakKeyDictionary()  # of each executor; ids are used again
KEYS, PAGES = itertools.count(1), itertools.count()


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        fork_executors(patch)
        run_short_here(patch)
        yield patch


@pytest.fixture(scope="module", params=list(OPENS))
def opened(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Opened]:
    yield (opened := OPENS[request.param](tiny(MODEL), CONFIG))
    if request.param in ELSEWHERE:
        opened.executor.close()  # type: ignore[attr-defined]


class AmongBases(Executor):
    """An executor of a step's first base, beside that of another base."""

    def __init__(self, executor: Executor) -> None:
        self.own, self.steps = executor, StepExecutor(executor)
        self.steps.add("other", ScriptedExecutor(PAGE))

    @property
    def spec(self) -> ExecutorSpec:
        return self.own.spec

    def launch(self, plan: BasePlan) -> None:
        self.steps.launch(step_plan(plan))

    def collect(self, wait: bool = True) -> BaseResult | None:
        result = self.steps.collect(wait)
        return None if result is None else result.only

    def pause_training(self) -> None:
        self.steps.pause_training()

    def resume_training(self) -> None:
        self.steps.resume_training()

    def on_progress(self, beat: Callable[[], object]) -> None:
        self.steps.on_progress(beat)

    def call(self, command: Command[R]) -> R:
        return self.own.call(command)


def simulated() -> Executor:
    return SimulatedExecutor(CostModel().predict, swap_pages=40, swap_seconds=(1e-4, 1e-4))  # type: ignore[return-value]


def metered() -> Executor:
    return MeteredExecutor(lambda plan: 1e-3 * plan.has_rows, swap_pages=40, swap_seconds=(1e-4, 1e-4))  # type: ignore[return-value]


def pipelined() -> Executor:
    return PipelinedExecutor(2, lambda plan: StageSeconds((0.01, 0.01), (0.0, 0.0)))  # type: ignore[return-value]


WITHOUT_MODEL: dict[str, Callable[[], Executor]] = {
    "scripted": lambda: ScriptedExecutor(PAGE, swap_pages=40),
    "simulated": simulated,
    "metered": metered,
    "pipelined": pipelined,
}


@pytest.fixture(scope="module", params=["among bases", *WITHOUT_MODEL, *OPENS])
def executor(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Executor]:
    if request.param in WITHOUT_MODEL:
        yield WITHOUT_MODEL[request.param]()
        return
    if request.param == "among bases":
        yield AmongBases(open_local(tiny(MODEL), CONFIG).executor)
        return
    yield (executor := OPENS[request.param](tiny(MODEL), CONFIG).executor)
    if request.param in ELSEWHERE:
        executor.close()  # type: ignore[attr-defined]


@pytest.fixture
def draws() -> Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return Random(seed)


def ranks_of(executor: Executor) -> int:
    return len(executor.workers) if isinstance(executor, RemoteExecutor) else 1


def layers_of(executor: Executor) -> int:
    return (
        3
        if isinstance(executor, ScriptedExecutor | SimulatedExecutor)
        else tiny(MODEL).config.num_hidden_layers
    )


def sequence(draws: Random, length: int = 5) -> Sequence:
    prompt = tuple(draws.randrange(3, 60) for _ in range(length))
    first = next(PAGES) * 2 % 38
    sampling = SamplingParams(seed=0, max_tokens=PAGE)
    return Sequence(next(KEYS), Request("r", prompt, sampling), pages=[first, first + 1])


def answer(executor: Executor, prompt: Sequence, tokens: int) -> list[int]:
    """The first tokens of an answer, one step at a time."""
    plan = inference_plan([(prompt, 0, prompt.length)])
    for _ in range(tokens):
        (token,) = executor.run(plan).sampled[prompt.key].tokens
        assert token is not None
        prompt.output.append(token)
        plan = inference_plan([(prompt, prompt.length - 1, 1)])
    executor.run(BasePlan(released=(prompt.key,)))
    return prompt.output


def test_results_come_in_the_order_of_launches(executor: Executor, draws: Random) -> None:
    """Plans name no token that is yet to be sampled, so the next step can be planned while one runs."""
    first = sequence(draws)
    again = replace(first, key=next(KEYS), output=[], told=None, pages=[p for p in first.pages])
    plans = [inference_plan([(first, 0, first.length)])]
    for _ in range(3):
        first.output.append(0)  # whatever it will be
        plans.append(inference_plan([(first, first.length - 1, 1)]))
    for plan in plans:
        executor.launch(plan)
    results = [executor.collect() for _ in plans]
    assert executor.collect() is None and executor.collect(wait=False) is None
    tokens = [token for result in results if result is not None for token in result.sampled[first.key].tokens]
    executor.run(BasePlan(released=(first.key,)))
    assert tokens == answer(executor, again, 4)


def test_a_result_is_waited_for_or_not(executor: Executor, draws: Random) -> None:
    assert executor.collect() is None and executor.collect(wait=False) is None
    one = sequence(draws)
    executor.launch(inference_plan([(one, 0, one.length)]))
    found = executor.collect(wait=False) or executor.collect()
    assert found is not None and set(found.sampled) == {one.key}
    executor.run(BasePlan(released=(one.key,)))


def test_a_prompt_in_parts_is_answered_once_it_is_through(executor: Executor, draws: Random) -> None:
    one = sequence(draws, 7)
    cut = draws.randrange(1, 7)
    assert executor.run(inference_plan([(one, 0, cut)])).sampled[one.key].tokens == ()
    (token,) = executor.run(inference_plan([(one, cut, 7 - cut)])).sampled[one.key].tokens
    executor.run(BasePlan(released=(one.key,)))
    whole = replace(one, key=next(KEYS), output=[], told=None)
    assert answer(executor, whole, 1) == [token]


@pytest.mark.parametrize("shared", [0, 1])
def test_pages_go_to_the_second_tier_and_come_back(executor: Executor, draws: Random, shared: int) -> None:
    """In the middle of an answer, while another sequence uses its pages; a page that stayed is not read."""
    if not executor.spec.swap_pages:
        pytest.skip("there is no second tier")
    one, other = sequence(draws, PAGE + 3), sequence(draws, PAGE + 3)
    whole = replace(one, key=next(KEYS), output=[], told=None, pages=[*one.pages])
    wanted = answer(executor, whole, 5)
    plan = inference_plan([(one, 0, one.length)])
    for _ in range(3):
        one.output += executor.run(plan).sampled[one.key].tokens
        plan = inference_plan([(one, one.length - 1, 1)])
    copy, computed = next(KEYS), one.length - 1
    taken = [*one.pages] if not shared else [other.pages[0], one.pages[1]]
    other.pages = taken
    out = SwapOut(copy, tuple(one.pages))
    plan = inference_plan([(other, 0, other.length)])
    moved = moves_of(executor, replace(plan, swap_out=(out,), released=(one.key,)))
    assert moved.out == (copy,) and not moved.failed and moved.seconds[0] > 0
    stayed = one.pages[:shared]
    again = replace(one, told=None, pages=[*stayed, 39, 38][:2], computed=computed, shared=shared)
    again.filled = 2 - shared
    back = SwapIn(copy, tuple(again.pages[shared:]), shared)
    moved = moves_of(executor, BasePlan(swap_in=(back,), released=(other.key,)))
    assert moved.back == (copy,) and not moved.failed and moved.seconds[1] > 0
    for _ in range(2):
        plan = inference_plan([(again, again.length - 1, 1)])
        again.output += executor.run(plan).sampled[again.key].tokens
    assert again.output == wanted
    gone = BasePlan(swap_in=(back,), swap_dropped=(copy,), released=(again.key,))
    assert moves_of(executor, gone).failed == (copy,), "a copy is read once"


def moves_of(executor: Executor, plan: BasePlan) -> Moved:
    """The outcome of a plan's only move, from its result or those of the empty plans after it."""
    result = executor.run(plan)
    while result.moved == Moved():
        result = executor.run(BasePlan())
    return result.moved


# Training


def micro_batch(executor: Executor, draws: Random, job: str, rows: int = 12) -> MicroBatch:
    tokens = tuple(draws.randrange(3, 60) for _ in range(rows))
    labels = (*tokens[1:], -100)
    layers = layers_of(executor)
    return MicroBatch(
        next(KEYS), job, f"{job}@0", (rows,), layers, tokens=tokens, labels=labels, step_labels=rows - 1
    )


def begin(executor: Executor) -> str:
    """A job with a session, where there are any."""
    job = f"job-{next(KEYS)}"
    if not isinstance(executor, ScriptedExecutor | SimulatedExecutor):
        fresh = FreshAdapter.of((LoRAConfig(rank=2),), 0)
        executor.call(OpenSession(job, job, 0, SessionConfig(rows=64), fresh=fresh, identity=IDENTITY))
    return job


def steps(batch: MicroBatch, cut: int, slice_layers: int) -> Iterator[BasePlan]:
    """Plans that send a micro-batch there and back, a window each; it is told what came of each."""
    while not batch.done:
        start, rows = batch.next_window(cut)
        span = batch.next_span(batch.layers)
        segment = training_segment(batch, start, rows, batch.direction, span)
        batches = announce_batches([batch])
        yield BasePlan(training=(segment,), micro_batches=batches, slice_layers=slice_layers)


def run(executor: Executor, plan: BasePlan) -> BaseResult:
    """Runs a plan that knows of all pauses before it."""
    result = executor.run(replace(plan, pauses=PAUSES.get(executor, 0)))
    PAUSES[executor] = PAUSES.get(executor, 0) + result.paused
    return result


def travel(executor: Executor, batch: MicroBatch, cut: int, slice_layers: int = 0) -> list[BaseResult]:
    results = []
    for plan in steps(batch, cut, slice_layers):
        results.append(run(executor, plan))
        for segment in results[-1].trained:
            batch.advance(segment.start, segment.length, segment.span)
    return results


def passed(segments: Iterator[TrainingSegment]) -> Counter[tuple[Direction, int, int]]:
    """The number of times that each row passed each layer, in each direction."""
    return Counter(
        (segment.direction, row, layer)
        for segment in segments
        for row in range(segment.start, segment.start + segment.length)
        for layer in range(segment.span.first, segment.span.last)
    )


@pytest.mark.parametrize("pauses", [False, True])
def test_training_that_is_paused_comes_back_and_nothing_runs_twice(
    executor: Executor, draws: Random, pauses: bool
) -> None:
    if pauses and executor.spec.plans > 1:
        pytest.skip("stages are at different plans, and go on")
    job, layers = begin(executor), draws.choice([1, 2])
    batch = micro_batch(executor, draws, job)
    if pauses:
        executor.pause_training()
    try:
        results = travel(executor, batch, cut=draws.choice([5, 12]), slice_layers=layers)
    finally:
        executor.resume_training()
    spans = [len(segment.span) for result in results for segment in result.trained]
    assert max(spans) == (layers if pauses else batch.layers), "a pause leaves each step its first slice"
    rows, ways = range(batch.length), (Direction.TRAIN_FORWARD, Direction.BACKWARD)
    wanted = Counter((way, row, layer) for way in ways for row in rows for layer in range(batch.layers))
    wanted += Counter((Direction.LOSS, row, batch.layers) for row in rows)
    assert passed(segment for result in results for segment in result.trained) == wanted
    executor.run(BasePlan(released=(batch.key,)))


def test_what_was_planned_before_a_pause_was_known_trains_nothing(executor: Executor, draws: Random) -> None:
    """It goes on from where nothing has come; its answers run all the same, and the next plan trains."""
    if executor.spec.plans > 1:
        pytest.skip("stages are at different plans, and go on")
    batch, one = micro_batch(executor, draws, begin(executor)), sequence(draws)
    first = next(steps(batch, 12, slice_layers=1))
    (forward,) = first.training
    executor.pause_training()
    tail = training_segment(batch, 0, 12, Direction.LOSS, Span(batch.layers, batch.layers + 1))
    ahead = replace(inference_plan([(one, 0, one.length)]), training=(tail,), updates=(OptimStep(batch.job),))
    for plan in (first, ahead):
        executor.launch(replace(plan, pauses=PAUSES.get(executor, 0)))
    stopped, empty = executor.collect(), executor.collect()
    PAUSES[executor] = PAUSES.get(executor, 0) + 1
    executor.resume_training()
    assert stopped is not None and stopped.paused and len(stopped.trained[0].span) == 1
    assert empty is not None and not (empty.trained or empty.updated or empty.paused)
    assert one.key in empty.sampled
    rest = replace(forward, span=Span(1, batch.layers))
    assert run(executor, BasePlan(training=(rest,))).trained == (rest,)
    executor.run(BasePlan(released=(batch.key, one.key)))


def test_a_plan_that_is_not_pausable_runs_whole(executor: Executor, draws: Random) -> None:
    batch = micro_batch(executor, draws, begin(executor))
    executor.pause_training()
    try:
        results = travel(executor, batch, cut=12)
    finally:
        executor.resume_training()
    assert len(results) == 3, "there, through the tail, and back"
    executor.run(BasePlan(released=(batch.key,)))


@contextmanager
def all_run_short(executor: Executor) -> Iterator[None]:
    """Memory runs out in every pass that several share."""
    if ranks_of(executor) > 1:
        pytest.skip("ranks end where memory does not last: others would go on otherwise")
    if isinstance(executor, VirtualClock):
        executor.is_short = lambda plan: True
    with short_memory(100):
        yield
    if isinstance(executor, VirtualClock):
        executor.is_short = lambda plan: False


@pytest.mark.parametrize("slice_layers", [0, 1])
@pytest.mark.parametrize("answers", [0, 1, 2])
def test_whom_memory_does_not_last_for_together_pass_alone(
    executor: Executor, draws: Random, answers: int, slice_layers: int
) -> None:
    """Windows of two jobs, there and back, and answers beside their way there; nothing runs twice."""
    is_deterministic = isinstance(getattr(executor, "worker", None), DeterministicWorker)
    asked = [sequence(draws) for _ in range(answers)]
    wanted = [answer(executor, replace(one, key=next(KEYS), output=[], told=None), 1) for one in asked]
    batches = [micro_batch(executor, draws, begin(executor)) for _ in range(2)]
    if not isinstance(executor, VirtualClock):
        executor.call(SetLimits(window_group_rows=24))
    plan, ran, told = inference_plan([(one, 0, one.length) for one in asked]), list[TrainingSegment](), 0
    alone = PassesAlone.NOBODY
    with all_run_short(executor):
        while going := [batch for batch in batches if not batch.done]:
            windows = [(batch, *batch.next_window(12)) for batch in going]
            plan = replace(
                plan,
                training=tuple(
                    training_segment(batch, start, rows, batch.direction, batch.next_span(batch.layers))
                    for batch, start, rows in windows
                ),
                micro_batches=announce_batches(going),
                slice_layers=slice_layers,
                alone=alone,
            )
            result = run(executor, plan)
            found = [[*result.sampled[one.key].tokens] for one in asked if one.key in result.sampled]
            assert found == (wanted if plan.inference else [])
            for segment in result.trained:
                batch = next(batch for batch in batches if batch.key == segment.key)
                batch.advance(segment.start, segment.length, segment.span)
            ran += result.trained
            told += result.together_failed
            assert result.together_failed or result.trained == plan.training, "else all of it has run"
            # As the scheduler does, where a step's training has stopped; but for the next step alone.
            alone = PassesAlone.WINDOWS if result.paused else PassesAlone.NOBODY
            plan = BasePlan()
    if is_deterministic:
        assert told == (answers > 1), "windows pass alone in any case"
    else:
        assert told >= 2, "on the way there, and back"
    for batch in batches:
        assert {*passed(segment for segment in ran if segment.key == batch.key).values()} == {1}
    assert sum(len(segment.span) * segment.length for segment in ran) == 2 * 12 * (
        2 * layers_of(executor) + 1
    )
    keys = (*(one.key for one in asked), *(batch.key for batch in batches))
    executor.run(BasePlan(released=keys))


def test_a_pause_is_over_once_it_is_withdrawn(executor: Executor, draws: Random) -> None:
    """However many came before: each plan is stopped by those that were not withdrawn before it."""
    job = begin(executor)
    for _ in range(5):
        executor.pause_training()
        executor.resume_training()
        batch = micro_batch(executor, draws, job)
        plan = next(steps(batch, 12, slice_layers=1))
        (segment,) = run(executor, plan).trained
        assert len(segment.span) == batch.layers
        executor.run(BasePlan(released=(batch.key,)))


def test_each_optimizer_step_is_answered(executor: Executor, draws: Random) -> None:
    jobs = [begin(executor) for _ in range(3)]
    for job in jobs:
        travel(executor, micro_batch(executor, draws, job), cut=12)
    result = run(executor, BasePlan(updates=tuple(OptimStep(job, 1e-3) for job in jobs)))
    assert result.updated.keys() | result.failed.keys() == set(jobs)
    assert [result.updated[job].version for job in jobs] == [f"{job}@1" for job in jobs]


# Commands


def adapter_of(opened: Opened, job: str) -> dict[str, torch.Tensor]:
    return dict(opened.executor.call(FetchAdapter(f"{job}@0")).parameters())


def test_weights_come_and_go_by_command(opened: Opened) -> None:
    executor, job = opened.executor, begin(opened.executor)
    held = executor.call(ReadMemory())
    first = executor.call(FetchAdapter(f"{job}@0"))
    other = replace(first, name=f"{job} copied", version=7)
    outline = executor.call(LoadAdapter(other))
    assert outline.nbytes == first.nbytes == other.nbytes
    found = executor.call(FetchAdapter(other.key))
    assert (found.name, found.version) == (other.name, 7)
    assert all(isinstance(bypass, Bypass) for _, bypass in found.placed())
    for name, tensor in first.parameters().items():
        assert torch.equal(found.parameters()[name], tensor), name
    own = held.sessions[job][Account.ADAPTERS]  # of a rank less than all
    assert own < other.nbytes if ranks_of(executor) > 1 else own == other.nbytes
    assert executor.call(ReadMemory()).adapters == held.adapters + own
    executor.call(DropAdapters((other.key, "nobody@3")))
    assert executor.call(ReadMemory()).adapters == held.adapters
    with pytest.raises(AdapterNotFound, match="copied"):
        executor.call(FetchAdapter(other.key))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_command_that_fails_is_its_callers_alone(opened: Opened, draws: Random) -> None:
    executor = opened.executor
    with pytest.raises(Exception, match="nobody"):
        executor.call(MarkState("nobody"))
    assert len(answer(executor, sequence(draws), 2)) == 2


def test_a_session_is_saved_and_goes_on_as_it_would_have(opened: Opened, draws: Random) -> None:
    executor, job = opened.executor, begin(opened.executor)
    batches = [micro_batch(executor, draws, job) for _ in range(2)]
    travel(executor, batches[0], cut=12)
    run(executor, BasePlan(updates=(OptimStep(job, 1e-2),)))
    mark, read_later = executor.call(MarkState(job)), executor.call(MarkState(job))
    state = executor.call(ReadState(mark.snapshot))
    assert mark.step == state.step == 1 and state.identity == IDENTITY and state.loss is not None
    travel(executor, batches[1], cut=12)
    run(executor, BasePlan(updates=(OptimStep(job, 1e-2),)))
    expected = executor.call(FetchAdapter(f"{job}@2")).parameters()
    assert executor.call(ReadMemory()).sessions[job][Account.OPTIMIZERS] > 0
    for _ in range(2):
        executor.call(CloseSession(job))
    assert job not in executor.call(ReadMemory()).sessions
    assert executor.call(FetchAdapter(f"{job}@1")).version == 1, "what it published stays"
    later = executor.call(ReadState(read_later.snapshot))
    assert later.step == 1 and same(later.moments, state.moments)
    assert same(later.adapter.parameters(), state.adapter.parameters()), "not those of step 2"
    with pytest.raises(Exception, match=str(mark.snapshot)):
        executor.call(ReadState(mark.snapshot))

    resumed = OpenSession(job, f"{job} again", 1, SessionConfig(rows=64), identity=IDENTITY, resume=state)
    executor.call(resumed)
    again = replace(batches[1], key=next(KEYS), direction=Direction.TRAIN_FORWARD, done=False, frontier=0)
    again.told = False
    travel(executor, again, cut=12)
    run(executor, BasePlan(updates=(OptimStep(job, 1e-2),)))
    found = executor.call(FetchAdapter(f"{job} again@2")).parameters()
    assert same(found, expected)


@pytest.mark.parametrize("from_here", [True, False])
def test_a_session_goes_on_where_there_are_other_ranks(
    opened: Opened, draws: Random, from_here: bool
) -> None:
    """Its state is that of one rank: it comes from the executor, or goes to it."""
    local = open_local(tiny(MODEL), CONFIG).executor
    first, second = (opened.executor, local) if from_here else (local, opened.executor)
    job = begin(first)
    batches = [micro_batch(first, draws, job) for _ in range(2)]
    travel(first, batches[0], cut=12)
    run(first, BasePlan(updates=(OptimStep(job, 1e-3, max_grad_norm=0.05),)))
    state = first.call(ReadState(first.call(MarkState(job)).snapshot))
    config = SessionConfig(rows=64)
    second.call(OpenSession(f"{job}*", f"{job}*", 1, config, identity=IDENTITY, resume=state))
    again = replace(batches[1], key=next(KEYS), job=f"{job}*", adapter=f"{job}*@1")
    updates = []
    for executor, batch in ((first, batches[1]), (second, again)):
        travel(executor, batch, cut=5)
        result = run(executor, BasePlan(updates=(OptimStep(batch.job, 1e-3, max_grad_norm=0.05),)))
        updates.append(result.updated[batch.job])
    assert updates[1].loss == pytest.approx(updates[0].loss, rel=1e-5)
    assert (
        updates[1].grad_norm == pytest.approx(updates[0].grad_norm, rel=1e-5) and updates[0].grad_norm > 0.05
    )
    expected = first.call(FetchAdapter(f"{job}@2")).parameters()
    found = second.call(FetchAdapter(f"{job}*@2")).parameters()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_commands_take_effect_after_the_plans_before_them(opened: Opened, draws: Random) -> None:
    executor, job = opened.executor, begin(opened.executor)
    travel(executor, micro_batch(executor, draws, job), cut=12)
    executor.launch(BasePlan(updates=(OptimStep(job, 1e-2),), pauses=PAUSES.get(executor, 0)))
    assert executor.call(FetchAdapter(f"{job}@1")).version == 1
    result = executor.collect()
    assert result is not None and result.updated[job].step == 1 and executor.collect() is None


def test_a_command_waits_for_a_plan_that_runs_again(opened: Opened, draws: Random) -> None:
    executor = opened.executor
    asked = [sequence(draws) for _ in range(2)]
    wanted = [answer(executor, replace(one, key=next(KEYS), output=[], told=None), 1) for one in asked]
    with all_run_short(executor):
        executor.launch(inference_plan([(one, 0, one.length) for one in asked]))
        assert executor.call(ReadMemory()).base > 0, "nothing is raised"
    result = executor.collect()
    assert result is not None and result.together_failed
    assert [[*result.sampled[one.key].tokens] for one in asked] == wanted
    executor.run(BasePlan(released=tuple(one.key for one in asked)))


def test_limits_and_grammars_are_taken(opened: Opened) -> None:
    opened.executor.call(SetLimits(window_group_rows=128, activation_nbytes=1 << 20))
    opened.executor.call(CompileGrammar("whatever: no tokenizer was given"))
    assert opened.executor.spec.sequences == CONFIG.max_running


@pytest.mark.parametrize("name", [name for name in OPENS if name not in ELSEWHERE[1:]])
def test_how_the_base_is_streamed_is_told(name: str, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save(tiny(MODEL), tmp_path)
    whole = load_base(folder).nbytes
    opened = OPENS[name](folder, replace(CONFIG, base_memory=whole * 4 // 5))
    try:
        found = opened.executor.spec.streaming
        base, wanted = load_streamed(folder, whole * 4 // 5)
        assert found == replace(wanted, rate=found.rate if found else 0.0)
        assert found is not None and found.rate > 0 and found.plan.read_nbytes > 0
        assert found.resident_nbytes == base.nbytes == opened.executor.call(ReadMemory()).base
    finally:
        if name == "remote":
            opened.executor.close()  # type: ignore[attr-defined]


def test_a_base_loaded_as_a_whole_is_not_streamed(executor: Executor) -> None:
    assert executor.spec.streaming is None
