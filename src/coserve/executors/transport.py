"""The host's end of a way to one worker: plans out, results back, and what is repeated of them."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import PassFailed, TogetherFailed
from coserve.executors.executor import Executor


class WorkerTransport(Executor):
    """A queue of plans, which a worker runs in their order.

    A plan with a pass that failed (PassFailed) stays the oldest, and others wait behind it. If it failed for
    those who share it, the plan runs again at once as its `narrower` one; if weights could not be read, it
    runs again as it is when somebody next waits for it.
    """

    def __init__(self, run: Callable[[BasePlan], BaseResult]) -> None:
        """`run` waits for the result of the oldest plan."""
        self._run = run
        self._launched: deque[BasePlan] = deque()  # without a result here
        self._results: deque[BaseResult] = deque()  # that nobody has collected
        self._is_stuck = False  # the oldest plan cannot run until it is told to run again
        self._has_failed = False  # the oldest plan has become narrower

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        self._launched.append(plan)

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        while self._launched and not self._results and (wait or self._is_there()):
            if self._is_stuck:
                self._is_stuck = False
                self._repeat(narrower=False)
            try:
                result = self._run(self._launched[0])
            except TogetherFailed:
                self._has_failed = True
                self._repeat(narrower=True)
            except PassFailed:
                self._is_stuck = True
                raise
            else:
                self._launched.popleft()
                self._results.append(replace(result, together_failed=True) if self._has_failed else result)
                self._has_failed = False
        return self._results.popleft() if self._results else None

    def _repeat(self, narrower: bool) -> None:
        """Has the worker run the oldest plan again, of which a pass has failed."""
        if narrower:
            self._launched[0] = self._launched[0].narrower

    def _is_there(self) -> bool:
        """Tells whether something has come of the oldest plan that is not collected."""
        return False

    def _end_plans(self, waits: bool) -> None:
        """Runs all plans before a command. One that does not wait for plans that cannot run does not raise
        WeightsUnreadable."""
        done = deque[BaseResult]()
        try:
            while self._launched and (waits or not self._is_stuck):
                with suppress(*(() if waits else (PassFailed,))):
                    if (result := self.collect()) is not None:
                        done.append(result)
        finally:
            done.extend(self._results)
            self._results = done
