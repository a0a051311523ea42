"""A contestant's process, `python -m coserve_benchmarks.policies.without.process`; its protocol is in
`messages`."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import IO, TypeVar

import torch

from coserve.errors import CoserveError
from coserve.wire.control import decode_line, encode_line
from coserve_benchmarks.policies.without.messages import (
    Begin,
    Prepare,
    ProcessRole,
    ProcessStatus,
    Start,
    Stop,
)
from coserve_benchmarks.policies.without.serving import make_server
from coserve_benchmarks.policies.without.training import PeftTrainer
from coserve_benchmarks.policies.without.turns import take_turns

T = TypeVar("T")


class Orders:
    """The lines on stdin, read in a thread of their own: at their end the process ends, whatever it does."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def has_next(self) -> bool:
        """Tells whether a line waits to be read."""
        return not self._requests.empty()

    def next(self, kind: type[T]) -> T:
        """Waits for the next line, which is of this kind."""
        return decode_line(self._requests.get(), kind)

    def _read(self) -> None:
        for line in sys.stdin:
            self._requests.put(line)
        os._exit(0)  # the parent is gone, or has no more use for this process


def main() -> None:
    """Runs rounds until stdin ends."""
    say = _speaker()
    orders = Orders()
    start = orders.next(Start)
    os.nice(start.nice)
    torch.set_num_threads(start.threads)
    try:
        while True:
            _run_round(start, orders, say)
    except CoserveError as error:
        say(ProcessStatus("failed", text=str(error)))


def _run_round(start: Start, orders: Orders, say: Callable[[ProcessStatus], None]) -> None:
    prepare = orders.next(Prepare)
    workload, role = prepare.workload, start.role
    with ExitStack() as stack:
        trainer = server = None
        if role is not ProcessRole.SERVE:
            trainer = PeftTrainer(start.shape, workload.jobs, prepare.matched)
        if role is not ProcessRole.TRAIN:
            server = make_server(prepare.serving, start.shape, workload.requests)
            stack.enter_context(closing(server))
        say(ProcessStatus("ready", trainer.matched if trainer else None))
        begin = orders.next(Begin)
        may_end: dict[ProcessRole, Callable[[float], bool]] = {
            ProcessRole.SERVE: lambda elapsed: True,
            ProcessRole.TRAIN: lambda elapsed: orders.has_next,  # the order to stop
            ProcessRole.BOTH: lambda elapsed: elapsed >= workload.seconds,
        }
        outcome = take_turns(workload, begin.at, server, trainer, may_end[role])
    if role is ProcessRole.TRAIN:
        orders.next(Stop)
    say(ProcessStatus("done", outcome=outcome))


def _speaker() -> Callable[[ProcessStatus], None]:
    """Says lines on stdout, which nobody else writes to from now on: what libraries print goes to stderr."""
    stdout: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(said: ProcessStatus) -> None:
        print(encode_line(said), file=stdout, flush=True)

    return say


if __name__ == "__main__":
    main()
