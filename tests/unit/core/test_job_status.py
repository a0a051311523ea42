"""One state machine for jobs."""

import pytest

from coserve.core.job_status import FINAL, UNFINISHED, JobStatus


def test_a_job_is_over_or_may_move_on() -> None:
    assert {*FINAL, *UNFINISHED} == set(JobStatus) and not {*FINAL} & {*UNFINISHED}
    for status in JobStatus:
        assert status.is_final == (status in FINAL) and status.may_become(status)
    assert all(before.may_become(after) for before in UNFINISHED for after in FINAL)


@pytest.mark.parametrize(
    ("before", "after"),
    [("succeeded", "running"), ("cancelled", "queued"), ("failed", "queued"), ("paused", "running")],
)
def test_moves_that_no_job_makes(before: str, after: str) -> None:
    assert not JobStatus(before).may_become(JobStatus(after))
