"""trackio: a run for each job, in its local database or in the Space that its own variables name."""

from collections.abc import Mapping
from typing import Any

import trackio

from coserve.core.job_status import JobStatus
from coserve.serve.reporting.reporter import JobAbout


class TrackioRun:
    """A run with the job's id as its name, which goes on where the job does."""

    def __init__(self, about: JobAbout) -> None:
        self._run: Any = trackio.init(
            project=about.project, name=about.job, config=dict(about.settings), resume="allow", embed=False
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def end(self, status: JobStatus) -> None:
        self._run.finish()


def open_run(about: JobAbout) -> TrackioRun:
    """A job's run."""
    return TrackioRun(about)
