"""Resource isolation (FlexLLM, section 3 and 8.1): engines of their own for answers and for training.

It is a topology, not a policy: the fewest processors that keep the bounds serve, the rest train, and the base
is there twice. (Where all are needed to serve, nothing trains.)
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import ServerError
from coserve.simulate.replay import LoadResult
from coserve.workload.requests import Workload
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.drive import serve

_SOON = 0.2  # seconds from an agreement to begin until the beginning


@dataclass(frozen=True, slots=True)
class _Trained:
    """Results of the training engine."""

    trained: list[tuple[float, float]]
    losses: list[float]
    processor: float


def isolated(
    engine: Engine, shape: ModelShape, workload: Workload, serving: int, patience: float
) -> LoadResult:
    """One round: `engine` serves with so many threads, another process trains with the others.

    Without threads left nothing trains. Raises ServerError if the other process dies.
    """
    threads = torch.get_num_threads()
    requests = replace(workload, jobs=())
    try:
        torch.set_num_threads(serving)
        if serving >= threads or not workload.jobs:
            return serve(engine, requests, patience)
        with _training(shape, workload, threads - serving) as training:
            time.sleep(_SOON)
            load = serve(engine, requests, patience)
            found = _receive(training)
    finally:
        torch.set_num_threads(threads)
    load.trained, load.losses, load.is_apart = found.trained, found.losses, True
    load.processor += found.processor
    return load


@contextmanager
def _training(shape: ModelShape, workload: Workload, threads: int) -> Iterator[Connection]:
    """A process that is ready to train and has been told when to begin."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    jobs = replace(workload, requests=())
    process = context.Process(target=_train, args=(theirs, shape.name, jobs, threads), daemon=True)
    process.start()
    theirs.close()
    try:
        _receive(ours)
        ours.send(time.monotonic() + _SOON)
        yield ours
    finally:
        process.kill()
        process.join()


def _train(parent: Connection, shape: str, workload: Workload, threads: int) -> None:
    torch.set_num_threads(threads)
    engine = Engine(shape_named(shape).build(), EngineConfig(policy="idle-only"))
    serve(engine, replace(workload, seconds=1.0))  # what is made at first use
    parent.send(None)
    time.sleep(max(0.0, parent.recv() - time.monotonic()))
    load = serve(engine, workload)
    parent.send(_Trained(load.trained, load.losses, load.processor))


def _receive(process: Connection) -> "_Trained":
    try:
        found: _Trained = process.recv()
    except EOFError as error:
        raise ServerError("the engine that trains in a process of its own has died") from error
    return found
