"""Training in a process of its own, as a trainer beside a server would run."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from transformers.utils import logging

from coserve.config import EngineConfig
from coserve.core.events import StepDone
from coserve.demo.figures import StepLoss
from coserve.demo.lessons import Lesson
from coserve.demo.target import start_lesson
from coserve.engine.engine import Engine
from coserve.errors import CoserveError, ServerError
from coserve.simulate.replay import tokens_trained

_LONGEST_STEP: Final = 60.0  # seconds, after which a process that was told to end is ended


class TrainerProcess:
    """The other process, ready to train. Its clock is the engines' (`time.monotonic`)."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Lets training begin."""
        self._pipe.send(None)

    def end(self, started: float) -> tuple[list[tuple[float, float]], list[StepLoss]]:
        """Ends training; (when, tokens) of its steps, and losses by the seconds since `started`."""
        self._pipe.send(None)
        trained, losses = _receive(self._pipe)
        return trained, [StepLoss(at - started, adapter, loss) for at, adapter, loss in losses]


@contextmanager
def trainer(model: str | Path, config: EngineConfig, lessons: Sequence[Lesson]) -> Iterator[TrainerProcess]:
    """A process that has loaded the model and waits to train these lessons. It ends with the block. Raises
    ServerError where it does not come up."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, model, config, lessons), daemon=True)
    process.start()
    theirs.close()
    try:
        _receive(ours)
        yield TrainerProcess(ours)
    finally:
        ours.close()
        process.join(_LONGEST_STEP)
        process.kill()


def _receive(pipe: Connection) -> tuple[list[tuple[float, float]], list[tuple[float, str, float]]]:
    try:
        received = pipe.recv()
    except EOFError as error:
        raise ServerError("the training process has died") from error
    if isinstance(received, str):
        raise ServerError(f"the training process failed: {received}")
    trained, losses = received
    return trained, losses


def _run(pipe: Connection, model: str | Path, config: EngineConfig, lessons: Sequence[Lesson]) -> None:
    """Runs in the process: loads, waits, and trains until there is a message, or nobody to send one."""
    logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal
    trained, losses = list[tuple[float, float]](), list[tuple[float, str, float]]()
    try:
        engine = Engine(model, config)
        jobs = {job.job: job.adapter for job in [start_lesson(engine, lesson) for lesson in lessons]}
        pipe.send((trained, losses))
        pipe.recv()
        while not pipe.poll():
            events, now = engine.step(), engine.clock()
            trained.append((now, tokens_trained(events)))
            done = [event for event in events if isinstance(event, StepDone)]
            losses += [(now, jobs[event.job], event.updated.loss) for event in done]
        pipe.send((trained, losses))
    except CoserveError as error:
        pipe.send(str(error))
    except (EOFError, BrokenPipeError):  # the demo has ended
        return
