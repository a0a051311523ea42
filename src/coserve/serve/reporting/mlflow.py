"""MLflow: a run for each job in the experiment named as the project, at MLFLOW_TRACKING_URI; without that in
`reports/mlflow.db` in the state folder."""

import os
from collections.abc import Mapping

from mlflow import MlflowClient

from coserve.core.job_status import JobStatus
from coserve.serve.reporting.reporter import JobAbout

_LONGEST = 500  # characters of a parameter
_ENDS = {JobStatus.SUCCEEDED: "FINISHED", JobStatus.PAUSED: "KILLED", JobStatus.CANCELLED: "KILLED"}


class MlflowRun:
    """A run by its id, so that the runs of other jobs go on beside it. A job that goes on under another
    server has the run that it had, found by its name."""

    def __init__(self, about: JobAbout) -> None:
        self._client = MlflowClient(_tracking_uri(about))
        found = self._client.get_experiment_by_name(about.project)
        experiment = self._client.create_experiment(about.project) if found is None else found.experiment_id
        named = f"attributes.run_name = '{about.job}'"
        if runs := self._client.search_runs([experiment], named, max_results=1):
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=about.job).info.run_id
        for name, value in about.settings.items():
            self._client.log_param(self._run, name, str(value)[:_LONGEST])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, number in figures.items():
            self._client.log_metric(self._run, name, number, step=step)

    def end(self, status: JobStatus) -> None:
        self._client.set_terminated(self._run, _ENDS.get(status, "FAILED"))


def _tracking_uri(about: JobAbout) -> str | None:
    """None: as the variable says."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    about.folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{about.folder.absolute() / 'mlflow.db'}"


def open_run(about: JobAbout) -> MlflowRun:
    """A job's run."""
    return MlflowRun(about)
