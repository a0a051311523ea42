"""`coserve import openai`: exported jobs and data become files and jobs of a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from stub_server import Stub

from coserve.cli.importing import body_of
from coserve.errors import ConfigError
from coserve.serve.schema.jobs import JobRequest

Run = Callable[..., Result]
JOB: dict[str, Any] = {
    "object": "fine_tuning.job",
    "id": "ftjob-1",
    "model": "gpt-4.1-mini-2025-04-14",
    "training_file": "file-a",
    "validation_file": "file-b",
    "hyperparameters": {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 2.0},
    "method": {
        "type": "dpo",
        "dpo": {"hyperparameters": {"n_epochs": 3, "beta": 0.2, "batch_size": "auto"}},
        "supervised": None,
    },
    "seed": 42,
    "user_provided_suffix": "mine",
    "metadata": {"who": "me"},
    "status": "succeeded",
    "result_files": ["file-r"],
    "integrations": [],
    "trained_tokens": 10,
}
NAMED = {"object": "file", "id": "file-b", "filename": "held out.jsonl", "purpose": "fine-tune"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.json").write_text(json.dumps({"object": "list", "data": [JOB]}))
    (tmp_path / "files.jsonl").write_text(json.dumps(NAMED) + "\n" + json.dumps({**NAMED, "id": "file-c"}))
    for name in ("file-a.jsonl", "held out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "file", "completion": "list"}\n')
    return tmp_path


def test_jobs_are_created_again_on_their_data(run: Run, stub: Stub, folder: Path) -> None:
    stub.answers |= {
        "GET /v1/models/tiny": {"id": "tiny"},
        "POST /v1/files": [{"id": "file-1"}, {"id": "file-2"}],
        "POST /v1/fine_tuning/jobs": {"id": "ftjob-x"},
    }
    names = ("jobs.json", "files.jsonl", "file-a.jsonl", "held out.jsonl")
    found = run("import", "openai", *names, "--model", "tiny", "--json")
    assert [one["id"] for one in json.loads(found.stdout)] == ["file-1", "file-2", "ftjob-x"]
    sent = stub.body("POST /v1/fine_tuning/jobs")
    assert sent == {
        "model": "tiny", "training_file": "file-1", "validation_file": "file-2", "suffix": "mine", "seed": 42,
        "metadata": {"who": "me", "openai_job": "ftjob-1"},
        "method": {"type": "dpo", "dpo": {"hyperparameters": JOB["method"]["dpo"]["hyperparameters"]}},
    }  # fmt: skip
    assert JobRequest.model_validate(sent).method is not None
    assert stub.requests().count("POST /v1/files") == 2


def test_what_is_missing_is_told_before_anything_is_sent(run: Run, stub: Stub, folder: Path) -> None:
    for files, words in (
        (("jobs.json", "files.jsonl", "file-a.jsonl"), "file-b of the job ftjob-1 is not there"),
        (("jobs.json", "file-a.jsonl", "held out.jsonl"), "file-b of the job ftjob-1 is not there"),
    ):
        failed = run("import", "openai", *files, fails=True)
        assert isinstance(failed.exception, ConfigError) and words in str(failed.exception)
    whole = ("jobs.json", "files.jsonl", "file-a.jsonl", "held out.jsonl")
    failed = run("import", "openai", *whole, fails=True)
    assert "--model" in str(failed.exception) and "model_aliases" in str(failed.exception)
    assert "POST /v1/files" not in stub.requests()
    told = json.loads(run("import", "openai", *whole, "--dry-run").stdout)
    assert told[0] == {"file": "file-a.jsonl"} and told[-1]["model"] == JOB["model"]


def test_files_alone_are_uploaded(run: Run, stub: Stub, folder: Path) -> None:
    stub.answers["POST /v1/files"] = {"id": "file-1"}
    assert "file-1" in run("import", "openai", "file-a.jsonl").stdout
    assert stub.requests() == ["POST /v1/files"]


def test_bodies_of_jobs() -> None:
    old = {name: value for name, value in JOB.items() if name != "method"}
    assert body_of(old, None)["hyperparameters"] == JOB["hyperparameters"]
    for bad, words in (
        ({**JOB, "method": {"type": "kto"}}, "method 'kto'"),
        ({"id": "x"}, "no training_file"),
    ):
        with pytest.raises(ConfigError, match=words):
            body_of(bad, None)
