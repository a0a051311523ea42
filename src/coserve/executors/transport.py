"""The host's end of a way to one worker: plans out, results back, and what is repeated of them."""

from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import replace

from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import PassFailed, TogetherFailed
from coserve.executors.executor import Executor


class Transport(Executor, ABC):
    """A queue of plans, which a worker runs in their order.

    A plan with a pass that failed (PassFailed) stays the oldest, and others wait behind it. If it failed for
    those who share it, the plan runs again at once as its `narrower` one; if weights could not be read, it
    runs again as it is when somebody next waits for it.
    """

    def __init__(self) -> None:
        self._under_way = 0  # launched plans without a result here
        self._results: deque[BaseResult] = deque()  # that nobody has collected
        self._is_stuck = False  # the oldest plan cannot run until it is told to run again
        self._has_failed = False  # the oldest plan has run again as a narrower one

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        self._send(plan)
        self._under_way += 1

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        while self._under_way and not self._results and (wait or self._is_there()):
            self._advance()
        return self._results.popleft() if self._results else None

    @abstractmethod
    def _send(self, plan: BasePlan) -> None:
        """Hands the worker a plan."""

    @abstractmethod
    def _repeat(self, narrower: bool) -> None:
        """Has the oldest plan, a pass of which has failed, run again."""

    @abstractmethod
    def _receive(self) -> BaseResult:
        """Waits for the result of the oldest plan. Raises PassFailed."""

    @abstractmethod
    def _is_there(self) -> bool:
        """Tells whether `_receive` has something without waiting."""

    def _advance(self) -> None:
        """Takes in what came of the oldest plan. Raises WeightsUnreadable."""
        if self._is_stuck:
            self._is_stuck = False
            self._repeat(narrower=False)
        try:
            result = self._receive()
        except TogetherFailed:
            self._has_failed = True
            self._repeat(narrower=True)
            return
        except PassFailed:
            self._is_stuck = True
            raise
        self._under_way -= 1
        failed, self._has_failed = self._has_failed or result.together_failed, False
        self._results.append(replace(result, together_failed=failed))

    def _end_plans(self, waits: bool) -> None:
        """Runs all plans before a command. One that does not wait for plans that cannot run does not raise
        WeightsUnreadable."""
        while self._under_way and (waits or not self._is_stuck):
            with suppress(*(() if waits else (PassFailed,))):
                self._advance()
