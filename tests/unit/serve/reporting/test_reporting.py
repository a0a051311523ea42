"""Experiment trackers: what they are told, and that none of them can slow or fail a job."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coserve.core.job_status import JobStatus
from coserve.errors import ConfigError
from coserve.serve.reporting.observer import Reporting
from coserve.serve.reporting.reporter import Figures, JobAbout, Reporter
from coserve.serve.settings import REPORTERS, ServerSettings
from coserve.serve.store.records import JobRecord
from coserve.wire.messages import JobCheckpoint, JobEnded, JobNote, JobStarted, JobStep

STEP = JobStep("j", 3, 0.5, 40, 60, 1.5, 2e-4, 2.0)
NUMBERS = {"train/loss": 0.5, "train/learning_rate": 2e-4, "train/grad_norm": 1.5, "train/tokens": 60,
           "train/seconds": 2.0}  # fmt: skip


class Jobs:
    """The part of a store that reporting uses."""

    def __init__(self) -> None:
        more: dict[str, Any] = {"hyperparameters": {}, "training_file": "file-1", "peft": {"r": 4}}
        options = {"epochs": 2, "learning_rate": 2e-4}
        self.job = JobRecord(
            "j", "t", "running", "tiny", "ft:j", "tiny", 1, seed=0, every=1, options=options, **more
        )
        self.notes: list[tuple[str, str, str]] = []

    async def unfinished(self) -> tuple[JobRecord, ...]:
        return (self.job,)

    async def note(self, job: str, text: str, level: str) -> None:
        self.notes.append((job, text, level))


Install = Callable[..., ModuleType]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a module in place of a tracker's package, for reporters that are imported afresh."""

    def put(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        sys.modules.pop(f"coserve.serve.reporting.{name}", None)
        return module

    yield put
    for name in REPORTERS:
        sys.modules.pop(f"coserve.serve.reporting.{name}", None)


def play(
    tmp_path: Path, names: tuple[str, ...], *news: Any, wait: Callable[[Jobs], bool] = lambda _: True
) -> Jobs:
    """Tells the trackers of these events, and waits until `wait` holds; what was noted about jobs."""
    jobs = Jobs()

    async def story() -> None:
        settings = ServerSettings("m", tmp_path, report_to=names, report_project="p")
        store: Any = SimpleNamespace(jobs=jobs)
        reporting = Reporting(settings, store)
        for piece in news:
            await reporting.take(piece)
        end = time.monotonic() + 20
        while not wait(jobs) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await reporting.close()

    asyncio.run(story())
    return jobs


ALL_NEWS = (
    JobStarted("j", 0, 9, 30, 600, 0, 0, 1, 3, 2e-4), JobNote("j", "a note"), STEP,
    JobCheckpoint("j", 2, "p", "d", 0.5, 0.25), JobCheckpoint("j", 4, "p", "d", 0.5, None),
    JobStep("j", 4, float("nan"), 40, 60, 1.5, 2e-4, 2.0), JobEnded("j", JobStatus.SUCCEEDED, 4),
)  # fmt: skip
WITHOUT_LOSS = {key: value for key, value in NUMBERS.items() if key != "train/loss"}


class Said(list[Any]):
    """Calls of a fake tracker, by name."""

    def of(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.append((name, *given, named) if named else (name, *given))
            return result

        return call


def test_wandb_is_told_in_its_words(tmp_path: Path, install: Install) -> None:
    said = Said()
    run = SimpleNamespace(**{name: said.of(name) for name in ("define_metric", "log", "finish")})
    install("wandb", init=said.of("init", run))
    assert not play(tmp_path, ("wandb",), *ALL_NEWS).notes
    (_, started), *rest = said
    assert (started["project"], started["id"], started["resume"]) == ("p", "j", "allow")
    assert started["config"]["epochs"] == 2 and started["config"]["peft"] == {"r": 4}
    assert rest[2:] == [
        ("log", {**NUMBERS, "train/global_step": 3}),
        ("log", {"eval/loss": 0.25, "train/global_step": 2}),
        ("log", {**WITHOUT_LOSS, "train/global_step": 4}),
        ("finish", {"exit_code": 0}),
    ]


def test_trackio_is_told_in_its_words(tmp_path: Path, install: Install) -> None:
    said = Said()
    run = SimpleNamespace(log=said.of("log"), finish=said.of("finish"))
    install("trackio", init=said.of("init", run))
    assert not play(tmp_path, ("trackio",), *ALL_NEWS).notes
    assert said[0][1]["name"] == "j" and said[0][1]["project"] == "p"
    assert said[1:] == [
        ("log", NUMBERS, {"step": 3}),
        ("log", {"eval/loss": 0.25}, {"step": 2}),
        ("log", WITHOUT_LOSS, {"step": 4}),
        ("finish",),
    ]


def test_mlflow_is_told_in_its_words(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, runs = Said(), []

    def client(tracking_uri: str | None) -> Any:
        assert tracking_uri == f"sqlite:///{tmp_path}/reports/mlflow.db"
        made = SimpleNamespace(info=SimpleNamespace(run_id="r"))
        runs.append(made)
        calls = {name: said.of(name) for name in ("log_param", "log_metric", "set_terminated", "update_run")}
        return SimpleNamespace(
            get_experiment_by_name=said.of("find"), create_experiment=said.of("new", "e"),
            search_runs=said.of("search", runs[:-1]), create_run=said.of("run", made), **calls,
        )  # fmt: skip

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    install("mlflow", MlflowClient=client)
    search = ("search", ["e"], "attributes.run_name = 'j'", {"max_results": 1})
    assert not play(tmp_path, ("mlflow",), *ALL_NEWS).notes
    assert said[:4] == [("find", "p"), ("new", "p"), search, ("run", "e", {"run_name": "j"})]
    assert ("log_param", "r", "epochs", "2") in said
    assert ("log_metric", "r", "train/loss", 0.5, {"step": 3}) in said
    assert ("log_metric", "r", "eval/loss", 0.25, {"step": 2}) in said
    assert said[-1] == ("set_terminated", "r", "FINISHED")
    said.clear()
    assert not play(tmp_path, ("mlflow",), *ALL_NEWS).notes  # by another server: the same run goes on
    assert said[2:4] == [search, ("update_run", "r", {"status": "RUNNING"})]
    assert {call[0] for call in said[4:]} == {"log_metric", "set_terminated"}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert not play(tmp_path, ("tensorboard",), *ALL_NEWS).notes
    found = EventAccumulator(str(tmp_path / "reports" / "tensorboard" / "j"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(3, 0.5)]
    assert [(one.step, one.value) for one in found.Scalars("eval/loss")] == [(2, 0.25)]
    assert [one.step for one in found.Scalars("train/tokens")] == [3, 4]
    assert b'"epochs": 2' in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def fail(*_: Any, **__: Any) -> Any:
    raise OSError("no route to host")


def leave(*_: Any, **__: Any) -> Any:
    sys.exit(3)


@pytest.mark.parametrize("init", [fail, leave, lambda **_: SimpleNamespace(log=fail), lambda **_: None])
def test_what_fails_becomes_one_event(tmp_path: Path, install: Install, init: Any) -> None:
    said = Said()
    install("trackio", init=init)
    run = SimpleNamespace(**{name: said.of(name) for name in ("define_metric", "log", "finish")})
    install("wandb", init=lambda **_: run)
    jobs = play(tmp_path, ("trackio", "wandb"), *ALL_NEWS, wait=lambda jobs: bool(jobs.notes))
    ((job, text, level),) = jobs.notes
    assert (job, level) == ("j", "warn") and text.startswith("Not reported to trackio any more: ")
    assert len([call for call in said if call[0] == "log"]) == 3  # the other one is told of everything


def test_a_tracker_that_hangs_delays_nobody(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coserve.serve.reporting.reporter._MOST_WAITING", 5)
    monkeypatch.setattr("coserve.serve.reporting.reporter._ENDS_WITHIN", 0.2)
    held = threading.Event()
    install("trackio", init=lambda **_: held.wait(60))
    start = time.monotonic()
    steps = [JobStep("j", n, 0.5, 40, 60, 1.5, 2e-4, 2.0) for n in range(500)]
    try:
        jobs = play(tmp_path, ("trackio",), *steps, wait=lambda jobs: bool(jobs.notes))
        assert time.monotonic() - start < 10
        assert [(text, level) for _, text, level in jobs.notes] == [
            ("trackio is too slow: it is not told of all steps", "warn")
        ]
    finally:
        held.set()


def test_a_job_that_ends_is_forgotten(install: Install) -> None:
    noted: list[str] = []
    install("trackio", init=fail)
    reporter = Reporter("trackio", lambda job, text: noted.append(text))
    about = JobAbout("j", "p", Path())
    for numbers in ({"a": 1.0}, {"a": 2.0}, None, {"a": 3.0}):
        reporter.take(Figures(about, 1, numbers, JobStatus.FAILED))
    reporter.close()
    assert len(noted) == 2  # once for each life of the job


def test_trackers_are_checked_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="report_to has 'excel'; there are trackio, tensorboard, wandb, mlflow"
    ):
        ServerSettings("m", tmp_path, report_to=("wandb", "excel"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"report_to has 'wandb', which coserve\[wandb\] installs"):
        play(tmp_path, ("wandb",))
    assert not play(tmp_path, (), *ALL_NEWS).notes
