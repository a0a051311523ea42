"""Whole mini-batches, the common base of strategies without token windows."""

from abc import abstractmethod

from coserve.schedule.policies.base import INFINITE, NO_TRAINING, Allowance, Policy, View


class WholeBatches(Policy):
    """Training has the machine to itself, an optimizer step of one job at a time; requests wait meanwhile.

    A subclass decides in `begins` when training gets the machine; it is called whenever inference has it and
    a job waits. With `whole_jobs` training keeps the machine until the job has ended.
    """

    whole = True
    whole_jobs = False

    def __init__(self) -> None:
        self._slice: tuple[str, int] | None = None  # the job that has the machine, and its step

    @abstractmethod
    def begins(self, view: View) -> bool:
        """Tells whether the first job in turn gets the machine now."""

    def ended(self, view: View) -> None:
        """Called when inference gets the machine back."""

    def holds(self, view: View) -> bool:
        """Tells whether a mini-batch has the machine, up to and including its optimizer step."""
        if self._slice is not None and not self._is_under_way(view, *self._slice):
            self._slice = None
            self.ended(view)
        if self._slice is None and view.jobs and self.begins(view):
            self._slice = view.jobs[0].name, view.jobs[0].steps
        return self._slice is not None

    def allow(self, view: View) -> Allowance:
        """The rest of the mini-batch that has the machine, or nothing."""
        if self._slice is None:
            return NO_TRAINING
        return Allowance(INFINITE, rows=None, job=self._slice[0])

    def _is_under_way(self, view: View, name: str, step: int) -> bool:
        job = next((job for job in view.jobs if job.name == name), None)
        return job is not None and (self.whole_jobs or job.steps == step)
