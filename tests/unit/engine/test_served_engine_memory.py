"""Jobs of a server that there is no memory for, now or ever."""

import json
import queue
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve import Engine, EngineConfig
from coserve.engine.background import Background
from coserve.engine.link import Inbox
from coserve.engine.served_engine import ServedEngine
from coserve.wire.codec import decode_answer, encode_answer
from coserve.wire.messages import (
    CheckJob,
    Hello,
    JobEnded,
    JobNews,
    JobNote,
    JobSpec,
    JobStarted,
    JobWaiting,
    PreviewJob,
    Reply,
    StopJob,
    WeighJob,
)
from coserve.worker.training_passes import TrainingPasses
from models import letter_tokenizer, tiny

HELLO = Hello("g", "m", "float32", "cpu", 1, 256, 96, 16, 512, 64, (0,), False, 0.0)
OPTIONS = {"batch_size": 4, "rows": 128}
METHOD = {"rank": 2, "targets": ["q_proj"]}


def make_engine(memory: int | str = "auto", model: str = "llama") -> Engine:
    config = EngineConfig(calibrate=False, cache_tokens=64, memory=memory)
    return Engine(tiny(model), config, tokenizer=letter_tokenizer())


class Desk:
    """A worker whose engine has room for one job."""

    def __init__(self, memory: int | str, model: str = "llama") -> None:
        self.inbox = Inbox()
        self.engine = make_engine(memory, model)
        self.worker = ServedEngine(self.engine, HELLO, Background(self.inbox, threads=1))
        self.hello = self.worker.connected()
        self.news: list[JobNews] = []
        self.replies: list[Reply] = []

    def until(self, done: Callable[[], object]) -> None:
        for _ in range(5000):
            if done():
                return
            wait = not self.worker.has_work
            try:
                self.inbox.get(wait, 10 if wait else None).then()  # type: ignore[union-attr]
            except queue.Empty:
                assert not wait, "nothing to do, and nothing comes"
            if self.worker.has_work:
                self.worker.step()
            report = self.worker.report()
            if report is not None:
                assert decode_answer(encode_answer(report)) == report
                self.news += [numbered.news for numbered in report.jobs]
                self.replies += report.replies
        raise AssertionError("it does not get there")

    def of(self, kind: type[Any], job: str) -> list[Any]:
        return [news for news in self.news if isinstance(news, kind) and news.job == job]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    lines = [{"prompt": f"{i}?", "completion": f" {i * i}"} for i in range(24)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def desk(data: Path, tmp_path: Path) -> Desk:
    """With room for one job and most of another."""
    desk = Desk("auto")
    desk.worker.take(start(data, tmp_path, "probe"))
    desk.until(lambda: desk.of(JobStarted, "probe"))
    return Desk(desk.engine.memory.ledger.used + 1000)


def start(data: Path, folder: Path, name: str, **options: Any) -> JobSpec:
    return JobSpec(name, str(data), str(folder / name), {**OPTIONS, **options}, METHOD)


def first(data: Path, folder: Path) -> JobSpec:
    """A job that goes on until it is stopped, however long the reading of another takes."""
    return start(data, folder, "one", epochs=10_000)


def test_a_job_waits_and_begins_when_the_one_before_has_ended(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.worker.take(first(data, tmp_path))
    desk.until(lambda: desk.of(JobStarted, "one"))
    desk.worker.take(start(data, tmp_path, "two"))
    desk.until(lambda: desk.of(JobWaiting, "two"))
    (waiting,) = desk.of(JobWaiting, "two")
    assert "more than are free, until job one ends" in waiting.reason
    again = desk.worker.connected()
    assert again.jobs == ("one", "two") and again.waiting == {"two": waiting.reason}
    desk.worker.take(WeighJob("two", 3.0))
    desk.worker.take(StopJob("one", keep=False))
    desk.until(lambda: desk.of(JobStarted, "two"))
    assert desk.of(JobEnded, "one") and desk.engine.jobs["two"].weight == 3.0
    assert desk.worker.connected().waiting == {}
    desk.until(lambda: desk.of(JobEnded, "two"))
    assert desk.of(JobEnded, "two")[-1].status == "succeeded"


@pytest.mark.parametrize(("keep", "status"), [(True, "paused"), (False, "cancelled")])
def test_a_job_that_waits_can_be_stopped(
    desk: Desk, data: Path, tmp_path: Path, keep: bool, status: str
) -> None:
    desk.worker.take(first(data, tmp_path))
    desk.until(lambda: desk.of(JobStarted, "one"))
    desk.worker.take(start(data, tmp_path, "two"))
    desk.until(lambda: desk.of(JobWaiting, "two"))
    desk.worker.take(StopJob("two", keep))
    desk.until(lambda: desk.of(JobEnded, "two"))
    assert desk.of(JobEnded, "two")[0].status == status and not desk.of(JobStarted, "two")
    desk.worker.take(StopJob("one", keep=False))
    desk.until(lambda: desk.of(JobEnded, "one"))
    assert desk.of(JobEnded, "one")[0].status == "cancelled"


@pytest.mark.parametrize("rank", [2, 4000])
def test_a_job_is_checked_before_it_is_taken_on(desk: Desk, data: Path, rank: int) -> None:
    method = {**METHOD, "rank": rank}
    desk.worker.take(CheckJob(7, JobSpec("j", str(data), "", OPTIONS, method)))
    desk.until(lambda: desk.replies)
    (reply,) = desk.replies
    assert reply.ref == 7 and (reply.fault is None) == (rank == 2)
    if reply.fault is not None:
        assert reply.fault.kind == "OutOfMemory" and "it would fit with rank=" in reply.fault.text


@pytest.mark.parametrize("rank", [2, 4000])
def test_a_job_is_looked_at_without_being_taken_on(desk: Desk, data: Path, rank: int) -> None:
    spec = JobSpec("j", str(data), "", OPTIONS, {**METHOD, "rank": rank}, data_name="mine.jsonl")
    desk.worker.take(PreviewJob(7, spec, 30))
    desk.until(lambda: desk.replies)
    (reply,) = desk.replies
    found = reply.preview
    assert reply.ref == 7 and reply.fault is None and found is not None and found.examples and found.steps
    assert (found.fault is None) == (found.memory is not None) == (rank == 2)
    assert found.fault is None or found.fault.kind == "OutOfMemory"
    desk.worker.take(PreviewJob(8, JobSpec("j", str(data.parent / "x"), "", OPTIONS, data_name="mine.jsonl")))
    desk.until(lambda: len(desk.replies) == 2)
    missing = desk.replies[1].preview
    assert missing is not None and missing.fault is not None
    assert missing.fault.text == "mine.jsonl: cannot be read (No such file or directory)"
    assert not desk.engine.jobs


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"target_modules": ["q_proj", "wq"]}, r"no linear or embedding .* \['wq'\]; there are"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["score"]}, "called 'score'"),
        ({"type": "ia3", "target_modules": ["nothing"]}, "nothing"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: '\\('"),
    ],
)  # fmt: skip
def test_what_the_base_has_not_is_told_before_a_job_is_taken_on(
    desk: Desk, tmp_path: Path, method: dict[str, Any], said: str
) -> None:
    """Whatever its data are."""
    desk.worker.take(CheckJob(1, JobSpec("j", str(tmp_path / "missing.jsonl"), "", OPTIONS, method)))
    desk.until(lambda: desk.replies)
    (reply,) = desk.replies
    assert reply.fault is not None and re.search(said, reply.fault.text)


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
COMPLETION = {"prompt": "a", "completion": "b"}
LONG = {"text": "x" * 300}


@pytest.mark.parametrize(
    ("objective", "lines", "validation", "kind", "said"),
    [
        ("dpo", [PAIR, COMPLETION], None, "DataError", "train.jsonl, line 2: expected .* found \"prompt\""),
        ("supervised", [PAIR], None, "DataError", "train.jsonl, line 1: .* are for preference training"),
        ("supervised", [], None, "DataError", "train.jsonl: expected at least one example"),
        ("supervised", [COMPLETION, {**COMPLETION, "completion": "x" * 300}], None, "DataError",
         "^1 of 2 examples is longer than the .*; the longest, train.jsonl, line 2, has .*: optimizer.too_l"),
        ("supervised", [COMPLETION], [PAIR], "ValidationDataError",
         "validation valid.jsonl, line 1: .* are for preference training"),
        ("dpo", [PAIR], [COMPLETION], "ValidationDataError", "validation valid.jsonl, line 1: expected"),
        ("supervised", [COMPLETION], [], "ValidationDataError", "validation valid.jsonl: expected at least"),
        ("supervised", [COMPLETION], [LONG], "ValidationDataError", "validation example 1 has"),
        ("supervised", [COMPLETION] * 513 + [PAIR], [COMPLETION], None, ""),
        ("kto", [{**COMPLETION, "label": True}], None, "DataError", "only one of 1 example is left"),
    ],
)  # fmt: skip
def test_data_of_another_kind_is_told_before_a_job_is_taken_on(
    desk: Desk,
    tmp_path: Path,
    objective: str,
    lines: list[Any],
    validation: list[Any] | None,
    kind: str | None,
    said: str,
) -> None:
    """As far as the beginnings of its files show it."""
    paths = {}
    for name, found in (("train", lines), ("valid", validation)):
        if found is not None:
            paths[name] = tmp_path / f"{name}.jsonl"
            paths[name].write_text("\n".join(map(json.dumps, found)))
    spec = JobSpec(
        "j", str(paths["train"]), "", OPTIONS, METHOD, {"type": objective},
        validation=None if validation is None else str(paths["valid"]),
    )  # fmt: skip
    desk.worker.take(CheckJob(1, spec))
    desk.until(lambda: desk.replies)
    (reply,) = desk.replies
    if kind is None:
        assert reply == Reply(1)
    else:
        assert reply.fault is not None and reply.fault.kind == kind
        assert re.search(said, reply.fault.text), reply.fault.text


def test_what_else_is_wrong_with_a_job_is_told_when_it_starts(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.worker.take(CheckJob(1, JobSpec("j", str(data), "", {"schedule": "sideways"}, METHOD)))
    desk.until(lambda: desk.replies)
    assert desk.replies == [Reply(1)]


def test_a_job_that_never_fits_fails_and_says_so(desk: Desk, data: Path, tmp_path: Path) -> None:
    spec = JobSpec("j", str(data), str(tmp_path / "j"), OPTIONS, {**METHOD, "rank": 4000})
    desk.worker.take(spec)
    desk.until(lambda: desk.of(JobEnded, "j"))
    (ended,) = desk.of(JobEnded, "j")
    assert ended.status == "failed" and ended.fault.kind == "OutOfMemory"


def fail_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the first training pass through the tail run out of memory; returns the jobs that met this."""
    failed: list[str] = []
    real = TrainingPasses._through_tail

    def walk(self: TrainingPasses, segment: Any) -> None:
        if not failed:
            failed.append(segment.job)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        real(self, segment)

    monkeypatch.setattr(TrainingPasses, "_through_tail", walk)
    return failed


@pytest.mark.local
def test_a_job_that_ran_out_and_goes_on_tells_so(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_once(monkeypatch)
    desk.worker.take(start(data, tmp_path, "one"))
    desk.until(lambda: desk.of(JobEnded, "one"))
    (note,) = desk.of(JobNote, "one")
    assert "rows=64, keep=inputs" in note.text and desk.of(JobEnded, "one")[0].status == "succeeded"
    assert failed == ["one"]


@pytest.mark.local
def test_a_job_at_all_linears_tells_of_experts_left_untrained(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, which is no reason to deny the job a second try with less memory."""
    desk, failed = Desk("auto", "mixtral"), fail_once(monkeypatch)
    every = JobSpec(
        "one", str(data), str(tmp_path / "one"), OPTIONS, {"r": 2, "target_modules": "all-linear"}
    )
    desk.worker.take(every)
    desk.until(lambda: desk.of(JobEnded, "one"))
    left, shrunk = desk.of(JobNote, "one")
    assert left.level == "warn" and "leaves the fused experts untrained (3 modules" in left.text
    assert "keep=inputs" in shrunk.text and failed == ["one"]
    assert desk.of(JobEnded, "one")[0].status == "succeeded"
    desk.worker.take(start(data, tmp_path, "two"))
    desk.until(lambda: desk.of(JobEnded, "two"))
    assert not desk.of(JobNote, "two"), "its targets are chosen"
