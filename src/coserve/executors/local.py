"""Runs plans of a worker in this process, on the thread that collects their results."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import WeightsUnreadable
from coserve.executors.executor import Command, Executor, ExecutorSpec, R, ReadMemory


class DeviceWorker(Protocol):
    """The owner of a device (`worker/worker.py`), as its transport sees it."""

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        ...

    def run(self, plan: BasePlan) -> BaseResult:
        """Runs a plan. One that raised WeightsUnreadable may be run again: what of it has run computes the
        same once more."""
        ...

    def call(self, command: Command[R]) -> R:
        """Executes a command between two plans."""
        ...

    def pause_training(self) -> None:
        """See `Executor`."""
        ...

    def resume_training(self) -> None:
        """See `Executor`."""
        ...

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        ...

    def beat(self) -> None:
        """Tells that a plan that is tried again and again is no hang."""
        ...


W = TypeVar("W", bound=DeviceWorker)


class LocalExecutor(Executor, Generic[W]):
    """The transport to a worker of this process: a queue of plans. A thread of its own for each plan would
    compete with the planning of the next."""

    def __init__(self, worker: W) -> None:
        self.worker = worker
        self._launched: deque[BasePlan] = deque()
        self._is_stuck = False  # weights that the oldest plan needs could not be read
        self._results: deque[BaseResult] = deque()  # not collected yet

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return self.worker.spec

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        self._launched.append(plan)

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        if self._results:
            return self._results.popleft()
        if not wait or not self._launched:
            return None
        if self._is_stuck:
            self.worker.beat()
        self._is_stuck = True  # where weights cannot be read it stays the oldest, and runs again next time
        result = self.worker.run(self._launched[0])
        self._is_stuck = False
        self._launched.popleft()
        return result

    def pause_training(self) -> None:
        """See `Executor`."""
        self.worker.pause_training()

    def resume_training(self) -> None:
        """See `Executor`."""
        self.worker.resume_training()

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self.worker.on_progress(beat)

    def call(self, command: Command[R]) -> R:
        """See `Executor`."""
        if not command.beside:
            self._run_all(waits=not isinstance(command, ReadMemory))
        return self.worker.call(command)

    def _run_all(self, waits: bool) -> None:
        """Runs all plans before a command. One that does not wait for plans that cannot run does not raise
        WeightsUnreadable."""
        done = deque[BaseResult]()
        try:
            while self._launched and (waits or not self._is_stuck):
                with suppress(*(() if waits else (WeightsUnreadable,))):
                    if (result := self.collect()) is not None:
                        done.append(result)
        finally:
            done.extend(self._results)
            self._results = done
