"""Work for one tenant that fails in a way nobody foresaw ends that work; beside it an answer goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.contained import contained
from coserve.core.request import FinishReason
from coserve.engine import jobs as jobs_module
from coserve.engine import served_engine as served_module
from coserve.errors import AdapterError, JobError
from coserve.wire.messages import (
    AddAdapter,
    CheckJob,
    CheckMethod,
    Command,
    JobEnded,
    JobSpec,
    PreviewJob,
    Reply,
    Token,
)
from desk import Desk, ask, job, write_data
from models import tiny, with_lora

pytestmark = pytest.mark.local


class Panic(BaseException):
    """As libraries written in Rust raise it."""


ERRORS = (
    OverflowError("int too large"),
    Panic("index out of bounds"),
    RecursionError("too deep"),
    KeyError(7),
)


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    with_lora(tiny("llama"), 1).save_pretrained(str(folder))
    return folder


def raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """Raises instead of doing what is asked, from the call numbered `after` on."""
    calls = iter(range(after))

    def fail(*_: Any, **__: Any) -> Any:
        next(calls, None)
        raise error

    return fail


@pytest.fixture(autouse=True)
def bystander(desk: Desk, request: pytest.FixtureRequest) -> Iterator[None]:
    """An answer that is under way all the while, and is whole in the end."""
    desk.reports.clear()
    desk.asked = 0
    name = f"bystander of {request.node.name}"
    desk.send(ask(name, 40))
    desk.step()
    yield
    mine = lambda: [token for token in desk.tokens if token.id == name]  # noqa: E731
    desk.until(lambda: mine()[-1].finish is not None)
    assert len(mine()) == 40 and mine()[-1].finish is FinishReason.LENGTH
    desk.until(lambda: not desk.worker.has_work)
    assert desk.engine.stats().free_pages == 64 and not desk.engine.executor.worker.sessions


COMMANDS: dict[str, tuple[Any, str, Command]] = {
    "looking at an adapter": (None, "look_at", AddAdapter(5, "x", "/nowhere")),
    "naming an adapter": (None, "add_stored", AddAdapter(5, "x", "/nowhere")),
    "a method": (served_module, "settings_of", CheckMethod(5, {})),
    "a job": (served_module, "read_beginning", CheckJob(5, JobSpec("j", "/nowhere", ""))),
    "a preview": (served_module, "read_preview", PreviewJob(5, JobSpec("j", "/nowhere", ""))),
    "judging a preview": (served_module, "judge", PreviewJob(5, JobSpec("j", "/nowhere", ""))),
}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_that_fails_gets_a_fault(
    what: str, error: BaseException, desk: Desk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, command = COMMANDS[what]
    if isinstance(command, AddAdapter):
        command = AddAdapter(5, f"{what} {error!r}", str(folder))
    monkeypatch.setattr(owner or desk.engine.adapters, name, raising(error))
    desk.send(command)
    desk.until(lambda: desk.replies)
    (reply,) = desk.replies
    assert isinstance(reply, Reply) and reply.fault is not None
    assert reply.fault.kind in ("AdapterError", "ConfigError")
    assert type(error).__name__ in reply.fault.text


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_request_that_fails_gets_a_fault(
    error: BaseException, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.engine, "submit", raising(error))
    desk.send(ask("a"))
    assert [token.fault.kind for token in desk.tokens if token.fault] == ["InternalError"]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_weights_that_cannot_be_read_fail_who_asked_for_them(
    error: BaseException, desk: Desk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"weights {error!r}"
    desk.send(AddAdapter(6, key, str(folder)))
    desk.until(lambda: desk.replies)
    monkeypatch.setattr("coserve.adapters.paging.stored.StoredVersion.read", raising(error))
    desk.send(ask(f"of {key}", adapter=key))

    def failed() -> list[Token]:
        return [token for token in desk.tokens if token.fault is not None]

    desk.until(failed)
    assert [(token.id, token.fault.kind) for token in failed() if token.fault] == [
        (f"of {key}", "AdapterError")
    ]


PLACES = {
    "reading": (jobs_module, "read_job"),
    "beginning": ("coserve.engine.training.Training", "start"),
    "the first step": ("coserve.train.steps.JobSteps", "next_work"),
    "the tail": ("coserve.train.tail.Tail", "loss"),
    "a layer on the way back": ("coserve.train.backward", "layer_gradients"),
    "its state": ("coserve.train.session.TrainingSession", "snapshot"),
    "its checkpoint": (jobs_module, "write_checkpoint"),
    "its validation": ("coserve.engine.scoring.Scoring", "advance"),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_job_that_fails_ends_alone(
    where: str, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[where]
    error = ERRORS[list(PLACES).index(where) % 2]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", raising(error))
    else:
        monkeypatch.setattr(owner, name, raising(error))
    data = write_data(tmp_path / "train.jsonl")
    desk.send(job(data, tmp_path / "j", where, every=2, validation=str(data)))
    ended = desk.ended()
    assert isinstance(ended, JobEnded) and ended.status == "failed" and ended.fault is not None
    assert ended.fault.kind in ("JobError", "InternalError")
    assert type(error).__name__ in ended.fault.text
    monkeypatch.undo()
    desk.send(job(data, tmp_path / "again", f"{where}, mended"))
    assert desk.ended().status == "succeeded"


def test_what_is_said_of_an_unforeseen_error() -> None:
    known = AdapterError("as it is")
    assert contained(known, "this") is known
    told = contained(OSError(13, "Permission denied", "/secret/place"), "this", JobError)
    assert type(told) is JobError and str(told) == "this failed: PermissionError: Permission denied"
    assert len(str(contained(ValueError("x" * 10_000), "this"))) < 300
    with pytest.raises(KeyboardInterrupt):
        contained(KeyboardInterrupt(), "this")
