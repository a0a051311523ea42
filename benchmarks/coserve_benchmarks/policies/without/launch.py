"""Starts a contestant's process, tells it what to do, and ends it."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal

import msgspec

from coserve.errors import ConfigError, ServerError
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.wire.control import decode_line, encode_line
from coserve.workload.requests import Workload
from coserve.workload.shapes import ModelShape
from coserve_benchmarks.policies.without.messages import (
    Begin,
    Outcome,
    Prepare,
    ProcessRole,
    ProcessStatus,
    Serving,
    Start,
    Stop,
)

_COMMAND = (sys.executable, "-m", "coserve_benchmarks.policies.without.process")
_TAIL = 8  # lines of its stderr that an error tells
_LEAD = 0.2  # seconds between the order to begin and the beginning


class Contestant:
    """One process of a contestant, through all its rounds. Use it in a `with`: it does not outlive that, nor
    its parent. Methods raise ServerError where it fails, dies, or is silent for `patience` seconds.

    `passive` threads of OpenMP sleep while they wait for work instead of spinning, which is for those that
    share their cores.
    """

    def __init__(
        self,
        shape: ModelShape,
        role: ProcessRole,
        threads: int,
        nice: int = 0,
        passive: bool = False,
        patience: float = 300.0,
    ) -> None:
        self._start = Start(shape, role, threads, nice)
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._environment |= {"OMP_WAIT_POLICY": "PASSIVE"} if passive else {}
        self._patience = patience

    def __enter__(self) -> "Contestant":
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
            text=True,
        )
        self._tell(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def prepare(self, workload: Workload, serving: Serving, matched: bool | None = None) -> bool | None:
        """Returns when the round could begin: models built, a first answer given, a first step made. Says
        whether adapters are in the base's dtype (None where none is trained)."""
        if any(request.adapter is not None for request in workload.requests):
            raise ConfigError("transformers and PEFT are measured on requests for the base alone")
        self._tell(Prepare(workload, serving, matched))
        return self._hear("ready").matched

    def begin(self, at: float) -> None:
        """The load's clock begins at this instant of `time.monotonic`."""
        self._tell(Begin(at))

    def stop(self) -> None:
        """Ends training."""
        self._tell(Stop())

    def outcome(self, patience: float = 0.0) -> Outcome:
        """Waits for the round's end and gives its outcome; `patience`, the round's length, adds to the usual
        one."""
        found = self._hear("done", patience).outcome
        assert found is not None
        return found

    def _tell(self, order: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what ended it is heard next
            self._process.stdin.write(encode_line(order) + "\n")
            self._process.stdin.flush()

    def _hear(self, kind: Literal["ready", "done"], patience: float = 0.0) -> ProcessStatus:
        assert self._process.stdout is not None
        patience += self._patience
        # It says one line at a time, so none waits in our own buffer.
        if not select.select([self._process.stdout], [], [], patience)[0]:
            raise ServerError(f"{self._name} said nothing for {patience:g} s")
        text = self._process.stdout.readline()
        if not text:
            raise ServerError(f"{self._name} ended with status {self._process.wait()}: {self._tail()}")
        said = decode_line(text, ProcessStatus)
        if said.kind == "failed":
            raise ServerError(f"{self._name} failed: {said.text}")
        if said.kind != kind:
            raise ServerError(f"{self._name} was expected to say {kind!r}, and said {said.kind!r}")
        return said

    def _tail(self) -> str:
        self._stderr.seek(0)
        return " | ".join(self._stderr.read().decode(errors="replace").splitlines()[-_TAIL:])

    @property
    def _name(self) -> str:
        return f"the contestant's process to {self._start.role}"


def start_soon() -> float:
    """An instant at which all who are told now can begin."""
    return time.monotonic() + _LEAD


def as_load(workload: Workload, started: float, outcomes: Sequence[Outcome]) -> LoadResult:
    """Load of all processes of one contestant together."""
    requests = sorted(workload.requests, key=lambda request: request.at)
    stamps = [found for outcome in outcomes for found in outcome.stamps]
    pairs = zip(requests, stamps, strict=True)
    return LoadResult(
        started,
        workload.seconds,
        answers=[AnswerTimes(started + request.at, found, request.slo) for request, found in pairs],
        trained=sorted(one for outcome in outcomes for one in outcome.trained),
        is_apart=True,
        losses=[loss for outcome in outcomes for loss in outcome.losses],
        processor=sum(outcome.processor for outcome in outcomes),
        finished_at=max((found[-1] for found in stamps), default=started),
    )
