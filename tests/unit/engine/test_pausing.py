"""Training that stops for who arrives: what was not run comes back, and no layer counts twice."""

import queue
import random
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from coserve import SLO, Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import BasePlan, BaseResult, TrainingSegment
from coserve.core.request import Request
from coserve.core.sequence import Direction
from coserve.engine.arrivals import Arrivals
from coserve.engine.completion import Completion
from coserve.engine.link import Closed, Connected, Connection, Done, Drained, Inbox, Received
from coserve.errors import TogetherFailed
from coserve.schedule.policies.base import INFINITE, Allowance, View
from coserve.train.example import Example
from coserve.train.pause import LayerAbandoned, TrainingPause
from coserve.train.save_policy import SavePolicy
from coserve.wire.messages import Acknowledge
from models import tiny
from scripted_executor import ScriptedExecutor
from steps import run_steps_by

pytestmark = pytest.mark.local

LENGTHS = (30, 24, 18, 27)
DATA = [Example(tuple(range(3, 3 + n)), (*range(4, 3 + n), -100)) for n in LENGTHS] * 2
SETTINGS = TrainingConfig(batch_size=4, rows=64, learning_rate=1e-3, epochs=2)


class Watched:
    """An engine whose plans and results are kept, and whose layers call `on_layer`."""

    def __init__(self, policy: str = "hybrid", quantum: float = 60.0, **scheduler: int) -> None:
        config = EngineConfig(
            dtype="float64",
            calibrate=False,
            cache_tokens=512,
            policy=policy,
            scheduler={"quantum": quantum, "max_quantum": quantum, **scheduler},
        )
        self.engine = Engine(tiny("llama", torch.float64), config)
        self.steps: list[tuple[BasePlan, BaseResult]] = []
        run = self.engine.executor.run

        def watched(plan: BasePlan) -> BaseResult:
            unknown = plan.share is not None or self.engine.scheduler.policy.defers
            taken = INFINITE if unknown else plan.predicted
            assert self.engine.arrivals.under_way == taken, "who comes now judges by it"
            result = run(plan)
            self.steps.append((plan, result))
            return result

        run_steps_by(self.engine, watched)

    def train(self, jobs: int, settings: TrainingConfig = SETTINGS) -> dict[str, torch.Tensor]:
        """Trains to the end; weights of all jobs."""
        for number in range(jobs):
            self.engine.finetune(DATA, f"job{number}", LoRAConfig(rank=4), replace(settings, seed=number))
        self.engine.run()
        found = {}
        for number in range(jobs):
            version = self.engine.adapters.weights(f"job{number}")
            found |= {f"{number}.{name}": weight for name, weight in version.parameters().items()}
        return found

    def ask_patiently(self) -> Completion:
        """A long answer that bears any step."""
        params = SamplingParams(max_tokens=250, ignore_eos=True)
        return self.engine.generate([5, 6, 7], sampling=params, slo=SLO(deferral=1e9))

    def passed(self) -> Counter[tuple[object, ...]]:
        """The number of times that each row passed each layer, by micro-batch and direction."""
        found = Counter[tuple[object, ...]]()
        for _, result in self.steps:
            for segment in result.trained:
                for layer in range(segment.span.first, segment.span.last):
                    for row in range(segment.start, segment.start + segment.length):
                        found[segment.key, segment.direction, layer, row] += 1
        return found


def layers(segments: tuple[TrainingSegment, ...]) -> int:
    """Different layers that segments pass, those of windows side by side once."""
    return len({layer for s in segments for layer in range(s.span.first, s.span.last)})


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [512, 20])
@pytest.mark.parametrize("jobs", [1, 3])
def test_paused_at_any_layer_weights_are_the_same(jobs: int, rows: int) -> None:
    """Pauses asked for and withdrawn at random boundaries, in the forward, the loss and the backward. Windows
    of 20 rows end within examples, whose earlier rows wait for gradients of later ones."""
    cuts = {"max_training_rows": rows, "min_training_rows": min(rows, 32)}
    whole, paused = Watched(**cuts), Watched(**cuts)
    expected = whole.train(jobs)
    draws = random.Random(jobs)

    def either() -> None:
        executor = paused.engine.executor
        (executor.pause_training if draws.random() < 0.5 else executor.resume_training)()

    paused.engine.base.chain.on_layer = either
    found = paused.train(jobs)
    cut = [(p, r) for p, r in paused.steps if r.trained != p.training]
    assert len(cut) > 10 and {s.direction for plan, _ in cut for s in plan.training} == {
        Direction.TRAIN_FORWARD,
        Direction.LOSS,
        Direction.BACKWARD,
    }
    assert set(paused.passed().values()) == {1}, "nothing runs twice"
    assert expected.keys() == found.keys() and len(found) > 3
    for name, weight in expected.items():
        error = float((found[name] - weight).norm() / weight.norm())
        assert error == 0 if jobs == 1 and rows == 512 else error < 1e-10, (name, error)


@pytest.mark.parametrize("keep", ["inputs", "everything"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_layer_abandoned_at_any_product_leaves_weights_the_same(
    keep: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, in the layer's second run and on its way back; windows end within examples. Beside answers
    that bear it as well, as they share no layer of such a step."""
    cuts = {"max_training_rows": 20, "min_training_rows": 20}
    whole, given_up = Watched(**cuts), Watched(**cuts)
    settings = replace(SETTINGS, keep=SavePolicy(keep))
    expected = whole.train(1, settings)
    draws, where, real = random.Random(7), Counter[str](), TrainingPause.check

    def check(pause: TrainingPause) -> None:
        if draws.random() < 0.2:
            pause.ask()
        try:
            real(pause)
        except LayerAbandoned:
            names = [frame.name for frame in traceback.extract_stack()]
            where[
                "back" if "_checked" in names else "again" if "layer_gradients" in names else "forward"
            ] += 1
            raise
        finally:
            pause.withdraw()

    answers = [it.ask_patiently() for it in (whole, given_up) if beside]
    monkeypatch.setattr(TrainingPause, "check", check)
    found = given_up.train(1, settings)
    assert min(where[at] for at in ("forward", "again", "back")) > 2, where
    if beside:
        whole.engine.run()
        assert answers[0].tokens == answers[1].tokens
        shared = [(p, r) for p, r in given_up.steps if p.inference and p.training]
        cut = {s.direction for plan, result in shared for s in {*plan.training} - {*result.trained}}
        assert shared and cut >= {Direction.TRAIN_FORWARD, Direction.BACKWARD}
    assert set(given_up.passed().values()) == {1}
    for name, weight in expected.items():
        error = float((found[name] - weight).norm() / weight.norm())
        assert error < 1e-13, (name, error)  # pieces of two micro-batches may change places


def test_a_pause_that_is_never_withdrawn_leaves_a_layer_a_step() -> None:
    it = Watched()
    it.engine.executor.pause_training()
    it.engine.arrivals.announce()  # so that no step withdraws it
    it.engine.finetune(DATA, "job", LoRAConfig(rank=4), SETTINGS)
    while it.engine.has_work:
        it.engine.step()
    assert set(it.passed().values()) == {1}
    assert all(layers(result.trained) == 1 for plan, result in it.steps if plan.training)
    assert it.engine.scheduler.stats.updates == 4


@pytest.mark.parametrize("is_awaited", [False, True])
def test_windows_alone_are_large_unless_somebody_waits_for_the_step_already(is_awaited: bool) -> None:
    it = Watched()
    if is_awaited:
        it.engine.arrivals.announce()
    it.engine.finetune(DATA * 4, "job", LoRAConfig(rank=4), replace(SETTINGS, batch_size=32, rows=1024))
    it.engine.run()
    largest = max(s.length for plan, _ in it.steps for s in plan.training if not s.direction.is_tail)
    reserved = it.engine.scheduler.config.reserved_rows
    assert largest <= reserved if is_awaited else largest > reserved


def test_a_policy_that_does_not_pause_is_left_alone() -> None:
    """Baselines run mini-batches whole, as their papers have them."""
    it = Watched("idle-only")
    it.engine.executor.pause_training()
    it.engine.arrivals.announce()
    it.engine.finetune(DATA, "job", LoRAConfig(rank=4), SETTINGS)
    while it.engine.has_work:
        it.engine.step()
    assert all(plan.training == result.trained for plan, result in it.steps)


def test_who_arrives_from_another_thread_has_the_layer_under_way_abandoned() -> None:
    """A job's step would go on for all its layers; the request comes while its first layer runs."""
    it = Watched()
    engine = it.engine
    arrived, threads = threading.Event(), []
    announce = engine.arrivals.announce

    def announced(presses: bool) -> None:
        announce(presses)
        arrived.set()

    engine.arrivals.announce = announced  # type: ignore[method-assign]

    def first_layer() -> None:
        if not threads:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            threads.append(threading.Thread(target=lambda: engine.generate([1, 2, 3], sampling=params)))
            threads[0].start()
            assert arrived.wait(60)

    engine.base.chain.on_layer = first_layer
    engine.finetune(DATA, "job", LoRAConfig(rank=4), SETTINGS)
    engine.run()
    threads[0].join(60)
    plan, result = it.steps[0]
    assert layers(plan.training) > 1 and not result.trained and result.paused
    assert it.steps[1][0].inference, "the request is in the very next step"
    assert set(it.passed().values()) == {1} and engine.scheduler.stats.updates == 4


def test_only_the_steps_under_way_when_somebody_came_are_short() -> None:
    executor = ScriptedExecutor(16)
    pause = TrainingPause()
    executor.pause_training, executor.resume_training = pause.ask, pause.withdraw  # type: ignore[method-assign]
    arrivals = Arrivals(executor)
    pause.begin(True)
    assert not pause.is_due
    arrivals.announce()
    assert not pause.is_due, "a layer runs first"
    pause.passed()
    assert pause.is_due
    arrivals.before_step()
    assert pause.is_due, "somebody still waits"
    arrivals.taken()
    arrivals.before_step()
    assert not pause.is_due
    arrivals.announce()
    pause.begin(pausable=False)
    pause.passed()
    assert not pause.is_due


def test_a_failure_waits_until_it_is_asked_for() -> None:
    """Training beside answers goes on through further steps, which must not forget why it has stopped."""
    pause = TrainingPause()

    def fail() -> None:
        raise TogetherFailed("no memory")

    pause.begin(True)
    assert not pause.ran(fail) and not pause.is_due
    pause.begin(True)
    assert isinstance(pause.take_failure(), TogetherFailed) and pause.take_failure() is None


def test_who_bears_the_step_does_not_stop_it() -> None:
    executor, pause = ScriptedExecutor(16), TrainingPause()
    executor.pause_training, executor.resume_training = pause.ask, pause.withdraw  # type: ignore[method-assign]
    arrivals = Arrivals(executor)
    pause.begin(True)
    pause.passed()
    with arrivals.arriving(presses=False):
        assert not pause.is_due and not arrivals.before_step()
        began = time.monotonic()
        arrivals.give_way(0.05)
        assert time.monotonic() - began >= 0.05, "it is let in all the same"
        with arrivals.arriving():
            assert pause.is_due and arrivals.before_step()
        assert pause.is_due and not arrivals.before_step()
        assert not pause.is_due


def test_a_layer_is_abandoned_for_who_comes_during_the_step() -> None:
    pause = TrainingPause()

    def gives_up(passed: int = 0, asked_before: bool = False, **step: bool) -> bool:
        if asked_before:
            pause.ask()
        pause.begin(**step)
        for _ in range(passed):
            pause.passed()
        pause.check()
        pause.ask()
        try:
            pause.check()
        except LayerAbandoned:
            assert pause.is_due and pause.lost > 0
            return True
        finally:
            pause.withdraw()
        return False

    assert gives_up(pausable=True, abandons=True)
    assert not gives_up(pausable=True, abandons=True), "the last step passed no layer"
    assert gives_up(passed=1, pausable=True, abandons=True)
    assert gives_up(pausable=True, abandons=True), "the last step passed one"
    pause.begin(pausable=True, abandons=True)
    assert pause.lost == 0
    assert not gives_up(pausable=True, abandons=False), "answers with bounds share the step"
    assert not gives_up(pausable=False, abandons=True)
    assert not gives_up(pausable=True, abandons=True, asked_before=True)
    pause.begin(pausable=True, abandons=True)
    time.sleep(0.05)
    pause.went_on()
    pause.ask()
    with pytest.raises(LayerAbandoned):
        pause.check()
    assert pause.lost < 0.05, "answers' part of the step is not lost"


def test_all_that_somebody_waits_for_pauses_training_until_it_is_taken() -> None:
    """From any connection: what was announced and never taken would keep training paused."""
    told = Counter[str]()
    arrivals = Arrivals(ScriptedExecutor(16))
    arrivals.announce = lambda: told.update(["announced"])  # type: ignore[method-assign]
    arrivals.taken = lambda: told.update(["taken"])  # type: ignore[method-assign]
    inbox, connection = Inbox(), cast(Connection, object())
    request, news = Request("a", (1, 2)), Acknowledge(1)
    inbox.put(Received(connection, (request,)))  # before the engine is there
    inbox.pauses(arrivals)
    arrivals.under_way = 1.0
    patient, late = (Request("b", (1, 2), slo=slo) for slo in (SLO(deferral=60.0), SLO(first_token=20.0)))
    bound = Request("c", (1, 2), slo=SLO(deferral=60.0, first_token=9.0))
    items = [
        Received(connection, (patient, late, news)), Received(connection, (patient, bound)),
        Connected(connection), Received(connection, (news,)), Received(connection, (news, request, request)),
        Done(int), Closed(connection, ""), Drained(),
    ]  # fmt: skip
    announced = []
    for item in items:
        inbox.put(item)
        announced.append(told["announced"])
    assert announced == [0, 1, 1, 1, 2, 3, 3, 3]
    assert [inbox.get() for _ in range(9)][1:] == items
    assert told == {"announced": 3, "taken": 3}
    with pytest.raises(queue.Empty):
        inbox.get(block=False)


def test_an_adapter_that_has_been_read_stops_training_for_who_waits_for_it(tmp_path: Path) -> None:
    """The request is in the step after the one in which its weights came."""
    it = Watched()
    engine = it.engine
    maker = Engine(
        tiny("llama", torch.float64), EngineConfig(dtype="float64", calibrate=False, cache_tokens=64)
    )
    maker.finetune(DATA, "stored", LoRAConfig(rank=4), SETTINGS)
    maker.run()
    maker.adapters.save("stored", tmp_path / "stored")
    engine.adapters.register("stored", tmp_path / "stored")
    engine.finetune(DATA, "job", LoRAConfig(rank=4), SETTINGS)
    done = threading.Event()
    pause = engine.executor.pause_training

    def paused() -> None:
        pause()
        done.set()

    engine.adapters.paged._reads._done = paused  # type: ignore[attr-defined]
    engine.base.chain.on_layer = lambda: done.wait(60)
    engine.generate([1, 2, 3], "stored", SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    plan, result = it.steps[-1]
    assert not plan.inference and layers(plan.training) > 1 and not result.trained
    engine.step()
    assert it.steps[-1][0].inference
    engine.run()
    assert set(it.passed().values()) == {1}


def test_training_alone_is_long_where_arrivals_are_announced() -> None:
    """A caller that iterates a handle has requests on other threads only; one of `step` may have its own."""
    it = Watched(quantum=60.0)
    policy, seen = it.engine.scheduler.policy, list[bool]()
    allow = policy.allow

    def allowed(view: View) -> Allowance:
        seen.append(view.interruptible)
        return allow(view)

    policy.allow = allowed  # type: ignore[method-assign]
    job = it.engine.finetune(DATA, "job", LoRAConfig(rank=4), SETTINGS)
    it.engine.step()
    assert seen == [False]
    job.result()
    assert set(seen[1:]) == {True}
    it.engine.finetune(DATA, "other", LoRAConfig(rank=4), SETTINGS)
    seen.clear()
    it.engine.step()
    assert seen == [False]
