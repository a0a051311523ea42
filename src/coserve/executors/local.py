"""Runs plans of a worker in this process, on the thread that collects their results."""

from collections.abc import Callable
from typing import Generic, TypeVar

from coserve.executors.executor import Command, DeviceWorker, ExecutorSpec, R, ReadMemory
from coserve.executors.transport import WorkerTransport

W = TypeVar("W", bound=DeviceWorker)


class LocalExecutor(WorkerTransport, Generic[W]):
    """The transport to a worker of this process: a queue of plans. A thread of its own for each plan would
    compete with the planning of the next."""

    def __init__(self, worker: W) -> None:
        super().__init__(worker.run)
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
