"""MLflow: a run for each job in the experiment named as the project, at MLFLOW_TRACKING_URI."""

from collections.abc import Mapping

from mlflow import MlflowClient

from coserve.core.job_status import JobStatus
from coserve.serve.reporting.reporter import JobAbout

_LONGEST = 500  # characters of a parameter
_ENDS = {JobStatus.SUCCEEDED: "FINISHED", JobStatus.PAUSED: "KILLED", JobStatus.CANCELLED: "KILLED"}


class MlflowRun:
    """A run by its id, so that the runs of other jobs go on beside it."""

    def __init__(self, about: JobAbout) -> None:
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(about.project)
        experiment = self._client.create_experiment(about.project) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=about.job).info.run_id
        for name, value in about.settings.items():
            self._client.log_param(self._run, name, str(value)[:_LONGEST])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, number in figures.items():
            self._client.log_metric(self._run, name, number, step=step)

    def end(self, status: JobStatus) -> None:
        self._client.set_terminated(self._run, _ENDS.get(status, "FAILED"))


def open_run(about: JobAbout) -> MlflowRun:
    """A job's run."""
    return MlflowRun(about)
