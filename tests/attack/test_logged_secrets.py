"""No log has a prompt, an answer or a key: requests are drawn, and the logs searched."""

import asyncio
import io
import json
import logging
import random
import string
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from typer.testing import CliRunner

from coserve.cli.app import app, main
from coserve.cli.checks import Check, Level
from coserve.config import EngineConfig
from coserve.core.masking import masked
from coserve.errors import ConfigError
from coserve.serve.artifacts.objects import unusable
from coserve.serve.errors import ApiError
from coserve.serve.settings import ServerSettings, shown
from coserve.serve.store import postgres
from coserve.serve.store.store import Store
from coserve.wire.child import describe_exception
from coserve.wire.control import decode_path
from coserve.wire.logs import CONTEXT, JsonFormatter, TextFormatter, WorkContext
from serving import Play, World

_TEXT = ("chat/completions", "completions", "embeddings", "responses", "messages")
_PATHS = (*_TEXT * 3, "files", "fine_tuning/jobs", "batches", "models", "usage", "nothing")


@pytest.fixture
def logs() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """All that this process logs, as JSON and as text."""
    root, streams, handlers = logging.getLogger(), (io.StringIO(), io.StringIO()), []
    level = root.level
    for stream, formatter in zip(streams, (JsonFormatter("api"), TextFormatter("%(message)s")), strict=True):
        handlers.append(handler := logging.StreamHandler(stream))
        handler.setFormatter(formatter)
        handler.addFilter(lambda record: not record.name.startswith("httpx"))  # the test's own client
        root.addHandler(handler)
    logging.getLogger("coserve").setLevel(logging.DEBUG)
    yield streams
    for handler in handlers:
        root.removeHandler(handler)
    logging.getLogger("coserve").setLevel(level)


def secret(draw: random.Random) -> str:
    return "zq" + "".join(draw.choices(string.ascii_lowercase, k=12))


def body(draw: random.Random, path: str, words: str) -> bytes:
    """A body that is well, has a field too many, misses one, is of a wrong type, or no JSON."""
    messages = [{"role": "user", "content": words}]
    fields: dict[str, Any] = {"model": draw.choice(("tiny", "tiny", "tiny", words))}
    if path != "embeddings":
        most = "max_output_tokens" if path == "responses" else "max_tokens"
        fields |= {most: draw.choice((16, 16, 16, words)), "stream": draw.random() < 0.3}
    fields |= {"messages": messages} if path in ("chat/completions", "messages") else {}
    fields |= {"prompt": words} if path == "completions" else {"input": words}
    if path in ("chat/completions", "messages"):
        del fields["input"]
    if draw.random() < 0.2:
        fields |= {"metadata": {words: words}, "user": words, words: words}
    kept = {name: value for name, value in fields.items() if draw.random() < 0.95}
    whole = json.dumps(kept).encode()
    return whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole


def test_requests_leave_no_secret_in_a_log(
    play: Play, logs: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(17)

    async def story(world: World) -> None:
        _, key = await world.state.store.tenants.create_key("ann")
        world.say("the answer is zqanswerzq")
        hidden = ["zqanswerzq", key]
        for number in range(120):
            words, guess = secret(draw), f"sk-coserve-{''.join(draw.choices(string.ascii_letters, k=43))}"
            hidden += [words, guess]
            given = draw.choice((key, key, key, guess))
            headers = {"authorization": f"Bearer {given}", "x-request-id": f"mine-{number}"}
            headers["content-type"] = "application/json"
            of = draw.choice(_PATHS)
            path = f"/v1/{of}" + draw.choice(("", "", "", f"?q={words}", f"/{given}"))
            method = draw.choice(("POST", "POST", "POST", "GET", "DELETE"))
            await world.http.request(method, path, content=body(draw, of, words), headers=headers)
        told = logs[0].getvalue() + logs[1].getvalue()
        assert not [one for one in hidden if one in told]
        lines = [json.loads(line) for line in logs[0].getvalue().splitlines()]
        assert not [line for line in lines if "traceback" in line or "Traceback" in line["message"]]
        access = [line for line in lines if line["logger"] == "coserve.access"]
        assert [line["request_id"] for line in access] == [f"mine-{number}" for number in range(120)]
        assert {line["status"] for line in access} >= {200, 400, 401, 404}
        assert {line.get("tenant") for line in access} == {"ann", None}
        answered = [line for line in access if line["completion_tokens"]]
        assert len(answered) > 10 and all(line["version"] == "tiny" for line in answered)
        assert all(line["key"] == key[:17] and line["prompt_tokens"] for line in answered)

    play(story, access_log=True)


def test_a_traceback_is_a_field_of_one_line() -> None:
    """Of a record that no other handler sees: pytest-xdist cannot send what it captures of this one."""
    token = CONTEXT.set(WorkContext("req_1", tenant="ann", job="job_1"))
    try:
        raise ValueError("two\nlines \udcff")
    except ValueError:
        given = ("coserve.x", logging.ERROR, __file__, 1, "it\nfailed", (), sys.exc_info())
        line = JsonFormatter("api").format(logging.LogRecord(*given))
    finally:
        CONTEXT.reset(token)
    assert "\n" not in line and line.encode()
    found = json.loads(line)
    assert found["message"] == "it\nfailed" and found["level"] == "error" and found["process"] == "api"
    assert found["traceback"].startswith("Traceback") and "ValueError: two" in found["traceback"]
    assert (found["request_id"], found["tenant"], found["job"]) == ("req_1", "ann", "job_1")
    assert found["time"].endswith("Z") and "T" in found["time"]


def test_an_error_of_the_database_has_no_values(tmp_path: Path) -> None:
    """Exceptions of SQLAlchemy are in tracebacks: by default with all values that were to be stored."""
    insert = text("INSERT INTO files (id, filename) VALUES ('file-1', :name)")
    with Store(tmp_path) as store, pytest.raises(IntegrityError) as raised:
        asyncio.run(store._database.write(lambda session: session.execute(insert, {"name": "zqsecretzq"})))
    assert "INSERT" in str(raised.value) and "zqsecretzq" not in str(raised.value)
    pytest.importorskip("psycopg")
    engine = postgres._engine(postgres.parse("postgresql://me:zqsecretzq@h/d"), 1, "SERIALIZABLE")
    assert engine.hide_parameters and "zqsecretzq" not in repr(engine)


SECRET_TEXTS = (
    "postgresql://me:zqsecretzq@db.example/coserve",
    "postgresql://me:zq@secretzq/zqsecretzq@db.example/coserve?sslmode=require",
    "postgresql://me@db.example/coserve?password=zqsecretzq&sslpassword=zqsecretzq",
    "s3://AKIA:zqsecretzq@bucket/prefix",
    "s3://bucket/prefix?aws_secret_access_key=zqsecretzq&X-Amz-Signature=zqsecretzq",
    "sk-coserve-abcdefzqsecretzq",
    "host=db user=me password='zqsecretzq zqsecretzq' dbname=coserve",
)


def texts_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The settings that a text can be in, with what makes their value of one."""
    for name, hint in get_type_hints(kind).items():
        if hint is str or hint is Path or {str, Path} & {*get_args(hint)}:
            if get_origin(hint) is tuple:
                yield name, lambda given: [given]
            elif "Mapping" in str(hint) or "dict" in str(hint):
                yield name, lambda given: {"one": given}
            else:
                yield name, lambda given: given


def test_no_setting_is_shown_or_refused_with_its_secret() -> None:
    """Each setting that can hold a text has each of these secrets: it is shown masked, or refused without."""
    kept = 0
    names = {one.name for one in fields(ServerSettings)} | {one.name for one in fields(EngineConfig)}
    assert len(names) > 60, "the classes are no longer those of the settings"
    for kind in (ServerSettings, EngineConfig):
        for name, made in texts_of(kind):
            for given in SECRET_TEXTS:
                flags: dict[str, Any] = {name: made(given)}
                flags = flags if kind is ServerSettings else {"engine": flags}
                whole = {"model": "m", "state": "s", **flags}
                try:
                    told = json.dumps(shown(msgspec.convert(whole, ServerSettings, dec_hook=decode_path)))
                    kept += 1
                except (msgspec.ValidationError, ConfigError) as error:
                    told = masked(str(error))
                assert "secretzq" not in told, (name, given, told)
    assert kept > 50, "most are refused: the test looks at nothing"


def test_what_is_shown_is_still_of_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Masks leave users, hosts and names, and no command, doctor, status or reply goes without them."""
    (secret := tmp_path / "secret").write_text("whsec_" + "A" * 32)
    url, hook = SECRET_TEXTS[0], "https://hooks.example.org:8443/services/zqsecretzq?token=zqsecretzq"
    asked = ["serve", "who/what", "--database", url, "--webhook-url", hook]
    ran = CliRunner().invoke(app, [*asked, "--webhook-secret-file", str(secret), "--show-config"])
    found = json.loads(ran.stdout)
    assert found["database"] == "postgresql://me:***@db.example/coserve"
    assert found["webhook_urls"] == ["https://hooks.example.org:8443***"] and "zqsecretzq" not in ran.output
    assert masked("GET '/v1/models' 200 tokens=12+5 key=sk-coserve-abcdefghijkl") == (
        "GET '/v1/models' 200 tokens=12+5 key=sk-coserve-abcdef…"
    )
    assert masked("http://127.0.0.1:8000/health?page=2") == "http://127.0.0.1:8000/health?page=2"
    told = [
        Check("database", Level.BROKEN, url).found,
        describe_exception(ValueError, ValueError(url), None),
        str(ApiError.of(unusable(url, "k", "it is full")).body()),
        str(ApiError(500, url).body()),
    ]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            sys, "argv", ["coserve", "serve", "who/what", "--artifacts", "http://me:zqsecretzq@h/b"]
        )
        main()
    told.append(capsys.readouterr().err)
    assert all("***" in one and "zqsecretzq" not in one for one in told), told
