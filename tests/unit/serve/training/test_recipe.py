"""The choices of "auto", and the order in which jobs train."""

from typing import Any

import pytest

from coserve.serve.routes.job_bodies import auto_batch_size, auto_epochs, usual_rate
from coserve.serve.store.records import JobRecord
from coserve.serve.training.shares import job_weights, next_job, next_to_wait


@pytest.mark.parametrize(
    ("examples", "epochs", "batch"),
    [
        (1, 25, 1),
        (4, 25, 1),
        (10, 10, 1),
        (33, 4, 1),
        (34, 3, 1),
        (100, 3, 2),
        (1000, 3, 16),
        (8333, 3, 32),
        (8334, 2, 32),
        (25_000, 1, 32),
        (10**6, 1, 32),
    ],
)
def test_auto(examples: int, epochs: int, batch: int) -> None:
    assert auto_epochs(examples) == epochs
    assert auto_batch_size(examples, epochs) == batch


@pytest.mark.parametrize(("width", "rate"), [(256, 3.2e-3), (2048, 4e-4), (4096, 2e-4), (8192, 1e-4)])
def test_wide_models_learn_at_lower_rates(width: int, rate: float) -> None:
    assert usual_rate(width) == pytest.approx(rate)


def job(id: str, tenant: str, status: str) -> JobRecord:
    more: dict[str, Any] = {"hyperparameters": {}, "options": {}, "training_file": "f"}
    return JobRecord(id, tenant, status, "tiny", id, "tiny", 1, seed=0, every=1, **more)


def test_a_tenants_flood_does_not_stand_before_anothers_job() -> None:
    flood = [job(f"a{i}", "ann", "running" if i == 0 else "queued") for i in range(100)]
    bob = job("b", "bob", "queued")
    weights = {"ann": 1.0, "bob": 1.0}
    chosen = next_job([*flood, bob], weights)
    assert chosen is bob
    running = job("b", "bob", "running")
    chosen = next_job([*flood, running], weights)
    assert chosen is not None and chosen.id == "a1"  # the oldest of those that have the least
    assert next_job([*flood, running, job("c", "bob", "queued")], {"ann": 1.0, "bob": 2.0}) is not None
    assert next_job([*flood, running, job("c", "bob", "queued")], {"ann": 1.0, "bob": 2.0}).id == "c"  # type: ignore[union-attr]
    assert next_job([job("p", "ann", "paused"), running], weights) is None


def test_a_tenant_with_several_jobs_gives_a_place_to_one_that_has_none() -> None:
    ann = [job(f"a{i}", "ann", "running") for i in range(2)]
    bob, more = job("b", "bob", "queued"), job("a2", "ann", "queued")
    weights = {"ann": 1.0, "bob": 1.0}
    waits = next_to_wait([*ann, more, bob], weights)
    assert waits is ann[1]
    assert next_to_wait([*ann, more], weights) is None  # its own do not displace each other
    assert next_to_wait([ann[0], bob], weights) is None  # one each: bob waits for its end
    shared = [ann[0], job("a1", "ann", "queued"), job("b", "bob", "running"), job("b2", "bob", "queued")]
    assert next_to_wait(shared, weights) is None  # and nobody comes back
    heavy = {"ann": 3.0, "bob": 1.0}
    assert next_to_wait([*ann, bob], heavy) is ann[1]  # each has one place at least; weights share the rest
    third = job("a2", "ann", "running")
    assert next_to_wait([*ann, third, job("b0", "bob", "running"), bob], heavy) is None
    assert next_to_wait([ann[0], job("b0", "bob", "running"), more], heavy) is None
    assert next_to_wait([bob], weights) is None


def test_shares_of_running_jobs() -> None:
    jobs = [job("a1", "ann", "running"), job("a2", "ann", "running"), job("a3", "ann", "queued")]
    weights = job_weights([*jobs, job("b", "bob", "running")], {"ann": 1.0, "bob": 3.0})
    assert weights == {"a1": 0.5, "a2": 0.5, "b": 3.0}
