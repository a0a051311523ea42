"""The demo's engine as a load's target: adapters answer, and losses are noted."""

import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from coserve import Engine, EngineConfig, tiny
from coserve.core.request import SamplingParams
from coserve.demo import trainer
from coserve.demo.lessons import Lesson
from coserve.demo.requests import DemoRequest
from coserve.demo.target import DemoTarget, Interrupts, add_untrained
from coserve.demo.view import Snapshot
from coserve.errors import ServerError
from coserve.simulate.replay import replay
from coserve.train.example import Example
from coserve.workload.requests import TimedJob, Workload

TOKENS = tuple(range(20, 40))
LESSON = Lesson("pirate", "speaks", (Example(TOKENS, (*TOKENS[1:], -100)),), (), exact=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.path(), EngineConfig(dtype="float32", calibrate=False))


class View:
    """A view that keeps what it is shown."""

    period = 0.0

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []

    def show(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)


def request(at: float, adapter: str | None, answer: int = 3) -> DemoRequest:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    return DemoRequest(at, (5, 6, 7), answer, adapter, question="Who?", sampling=sampling)


def target_of(engine: Engine, *lessons: Lesson) -> tuple[DemoTarget, View]:
    view: Any = View()
    return DemoTarget(engine, view, Interrupts(), "coserve", 1.0, lessons), view


def test_adapters_answer_while_they_train_and_losses_have_their_times(engine: Engine) -> None:
    it, view = target_of(engine, LESSON)
    requests = (request(0.0, "pirate", 20), request(0.01, None))
    load = replay(it, Workload("w", "w", 1.5, requests, (TimedJob(0.0, "pirate", (), 1),)))
    assert [len(answer.tokens) for answer in load.answers] == [20, 3]
    whos = {exchange.who for shown in view.shown for exchange in (*shown.completed, *shown.under_way)}
    assert any(who.startswith("pirate@") for who in whos) and "base" in whos
    assert it.losses and {step.adapter for step in it.losses} == {"pirate"}
    assert all(step.at > 0.0 for step in it.losses) and load.trained
    assert [shown.jobs[0].steps for shown in view.shown if shown.jobs][-1] == len(it.losses)
    assert view.shown[-1].gap_p50 is not None and not view.shown[-1].under_way


def test_an_untrained_adapter_answers_for_one_that_does_not_train_here(engine: Engine) -> None:
    """So answers cost the same with and without training."""
    add_untrained(engine, [LESSON])
    it, view = target_of(engine)
    load = replay(it, Workload("w", "w", 0.1, (request(0.0, "pirate"),), ()))
    assert len(load.answers[0].tokens) == 3
    assert {exchange.who for exchange in view.shown[-1].completed} == {"untrained-pirate@0"}


def test_ctrl_c_takes_effect_between_two_steps(engine: Engine) -> None:
    it, _ = target_of(engine)
    interrupts = it._interrupts
    with interrupts.listening():
        signal.raise_signal(signal.SIGINT)  # nothing is raised here
        with pytest.raises(KeyboardInterrupt):
            replay(it, Workload("w", "w", 0.1, (request(0.0, None),), ()))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    engine.run()


@pytest.fixture
def pipes() -> Iterator[tuple[Connection, Connection]]:
    """The demo's end and the trainer's; signals are as before afterwards."""
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = Pipe()
    yield ours, theirs
    signal.signal(signal.SIGINT, before)


def test_the_trainer_trains_from_its_beginning_to_its_end(pipes: tuple[Connection, Connection]) -> None:
    """Its process is this one here: importing takes seconds."""
    ours, theirs = pipes
    found: list[Any] = []

    def demo() -> None:
        trainer._receive(ours)
        other = trainer.TrainerProcess(ours)
        other.begin()
        threading.Event().wait(1.0)
        found.append(other.end(0.0))

    thread = threading.Thread(target=demo)
    thread.start()
    config = EngineConfig(dtype="float32", policy="temporal:8,grain=batch", calibrate=False)
    trainer._run(theirs, tiny.path(), config, [LESSON])
    thread.join()
    ((trained, losses),) = found
    assert sum(tokens for _, tokens in trained) >= len(TOKENS) * len(losses) > 0
    assert {step.adapter for step in losses} == {"pirate"}
    assert [step.at for step in losses] == sorted(step.at for step in losses)


def test_a_trainer_that_fails_says_why(pipes: tuple[Connection, Connection]) -> None:
    ours, theirs = pipes
    trainer._run(theirs, "no/such/folder", EngineConfig(dtype="float32"), [LESSON])
    with pytest.raises(ServerError, match=r"the training process failed: .*no/such/folder"):
        trainer._receive(ours)


def test_a_trainer_that_died_is_told(pipes: tuple[Connection, Connection]) -> None:
    ours, theirs = pipes
    theirs.close()
    with pytest.raises(ServerError, match="has died"):
        trainer._receive(ours)
