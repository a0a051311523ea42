"""Local workers, each a process behind a link of its own, and an engine whose blocks they have."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coserve.cluster.front import ClusterFront
from coserve.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.errors import ServerError
from coserve.split.credentials import CLUSTER_KEY
from coserve_benchmarks.clustered.pacing import PacedLink


class LocalWorker:
    """A process that has blocks, with `threads`, by default all of the machine: of most benches' workers one
    computes at a time. Others reach it over a `link` of `rate` bytes a second."""

    def __init__(self, rate: float, threads: int = 0) -> None:
        command = [sys.executable, "-c", "from coserve.cli.app import main; main()", "cluster", "worker"]
        self.process = subprocess.Popen(
            [*command, "--listen", "tcp:127.0.0.1:0", "--threads", str(threads)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        told = self.process.stdout.readline().strip()
        if not told:
            raise ServerError("a worker has not started")
        self.link = PacedLink(int(told.rpartition(":")[2]), rate)
        self.address = self.link.address

    def kill(self) -> None:
        """Kills the process, as a machine that loses power does."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the process and its link."""
        self.kill()
        self.link.close()


@contextmanager
def local_workers(count: int, rate: float, threads: int = 0) -> Iterator[list[LocalWorker]]:
    """Workers with a key of their own, which engines of this process read."""
    before = os.environ.get(CLUSTER_KEY)
    os.environ[CLUSTER_KEY] = before or secrets.token_hex()
    try:
        with ExitStack() as stack:
            found = []
            for _ in range(count):
                found.append(LocalWorker(rate, threads))
                stack.callback(found[-1].close)
            yield found
    finally:
        if before is None:
            del os.environ[CLUSTER_KEY]


@contextmanager
def engine_on(
    workers: Sequence[LocalWorker], model: Path, **settings: Any
) -> Iterator[tuple[Engine, ClusterFront]]:
    """An engine whose blocks are on workers, and its scheduler's side of the cluster."""
    addresses = ",".join(worker.address for worker in workers)
    engine = Engine(model, EngineConfig(cluster=addresses, prefix_sharing=False, **settings))
    front: ClusterFront = engine.executor.worker.fused.front  # type: ignore[attr-defined]
    try:
        yield engine, front
    finally:
        front.fleet.close()


def answered(engine: Engine, answer: Any, tokens: int) -> float:
    """Steps until an answer has so many tokens; returns the seconds."""
    began = time.perf_counter()
    while len(answer.tokens) < tokens:
        engine.step()
    return time.perf_counter() - began
