"""Weights & Biases: a run for each job; its own variables, such as WANDB_API_KEY, say where and for whom."""

from collections.abc import Mapping
from typing import Any

import wandb

from coserve.core.job_status import JobStatus
from coserve.serve.reporting.reporter import JobAbout

_STEP = "train/global_step"  # transformers' name; wandb's own steps may not decrease, as validation's do


class WandbRun:
    """A run with the job's id, which goes on where the job does."""

    def __init__(self, about: JobAbout) -> None:
        self._run: Any = wandb.init(
            project=about.project,
            id=about.job,
            name=about.job,
            config=dict(about.settings),
            resume="allow",
            reinit="create_new",  # beside the runs of other jobs
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, _STEP: step})

    def end(self, status: JobStatus) -> None:
        self._run.finish(exit_code=0 if status in (JobStatus.SUCCEEDED, JobStatus.PAUSED) else 1)


def open_run(about: JobAbout) -> WandbRun:
    """A job's run."""
    return WandbRun(about)
