"""The loop of a contestant's process: requests at their instants and, when none is there, training."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from coserve.workload.requests import Workload
from coserve_benchmarks.policies.without.messages import Outcome
from coserve_benchmarks.policies.without.serving import Server, TimedAnswer

_NAP = 0.005  # seconds, at most, until it looks again whether it may end or train


class Trainer(Protocol):
    """See `PeftTrainer`."""

    def has_work(self, elapsed: float) -> bool: ...

    def step(self) -> tuple[int, float]: ...


def take_turns(
    workload: Workload,
    begin: float,
    server: Server | None,
    trainer: Trainer | None,
    may_end: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Runs what there is of a server and a trainer on a workload whose clock begins at `begin`.

    It trains while no request is there; one that comes then waits until the mini-batch is done. Ends when
    every request has its answer and `may_end`, which is told the seconds since `begin`, agrees.
    """
    coming = deque(sorted(workload.requests, key=lambda request: request.at) if server is not None else ())
    replies: list[TimedAnswer] = []
    outcome = Outcome()
    sleep(max(0.0, begin - clock()))
    used = time.process_time()
    while True:
        elapsed = clock() - begin
        while server is not None and coming and coming[0].at <= elapsed:
            replies.append(server.submit(coming.popleft()))
        until_next = coming[0].at - elapsed if coming else 1.0
        if server is not None and server.open:
            server.serve(until_next)
        elif not coming and may_end(elapsed):
            break
        elif trainer is not None and trainer.has_work(elapsed):
            tokens, loss = trainer.step()
            outcome.trained.append((clock(), tokens))
            outcome.losses.append(loss)
        else:
            sleep(min(until_next, _NAP))
    outcome.processor = time.process_time() - used
    outcome.stamps = [reply.stamps for reply in replies]
    return outcome
