"""Runs plans of a worker in this process: on the thread that collects their results, or in the background."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

import torch

from coserve.core.plan import BasePlan, BaseResult
from coserve.errors import PassFailed
from coserve.executors.executor import Command, DeviceWorker, ExecutorSpec, R, ReadMemory
from coserve.executors.transport import WorkerTransport

W = TypeVar("W", bound=DeviceWorker)


class PlanUnderWay(Protocol):
    """A plan that a device has been given."""

    def result(self) -> BaseResult:
        """Waits for the plan."""


class LaunchingWorker(DeviceWorker, Protocol):
    """The owner of a device that computes beside the host."""

    def launch_ahead(self, plan: BasePlan) -> PlanUnderWay | None:
        """Gives the device a plan, behind those that it has, without waiting for any; None where the plan
        needs what they find, or the host on its way: it is to be run."""


L = TypeVar("L", bound=LaunchingWorker)
Begun = BaseResult | PlanUnderWay

_QUIET: Final = 0.1  # seconds between two looks whether a plan under way goes on


class LocalExecutor(WorkerTransport, Generic[W]):
    """The transport to a worker of this process: a queue of plans. On a processor a thread for them would
    compete with the planning of the next one."""

    def __init__(self, worker: W, run: Callable[[BasePlan], BaseResult] | None = None) -> None:
        """`run` waits for the result of the oldest plan, by default by running it."""
        super().__init__(worker.run if run is None else run)
        self.worker = worker

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return self.worker.spec

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
            self._end_plans(waits=not isinstance(command, ReadMemory))
        return self.worker.call(command)


class BackgroundExecutor(LocalExecutor[L]):
    """The transport to a worker whose device is not this processor: plans run one after the other on a
    thread, which mostly waits for the device. The next step is planned meanwhile, and begins as soon as the
    one before it has ended; one that the worker launches ahead is behind it on the device by then."""

    def __init__(self, worker: L) -> None:
        super().__init__(worker, self._wait)
        self._thread = ThreadPoolExecutor(1, "device", self._enter, (torch.get_num_threads(),))
        self._number: int | None = None  # of the thread
        self._begun = deque[Future[Begun]]()  # of the plans without a result here
        self._beat: Callable[[], object] = int  # nothing
        self._goes_on = False  # since the last look
        worker.on_progress(self._note)

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        super().launch(plan)
        self._begin(plan)

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self._beat = beat

    def _begin(self, plan: BasePlan) -> None:
        before = self._begun[-1] if self._begun else None
        self._begun.append(self._thread.submit(self._follow, plan, before))

    def _follow(self, plan: BasePlan, before: Future[Begun] | None) -> Begun:
        """Launches a plan, or runs it, unless the one before it has failed, and runs again."""
        if before is not None and before.exception() is not None:
            raise PassFailed("the plan before this one runs again")
        launched = self.worker.launch_ahead(plan)
        return self.worker.run(plan) if launched is None else launched

    def _wait(self, plan: BasePlan) -> BaseResult:
        oldest = self._begun[0]
        while not oldest.done():
            with suppress(TimeoutError):
                oldest.exception(_QUIET)
            self._tell_progress()
        begun = oldest.result()
        result = begun if isinstance(begun, BaseResult) else begun.result()
        self._begun.popleft()
        return result

    def _tell_progress(self) -> None:
        if self._goes_on:
            self._goes_on = False
            self._beat()

    def _enter(self, threads: int) -> None:
        self._number = threading.get_ident()
        torch.set_num_threads(threads)

    def _note(self) -> None:
        if threading.get_ident() == self._number:
            self._goes_on = True
        else:  # a command, on its caller's thread
            self._beat()

    def _is_there(self) -> bool:
        return self._begun[0].done() and not self._is_stuck

    def _repeat(self, narrower: bool) -> None:
        super()._repeat(narrower)
        self._begun.clear()
        for plan in self._launched:
            self._begin(plan)
