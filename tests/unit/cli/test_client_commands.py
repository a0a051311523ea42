"""Commands that talk to a server: what they ask for, what they print, how they end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from stub_server import Stub

from coserve.cli import client
from coserve.cli.complete import complete_adapters, complete_jobs, complete_models
from coserve.errors import AdapterError, ConfigError, ServerError, Unreachable
from coserve.serve.schema.jobs import JobRequest

Run = Callable[..., Result]
MODELS = {
    "data": [
        {"id": "base", "created": 1, "owned_by": "coserve", "parent": None},
        {"id": "ft:base:me:poet:1", "created": 2, "owned_by": "me", "parent": "base"},
    ]
}
JOBS = "/v1/fine_tuning/jobs"


def job(status: str = "running", **more: Any) -> dict[str, Any]:
    return {"id": "ftjob-1", "status": status, "model": "base", "created_at": 1, "object": "job", **more}


def stream(*pieces: str) -> str:
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def metrics(step: int, loss: float) -> dict[str, Any]:
    data = {"step": step, "total_steps": 3, "train_loss": loss, "tokens": 100, "seconds": 0.5}
    return {"id": f"e{step}", "type": "metrics", "message": f"Step {step}", "created_at": 1, "data": data}


def test_a_server_that_is_not_there_is_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSERVE_URL", "http://127.0.0.1:9")
    error = run("jobs", "list", fails=True).exception
    assert isinstance(error, Unreachable)
    assert str(error).startswith("no server answers on http://127.0.0.1:9: start one with `coserve serve`")


def test_what_the_server_says_is_the_error(run: Run, stub: Stub) -> None:
    stub.answers[f"GET {JOBS}/x"] = (404, {"error": {"message": "No such job."}})
    error = run("jobs", "show", "x", fails=True).exception
    assert isinstance(error, ServerError) and str(error) == "No such job."


def test_something_else_than_coserve_is_noticed(run: Run, stub: Stub) -> None:
    stub.answers["GET /v1/models"] = "<html>hello</html>"
    assert isinstance(run("adapters", "list", fails=True).exception, Unreachable)


def test_the_key_is_sent_and_a_url_may_end_in_v1(run: Run, stub: Stub) -> None:
    stub.answers["GET /v1/models"] = MODELS
    run("adapters", "list", "--url", stub.url + "/v1", "--api-key", "sk-x")
    assert stub.asked[-1][1]["Authorization"] == "Bearer sk-x"


def test_adapters_are_listed_for_people_and_for_programs(run: Run, stub: Stub) -> None:
    stub.answers["GET /v1/models"] = MODELS
    assert "ft:base:me:poet:1" in run("adapters", "list").stdout
    assert json.loads(run("adapters", "list", "--json").stdout) == MODELS["data"][1:]


def test_what_there_is_to_say_against_an_adapter_stands_below_the_list(run: Run, stub: Stub) -> None:
    plain = MODELS["data"][1]
    stub.answers["GET /v1/models"] = {"data": [plain, {**plain, "id": "odd", "warning": "It names 'b'."}]}
    assert run("adapters", "list").stdout.splitlines()[-1] == "odd: It names 'b'."
    stub.answers["GET /v1/models"] = {"data": [{**plain, "warning": None}]}
    assert "None" not in run("adapters", "list").stdout


def test_adapters_are_pinned_and_the_list_tells_where_they_are(run: Run, stub: Stub) -> None:
    here = {**MODELS["data"][1], "pinned": True, "location": "memory"}
    away = {**here, "id": "away", "pinned": False, "location": "disk"}
    stub.answers |= {
        "GET /v1/models": {"data": [here, away]},
        f"POST /v1/adapters/{here['id']}/pin": here,
        f"DELETE /v1/adapters/{here['id']}/pin": away,
    }
    lines = run("adapters", "list").stdout.splitlines()
    assert any("memory, pinned" in line for line in lines) and any("disk" in line for line in lines)
    assert run("adapters", "pin", here["id"]).stdout == f"pinned {here['id']}\n"
    assert json.loads(run("adapters", "pin", here["id"], "--json").stdout) == here
    assert run("adapters", "unpin", here["id"]).stdout == f"unpinned {here['id']}\n"
    assert not json.loads(run("adapters", "unpin", here["id"], "--json").stdout)["pinned"]


def test_import_sends_the_two_files_and_no_other(run: Run, stub: Stub, tmp_path: Path) -> None:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        run("adapters", "import", str(folder))
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle.*adapters convert"):
        run("adapters", "import", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    stub.answers["POST /v1/adapters"] = {"id": "poet"}
    assert json.loads(run("adapters", "import", str(folder), "--json").stdout) == {"id": "poet"}
    sent = stub.asked[-1][2]
    assert b'name="name"\r\n\r\npoet' in sent and b'{"r": 4}' in sent and b"weights" in sent
    assert b"pickle" not in sent
    (archive := tmp_path / "My poet.ZIP").write_bytes(b"packed")
    assert run("adapters", "import", str(archive)).stdout.startswith("imported poet")
    sent = stub.asked[-1][2]
    assert b'name="name"\r\n\r\nMy poet' in sent and b'name="archive"; filename="My poet.ZIP"' in sent
    archive.unlink()
    with pytest.raises(ConfigError, match="is no folder, zip file, hub name or URL"):
        run("adapters", "import", str(archive))


def test_export_writes_both_files(run: Run, stub: Stub, tmp_path: Path) -> None:
    name = "ft:base:me:poet:1"
    stub.answers = {
        f"GET /v1/models/{name}": {"id": name},
        f"GET /v1/adapters/{name}/config": '{"r": 4}',
        f"GET /v1/adapters/{name}/weights": b"\x00weights",
        f"GET /v1/adapters/{name}/archive": b"packed",
    }
    to = tmp_path / "out.zip"
    assert json.loads(run("adapters", "export", name, str(to), "--json").stdout)["bytes"] == 6
    assert to.read_bytes() == b"packed"
    with pytest.raises(ConfigError, match="is there already"):
        run("adapters", "export", name, str(to))
    to = tmp_path / "out"
    assert json.loads(run("adapters", "export", name, str(to), "--json").stdout)["bytes"] == 16
    assert {file.name: file.read_bytes() for file in to.iterdir()} == {
        "adapter_config.json": b'{"r": 4}',
        "adapter_model.safetensors": b"\x00weights",
    }
    with pytest.raises(ConfigError, match="is there already"):
        run("adapters", "export", name, str(to))


def test_exporting_what_does_not_exist_leaves_nothing(run: Run, stub: Stub, tmp_path: Path) -> None:
    assert isinstance(run("adapters", "export", "x", str(tmp_path / "o"), fails=True).exception, ServerError)
    assert not (tmp_path / "o").exists()


def test_exporting_the_base_leaves_nothing(run: Run, stub: Stub, tmp_path: Path) -> None:
    stub.answers["GET /v1/models/base"] = {"id": "base", "parent": None}
    stub.answers["GET /v1/adapters/base/config"] = (404, {"error": {"message": "No adapter."}})
    assert isinstance(run("adapters", "export", "base", "out", fails=True).exception, ServerError)
    assert not (tmp_path / "out").exists()


def test_alone_they_list(run: Run, stub: Stub, tmp_path: Path) -> None:
    stub.answers[f"GET {JOBS}"] = {"data": [job()]}
    stub.answers["GET /v1/models"] = MODELS
    assert "ftjob-1" in run("jobs").stdout
    assert json.loads(run("jobs", "--json", "--limit", "5").stdout)[0]["id"] == "ftjob-1"
    assert [one["id"] for one in json.loads(run("adapters", "--json").stdout)] == ["ft:base:me:poet:1"]
    assert json.loads(run("keys", "--state", str(tmp_path), "--json").stdout) == []
    assert "Lets a paused job go on." in run("jobs", "--help").stdout


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://x", "http://:8000", "http://[::1"])
def test_what_is_no_address_is_said(url: str, run: Run) -> None:
    error = run("jobs", "--url", url, fails=True).exception
    assert isinstance(error, Unreachable) and "address" in str(error) and "\n" not in str(error)


def test_deleting_asks_first(run: Run, stub: Stub) -> None:
    stub.answers["DELETE /v1/models/poet"] = {"id": "poet", "deleted": True}
    assert run("adapters", "delete", "poet", text="n\n").exit_code == 1
    assert not stub.asked
    assert run("adapters", "delete", "poet", text="y\n").exit_code == 0
    assert json.loads(run("adapters", "delete", "poet", "--yes", "--json").stdout)["deleted"]


def test_jobs_in_a_table_and_as_json(run: Run, stub: Stub) -> None:
    stub.answers[f"GET {JOBS}"] = {"data": [job(fine_tuned_model="ft:x")]}
    assert "ftjob-1" in run("jobs", "list").stdout
    assert json.loads(run("jobs", "list", "--json").stdout)[0]["fine_tuned_model"] == "ft:x"


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_jobs_are_told(run: Run, stub: Stub, verb: str) -> None:
    stub.answers[f"POST {JOBS}/ftjob-1/{verb}"] = job("told")
    assert run("jobs", verb, "ftjob-1").stdout == "ftjob-1: told\n"
    assert json.loads(run("jobs", verb, "ftjob-1", "--json").stdout)["status"] == "told"


def test_events_and_checkpoints(run: Run, stub: Stub) -> None:
    stub.answers[f"GET {JOBS}/j/events"] = {"data": [metrics(2, 1.0), metrics(1, 2.0)]}
    lines = run("jobs", "events", "j").stdout.splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["Step 1", "Step 2"]
    one = {
        "step_number": 50,
        "fine_tuned_model_checkpoint": "ft:x:ckpt-step-50",
        "metrics": {"train_loss": 1.25},
        "created_at": 1,
    }
    stub.answers[f"GET {JOBS}/j/checkpoints"] = {"data": [one]}
    shown = run("jobs", "checkpoints", "j").stdout
    assert "ft:x:ckpt-step-50" in shown and "1.2500" in shown


def test_finetune_waits_for_the_engine_then_uploads_creates_and_follows(
    run: Run, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "x"}\n')
    message = {"id": "e0", "type": "message", "message": "Fine-tuning job started", "created_at": 1}
    starting = (503, {"error": {"code": "engine_lost", "message": "the engine is starting"}})
    stub.answers = {
        "GET /health/ready": [starting, starting, {"status": "ok"}],
        "GET /v1/models": MODELS,
        "POST /v1/files": {"id": "file-1"},
        f"POST {JOBS}": job("queued"),
        f"GET {JOBS}/ftjob-1": job("succeeded", fine_tuned_model="ft:base:me:poet:1"),
        f"GET {JOBS}/ftjob-1/events": {"data": [metrics(2, 1.5), metrics(1, 2.0), message]},
    }
    monkeypatch.setattr(client, "ASK_AGAIN", 0.0)
    options = ["--suffix", "poet", "--epochs", "2", "--rank", "4", "--learning-rate", "2e-3"]
    refused = run("finetune", str(data), *options, "--peft", "rank=8", fails=True).exception
    assert isinstance(refused, ConfigError) and "--rank gives it too" in str(refused)
    result = run("finetune", str(data), *options, "--optimizer", "schedule=constant")
    assert result.exit_code == 0
    assert result.stderr.count("Waiting: the engine is starting") == 1
    assert stub.requests()[:3] == ["GET /health/ready"] * 3
    assert "Fine-tuning job started" in result.stdout and "step 2/3 | loss 1.5000" in result.stdout
    assert "coserve chat --model ft:base:me:poet:1" in result.stdout
    assert stub.body(f"POST {JOBS}") == {
        "model": "base",
        "training_file": "file-1",
        "suffix": "poet",
        "hyperparameters": {"n_epochs": 2},
        "peft": {"rank": 4},
        "optimizer": {"learning_rate": 0.002, "schedule": "constant"},
    }


CHECKED: dict[str, Any] = {
    "valid": True,
    "error": None,
    "filename": "data.jsonl",
    "container": "JSON lines",
    "format": "chats in messages",
    "records": {"total": 30, "read": 16, "all_read": False},
    "tokens": {
        "total": 600, "min": 10, "p50": 20, "p90": 40, "p99": 80, "max": 90,
        "histogram": [{"from": 10, "to": 49, "count": 28}, {"from": 50, "to": 89, "count": 2}],
    },
    "examples": {"trained": 27, "truncated": 0, "skipped": 2, "dropped": 1},
    "too_long": {
        "count": 2, "limit": 64, "setting": "skip", "longest": "data.jsonl, line 7", "split_texts": 1,
        "pieces": 4,
    },
    "ignored": ["id", "source"],
    "first_example": [{"text": "user: Hi [b]", "trained": False}, {"text": "Hello", "trained": True}],
    "first_rejected": None,
    "steps": 81,
    "expected_seconds": 125.0,
    "memory": {"needed": 2**20, "available": 2**30},
}  # fmt: skip


def test_a_check_creates_nothing_and_tells_what_the_job_would_be(
    run: Run, stub: Stub, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "x"}\n')
    stub.answers = {
        "GET /v1/models": MODELS,
        "POST /v1/files": [{"id": "file-1"}, {"id": "file-2"}],
        "DELETE /v1/files/file-1": {"deleted": True},
        "DELETE /v1/files/file-2": {"deleted": True},
        "POST /v1/fine_tuning/validate": CHECKED,
    }
    flags = ["--check", "--too-long", "skip", "--max-length", "64", "--validation-file", str(data)]
    shown = run("finetune", str(data), *flags).stdout.splitlines()
    assert stub.body("POST /v1/fine_tuning/validate") == {
        "model": "base",
        "training_file": "file-1",
        "validation_file": "file-2",
        "optimizer": {"max_length": 64, "too_long": "skip"},
    }
    assert stub.requests()[-2:] == ["DELETE /v1/files/file-1", "DELETE /v1/files/file-2"]
    assert f"POST {JOBS}" not in stub.requests()
    assert shown[0] == (
        "data.jsonl: JSON lines, chats in messages, 30 records, of which 16 were read for this"
    )
    assert shown[1] == "tokens: 600 in all; in one example min 10, p50 20, p90 40, p99 80, max 90"
    assert shown[2:4] == [f"  10-49  {'#' * 40} 28", "  50-89  ### 2"]
    assert shown[4:12] == [
        "examples: 27 to train on",
        "  2 are longer than 64 tokens; the longest is data.jsonl, line 7",
        "  2 are left out: too long",
        "  1 is left out: nothing to learn",
        "  1 is plain text and too long, cut into 4 pieces",
        "not read: id, source",
        "optimizer steps: 81; expected: about 2 min 05 s if nothing else runs",
        "memory: 1 MiB of 1 GiB",
    ]
    assert shown[-1] == "user: Hi [b][[Hello]]"
    stub.answers["POST /v1/files"] = {"id": "file-1"}
    assert json.loads(run("finetune", str(data), "--check", "--json").stdout) == CHECKED


def test_a_check_of_a_job_that_would_be_refused_is_status_1(run: Run, stub: Stub, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "x"}\n')
    said = "2 of 9 are longer than optimizer.max_length 9: optimizer.too_long 'skip' leaves such examples out"
    refused = {**CHECKED, "valid": False, "error": {"code": "x", "message": said, "param": "training_file"}}
    unknown = {"expected_seconds": None, "memory": None, "tokens": None}
    stub.answers = {
        "GET /v1/models": MODELS,
        "POST /v1/files": {"id": "file-1"},
        "DELETE /v1/files/file-1": {"deleted": True},
        "POST /v1/fine_tuning/validate": {**refused, **unknown},
        f"POST {JOBS}": (400, {"error": {"message": said}}),
    }
    result = run("finetune", str(data), "--check")
    assert (
        result.exit_code == 1 and "expected: unknown" in result.stdout and "memory: unknown" in result.stdout
    )
    told = "2 of 9 are longer than --max-length 9: --too-long 'skip' leaves such examples out"
    assert result.stdout.splitlines()[-1] == f"refused: {told}"
    stub.answers["POST /v1/fine_tuning/validate"] = (404, {"error": {"message": "no model"}})
    assert str(run("finetune", str(data), "--check", fails=True).exception) == "no model"
    assert stub.requests()[-1] == "DELETE /v1/files/file-1"
    error = run("finetune", str(data), "--max-length", "9", fails=True).exception
    assert isinstance(error, ServerError) and str(error) == told


GRADER = {"type": "regex", "pattern": "a+"}
METHODS: dict[str, tuple[list[str], Any]] = {
    "dpo": (
        ["--method-option", "beta=0.3", "--epochs", "2"],
        {"hyperparameters": {"n_epochs": 2, "beta": 0.3}},
    ),
    "orpo": ([], {"hyperparameters": {}}),
    "kto": (
        ["--method-option", "desirable_weight=2", "--batch-size", "4"],
        {"hyperparameters": {"batch_size": 4, "desirable_weight": 2}},
    ),
    "distillation": (
        ["--teacher", "ft:base:me:poet:1", "--method-option", "top_k=4"],
        {"hyperparameters": {"top_k": 4}, "teacher": "ft:base:me:poet:1"},
    ),
    "reinforcement": (
        ["--grader", "grader.json", "--method-option", "group_size=4", "--method-option", "clip=0.2"],
        {"hyperparameters": {"group_size": 4, "clip": 0.2}, "grader": GRADER},
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_flags_of_a_training_method_are_the_jobs_fields(
    name: str, run: Run, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a validation file, checkpoints, the best of them and early stopping; each figure is shown."""
    monkeypatch.chdir(tmp_path)
    for file in ("d.jsonl", "v.jsonl"):
        Path(file).write_text("{}\n")
    Path("grader.json").write_text(json.dumps(GRADER))
    flags, wanted = METHODS[name]
    figures = {"valid_reward": 0.75} if name == "reinforcement" else {"valid_loss": 1.25}
    told = metrics(2, 1.5)
    told["data"] |= figures
    stub.answers = {
        "POST /v1/files": [{"id": "file-1"}, {"id": "file-2"}],
        f"POST {JOBS}": job("queued"),
        f"GET {JOBS}/ftjob-1": job("succeeded", fine_tuned_model="ft:base:me:poet:1"),
        f"GET {JOBS}/ftjob-1/events": {"data": [told]},
    }
    settings = {
        "save_steps": 5, "load_best_model_at_end": True, "early_stopping_patience": 3,
        "early_stopping_threshold": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 4,
    }  # fmt: skip
    pairs = [f"--optimizer={key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items()]
    given = ["finetune", "d.jsonl", "--model", "base", "--validation-file", "v.jsonl", *pairs]
    result = run(*given, "--method", name, *flags)
    assert result.exit_code == 0, result.stdout
    body = stub.body(f"POST {JOBS}")
    assert body == {
        "model": "base",
        "training_file": "file-1",
        "validation_file": "file-2",
        "method": {"type": name, name: wanted},
        "optimizer": settings,
    }
    JobRequest.model_validate(body)
    shown = "validation reward 0.7500" if name == "reinforcement" else "validation loss 1.2500"
    assert shown in result.stdout


@pytest.mark.parametrize("flags", [["--teacher", "x"], ["--method-option", "beta=1"]])
def test_a_methods_flags_need_the_method(flags: list[str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("words")
    error = run("finetune", str(tmp_path / "d.txt"), *flags, fails=True).exception
    assert isinstance(error, ConfigError) and str(error).endswith("--teacher need a --method")


def test_a_job_that_fails_is_exit_status_1(run: Run, stub: Stub) -> None:
    stub.answers = {
        f"GET {JOBS}/j": job("failed", error={"message": "the loss became NaN"}),
        f"GET {JOBS}/j/events": {"data": []},
    }
    result = run("jobs", "attach", "j")
    assert result.exit_code == 1 and "failed: the loss became NaN" in result.stdout


def test_detach_prints_how_to_come_back(run: Run, stub: Stub, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("words")
    stub.answers = {"POST /v1/files": {"id": "f"}, f"POST {JOBS}": job("queued")}
    result = run("finetune", str(tmp_path / "d.txt"), "--model", "base", "--detach")
    assert "coserve jobs attach ftjob-1" in result.stdout
    assert stub.requests() == ["GET /health/ready", "POST /v1/files", f"POST {JOBS}"]


def test_chat_answers_one_message(run: Run, stub: Stub) -> None:
    stub.answers = {"GET /v1/models": MODELS, "POST /v1/chat/completions": stream("Hel", "lo")}
    assert run("chat", "hi", "--system", "be short", "--temperature", "0").stdout == "Hello\n"
    body = stub.body("POST /v1/chat/completions")
    assert body["model"] == "base" and body["stream"] and body["temperature"] == 0
    assert [said["role"] for said in body["messages"]] == ["system", "user"]


def test_piped_chat_takes_turns_and_commands(run: Run, stub: Stub) -> None:
    stub.answers = {
        "GET /v1/models": MODELS,
        "GET /v1/models/ft:base:me:poet:1": MODELS["data"][1],
        "POST /v1/chat/completions": [stream("one"), stream("two"), stream("three")],
    }
    lines = "first\n/adapter ft:base:me:poet:1\nsecond\n/clear\n/system rhyme\nthird\n/exit\nnever\n"
    assert run("chat", text=lines).stdout == "one\ntwo\nthree\n"
    bodies = [json.loads(body) for name, _, body in stub.asked if name.startswith("POST")]
    assert [body["model"] for body in bodies] == ["base", "ft:base:me:poet:1", "ft:base:me:poet:1"]
    assert [said["content"] for said in bodies[1]["messages"]] == ["first", "one", "second"]
    assert [said["content"] for said in bodies[2]["messages"]] == ["rhyme", "third"]


def test_an_error_within_a_stream_is_an_error(run: Run, stub: Stub) -> None:
    stub.answers = {
        "GET /v1/models": MODELS,
        "POST /v1/chat/completions": 'data: {"error": {"message": "engine lost"}}\n\n',
    }
    error = run("chat", "hi", fails=True).exception
    assert isinstance(error, ServerError) and str(error) == "engine lost"


def test_names_are_completed_and_no_server_is_no_error(
    run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answers = {"GET /v1/models": MODELS, f"GET {JOBS}": {"data": [job()]}}
    assert complete_adapters("ft:") == ["ft:base:me:poet:1"] and complete_adapters("x") == []
    assert complete_models("") == ["base", "ft:base:me:poet:1"]
    assert complete_jobs("ftj") == ["ftjob-1"]
    monkeypatch.setenv("COSERVE_URL", "http://127.0.0.1:9")
    assert complete_jobs("") == []


def test_keys_are_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"))
    made = json.loads(run("keys", "create", "acme", "--weight", "2", "--json", *state).stdout)
    secret = run("keys", "create", "other", *state).stdout.strip()
    assert secret.startswith("sk-coserve-") and secret != made["secret"]
    assert run("keys", "revoke", made["id"], *state).exit_code == 0
    listed = json.loads(run("keys", "list", "--json", *state).stdout)
    assert [(key["tenant"], key["revoked"] is None) for key in listed] == [("acme", False), ("other", True)]
    assert secret not in json.dumps(listed)
    with pytest.raises(ConfigError, match="no key in force"):
        run("keys", "revoke", made["id"], *state)
    with pytest.raises(ConfigError, match="there are keys in force"):
        run("keys", "forget", *state)
    last = run("keys", "revoke", secret[:17], *state).stdout
    assert "answers nobody" in last and "coserve keys forget" in last
    assert "no keys any more" in run("keys", "forget", *state).stdout
    assert json.loads(run("keys", "list", "--json", *state).stdout) == []


def test_doctor_says_what_is_here(run: Run, tmp_path: Path) -> None:
    checks = json.loads(run("doctor", "--json", "--state", str(tmp_path / "s"), "--port", "0").stdout)
    found = {check["what"]: check for check in checks}
    assert {"python", "processor", "memory", "torch", "transformers", "state folder", "port 0"} <= set(found)
    assert found["torch"]["level"] == found["state folder"]["level"] == "good"
    assert not (tmp_path / "s").exists()


def test_doctor_fails_where_coserve_cannot_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run("doctor", "--json", "--state", str(tmp_path / "file" / "state"))  # a table folds long paths
    assert result.exit_code == 1 and "cannot be written" in result.stdout


def test_serve_shows_its_settings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "poet").mkdir()
    (tmp_path / "coserve.toml").write_text("[server]\nport = 1\nmax_n = 3\n")
    options = ["--port", "2", "--adapter", f"poet={tmp_path / 'poet'}", "--device", "cuda", "--no-standby"]
    options += ["--quantize", "4bit", "--memory", "6GiB", "--offload", "--swap-space", "3GiB"]
    shown = json.loads(run("serve", "who/what", *options, "--show-config").stdout)
    assert (shown["port"], shown["max_n"], shown["model"]) == (2, 3, "who/what")
    assert shown["adapters"] == {"poet": str(tmp_path / "poet")}
    assert shown["engine"]["device"] == "cuda" and shown["standby"] is False
    assert shown["engine"]["quantize"] == "4bit"
    assert shown["engine"]["memory"] == "6GiB" and shown["engine"]["offload"] is True
    assert shown["engine"]["swap_space"] == "3GiB"
    with pytest.raises(ConfigError, match="expected NAME=PATH"):
        run("serve", "--adapter", "poet")


@pytest.mark.parametrize("model", ["/no/such/folder", "./there", "a b", "a/b/c"])
def test_a_model_folder_that_is_not_there_is_said_at_once(model: str, run: Run) -> None:
    with pytest.raises(ConfigError, match="there is no model folder"):
        run("serve", model, "--show-config")
