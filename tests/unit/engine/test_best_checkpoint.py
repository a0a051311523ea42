"""The checkpoint that is a job's result, and early stopping."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from coserve.engine import jobs as jobs_module
from coserve.engine.scoring import Validation
from coserve.engine.served_job import BestCheckpoint
from coserve.train import checkpoint
from coserve.wire.messages import JobCheckpoint, JobNote, JobStep, StopJob
from desk import Desk, job, write_data

ALL = {"options": {"epochs": 20, "batch_size": 2}}  # 120 steps


@pytest.mark.parametrize("threshold", [0.0, 0.15])
def test_patience_counts_as_transformers_does(threshold: float) -> None:
    draws = random.Random(3)
    for _ in range(200):
        theirs = EarlyStoppingCallback(3, threshold)
        mine, lowest, state = BestCheckpoint(3, threshold), math.inf, SimpleNamespace(best_metric=None)
        arguments: Any = SimpleNamespace(greater_is_better=False)
        for step in range(1, 12):
            loss = draws.choice([1.0, 1.1, 1.2, 0.9, draws.uniform(0.5, 1.5)])
            theirs.check_metric_value(arguments, state, None, loss)
            if loss < lowest:
                lowest = state.best_metric = loss
            mine.take(step * 10, loss)
            assert mine.without_gain == theirs.early_stopping_patience_counter
            assert mine.is_hopeless == (mine.without_gain >= 3)
            assert mine.best is not None and mine.best[1] == lowest


def test_the_best_is_the_earliest_of_the_lowest_numbers() -> None:
    best = BestCheckpoint(2, known={1: math.nan, 2: 3.0, 4: 2.0, 6: 2.0, 8: math.inf})
    assert best.best == (4, 2.0) and best.without_gain == 2 and best.is_hopeless
    best.resume(4)
    assert best.best == (4, 2.0) and not best.is_hopeless
    best.take(4, 5.0)  # measured again
    assert best.best == (2, 3.0)
    assert BestCheckpoint(known={1: math.nan}).best is None
    assert not BestCheckpoint(known=dict.fromkeys(range(99), 1.0)).is_hopeless  # without a patience


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "train.jsonl")


def losses(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Has the validations of a job find these losses, and the last one from then on."""
    left = list(values)

    class Told:
        def __init__(self, *_: object) -> None:
            self.result = Validation(left.pop(0) if len(left) > 1 else left[0])

        def advance(self) -> bool:
            return True

        def cancel(self) -> None: ...

    monkeypatch.setattr(jobs_module, "start_scoring", Told)


def notes(desk: Desk) -> list[str]:
    return [f"{note.level}: {note.text}" for note in desk.news(JobNote) if isinstance(note, JobNote)]


def test_a_job_stops_when_its_patience_is_over(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, 3.0, 2.0, 2.5, 2.4)
    more: dict[str, Any] = {"every": 1, "validation": str(data), "keep_best": True, "patience": 2}
    desk.send(job(data, tmp_path / "j", **more, **ALL))
    ended = desk.ended()
    assert (ended.status, ended.step) == ("succeeded", 2)
    steps = len(desk.news(JobStep))
    assert 4 <= steps < 120
    stopped, best = notes(desk)
    assert stopped.startswith("info: Stopped early at step ") and stopped.endswith("2 times in a row")
    assert best == "info: The best checkpoint is that of step 2: 2.0000"
    assert (tmp_path / "j" / "step-000002" / "adapter_model.safetensors").exists()
    desk.until(lambda: not desk.worker.has_work)
    assert not desk.engine.jobs and sum(desk.engine.adapters.cache.nbytes()) == 0


def test_without_a_patience_a_job_ends_with_its_best(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, 3.0, 2.0, 2.5)
    desk.send(job(data, tmp_path / "j", every=2, validation=str(data), keep_best=True))
    ended = desk.ended()
    assert (ended.status, ended.step, len(desk.news(JobStep))) == ("succeeded", 4, 6)
    losses(monkeypatch, 3.0, 2.0, 2.5)
    desk.send(job(data, tmp_path / "k", "k", every=2, validation=str(data)))
    assert desk.ended().step == 6  # not asked for
    assert len(notes(desk)) == 1


def test_a_resumed_job_knows_its_earlier_losses(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, 2.0, 3.0)
    more: dict[str, Any] = {"every": 2, "validation": str(data), "keep_best": True, **ALL}
    desk.send(job(data, tmp_path / "j", **more))
    desk.until(lambda: len(desk.news(JobCheckpoint)) == 2)  # written aside: some of 120 steps later
    desk.send(StopJob("j", keep=True))
    assert desk.ended().status == "paused"
    told = [news for news in desk.news(JobCheckpoint) if isinstance(news, JobCheckpoint)]
    known = {news.step: news.validation_loss for news in told if news.validation_loss is not None}
    assert known[2] == 2.0 and checkpoint.newest_checkpoint(tmp_path / "j").step >= 4
    known[999] = 0.1  # of a damaged checkpoint
    desk.send(job(data, tmp_path / "j", **more, validated=known, patience=1))
    ended = desk.ended()
    assert (ended.status, ended.step) == ("succeeded", 2)


def test_a_job_without_any_loss_ends_as_it_is(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(job(data, tmp_path / "j", keep_best=True, patience=1))
    ended = desk.ended()
    assert (ended.status, ended.step) == ("succeeded", 6) and not notes(desk)
