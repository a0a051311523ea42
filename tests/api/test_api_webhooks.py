"""Webhooks: signed, sent again until they are taken, bounded, and to public addresses alone."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve.core.job_status import JobStatus
from coserve.errors import ConfigError
from coserve.serve.settings import ServerSettings
from coserve.serve.webhooks import alerts
from coserve.serve.webhooks.alerts import Alerts, WebhookEvent, WebhookSender, read_secret
from coserve.train.grading.http import is_public
from coserve.wire.messages import JobEnded, Numbered
from serving import Play, World
from training import create
from waiting import wait_until

SECRET = b"0123456789abcdef0123456789abcdef"
WHSEC = "whsec_" + base64.b64encode(SECRET).decode()


class Receiver:
    """A server that notes requests, and answers with these statuses, the last one again."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses, self.held = [204], threading.Event()
        self.held.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                receiver.held.wait(30)
                self.send_response(receiver.statuses[min(len(receiver.got), len(receiver.statuses)) - 1])
                self.send_header("location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=hidden"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def bodies(self) -> list[dict[str, object]]:
        return [json.loads(body) for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.held.set()
    made.server.shutdown()
    made.server.server_close()


def test_what_is_not_taken_comes_again_with_the_same_id_and_a_signature(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "PAUSES", (0.01, 0.01, 0.01))
    receiver.statuses = [500, 302, 204, 500]
    made = WebhookSender(receiver.url, SECRET, ("127.0.0.1",))
    made.put(first := WebhookEvent("fine_tuning.job.succeeded", {"id": "ftjob-1"}))
    wait_until(lambda: len(receiver.got) == 3, 30)
    made.put(WebhookEvent("coserve.disk.low", {"free_bytes": 1}))
    wait_until(lambda: "was not delivered" in caplog.text, 30)  # after four tries
    made.close()
    assert len(receiver.got) == 7 and "status 500" in caplog.text
    assert {headers["webhook-id"] for headers, _ in receiver.got[:3]} == {first.id}
    client = openai.OpenAI(api_key="x", webhook_secret=WHSEC)
    for headers, body in receiver.got:
        signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
        wanted = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{wanted}"
        client.webhooks.verify_signature(body, headers)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body + b" ", headers)
    assert "hidden" not in caplog.text and WHSEC not in caplog.text and SECRET.decode() not in caplog.text


def test_an_address_that_hangs_holds_a_bounded_number_and_no_caller(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "MOST_EVENTS", 5)
    receiver.held.clear()
    made = WebhookSender(receiver.url, SECRET, ("127.0.0.1",))
    made.put(WebhookEvent("x", {}))
    wait_until(lambda: receiver.got, 30)
    for _ in range(8):
        made.put(WebhookEvent("x", {}))
    assert caplog.text.count("is dropped") == 3
    receiver.held.set()
    wait_until(lambda: len(receiver.got) == 6, 30)
    made.close()


def test_private_addresses_and_bad_secrets_are_refused(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "PAUSES", ())
    made = WebhookSender(receiver.url.replace("127.0.0.1", "localhost"), SECRET)
    with caplog.at_level(logging.ERROR):
        made.put(WebhookEvent("x", {}))
        wait_until(lambda: "not public" in caplog.text, 30)
    made.close()
    assert not receiver.got
    for number, text in enumerate(("short", "whsec_!!!", "whsec_" + base64.b64encode(b"short").decode())):
        (file := tmp_path / str(number)).write_text(text)
        with pytest.raises(ConfigError, match="secret"):
            read_secret(file)
    (tmp_path / "good").write_text(WHSEC + "\n")
    assert read_secret(tmp_path / "good") == SECRET
    for fields in (
        {"webhook_urls": ("http://a",)},
        {"webhook_urls": ("ftp://k:secret@a",), "webhook_secret_file": "x"},
    ):
        with pytest.raises(ConfigError) as refused:
            ServerSettings("m", tmp_path, **fields)  # type: ignore[arg-type]
        assert "secret@" not in str(refused.value)


def test_the_operator_is_told_of_jobs_engines_disk_and_queue(
    play: Play, receiver: Receiver, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        done, paused = await create(world), await create(world)
        world.engine.tell(Numbered(1, JobEnded(paused.id, JobStatus.PAUSED, 1)))
        world.engine.tell(Numbered(2, JobEnded(done.id, JobStatus.CANCELLED, 1)))
        await world.until(lambda: receiver.got)
        await world.engine.die()
        await world.engine.start()
        await world.until(lambda: len(receiver.got) == 2)
        told = [(one["type"], one["data"]) for one in receiver.bodies()]
        assert told[0] == ("fine_tuning.job.cancelled", {"id": done.id})
        assert told[1][0] == "coserve.engine.restarted"

    (tmp_path / "secret").write_text(WHSEC)
    settings = {"webhook_urls": (receiver.url,), "webhook_secret_file": tmp_path / "secret"}
    play(story, **settings, webhook_hosts=("127.0.0.1",))
    alerts, told = Alerts(ServerSettings("m", tmp_path)), list[str]()
    alerts.tell = lambda type, **data: told.append(type)  # type: ignore[method-assign]
    for free, waiting in ((2**40, 0), (2**20, 79), (2**20, 80), (2**30 + 1, 60), (2**20, 90), (2**31, 49)):
        alerts.look(free, waiting, 100)
    assert told == ["coserve.disk.low", "coserve.queue.long"]
    alerts.look(2**20, 80, 100)
    assert told[2:] == ["coserve.disk.low", "coserve.queue.long"]


def test_addresses_that_cannot_be_are_refused_or_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the address in an error or a log, and without an end of the thread."""
    for bad in ("http://", "http:///x?token=hidden", "http://h:99999/hidden", "http://me:hidden@h/"):
        with pytest.raises(ConfigError, match="number 1") as refused:
            ServerSettings("m", Path("s"), webhook_urls=(bad,), webhook_secret_file=Path("f"))
        assert "hidden" not in str(refused.value)
    monkeypatch.setattr(alerts, "PAUSES", ())
    made = WebhookSender(f"http://{'hidden' * 20}.example/x", SECRET)
    for number in (1, 2):
        made.put(WebhookEvent("x", {}))
        wait_until(lambda number=number: caplog.text.count("was not delivered") == number, 30)
    made.close()
    assert "hidden" not in caplog.text


def test_only_addresses_of_the_internet_are_public() -> None:
    private = (
        "0.0.0.0", "127.1.2.3", "10.0.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "::", "::1",
        "::127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "fe80::1%eth0", "fec0::1",
        "fd00:ec2::254", "ff02::1", "2002:a00:1::", "2001:db8::1", "4000::1", "5f00::1",
    )  # fmt: skip
    assert not [one for one in private if is_public(one)]
    public = ("93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808", "::ffff:8.8.8.8")
    assert all(map(is_public, public))


def test_the_operator_is_told_of_batches_responses_and_runs_of_evals(
    play: Play, receiver: Receiver, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        client, expected = world.client(), set[tuple[str, str]]()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        for status, data in (("completed", json.dumps(line).encode()), ("failed", b"\n")):
            file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            expected.add((f"batch.{status}", batch.id))
        config: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
        exact: Any = {"type": "string_check", "name": "exact", "operation": "eq"}
        exact |= {"input": "{{sample.output_text}}", "reference": "a"}
        made = await client.evals.create(data_source_config=config, testing_criteria=[exact])
        items: Any = {"type": "file_content", "content": [{"item": {}, "sample": {"output_text": "a"}}]}
        run = await client.evals.runs.create(made.id, data_source={"type": "jsonl", "source": items})
        expected.add(("eval.run.succeeded", run.id))
        await world.until(lambda: len(receiver.got) == 3)
        world.engine.script = lambda request, place: 5  # an answer that does not end by itself
        turn: Any = {"type": "template", "template": [{"role": "user", "content": "Say it"}]}
        asked: Any = {"type": "completions", "model": "tiny", "input_messages": turn, "source": items}
        asked["sampling_params"] = {"max_completion_tokens": 2000}
        run = await client.evals.runs.create(made.id, data_source=asked)
        await world.until(lambda: world.engine.running)
        lines = ("lines.jsonl", json.dumps(items["content"][0]).encode())
        file = await client.files.create(file=lines, purpose="evals")
        gone: Any = {"type": "file_id", "id": file.id}
        after = await client.evals.runs.create(made.id, data_source={"type": "jsonl", "source": gone})
        await client.files.delete(file.id)
        await client.evals.runs.cancel(run.id, eval_id=made.id)
        expected |= {("eval.run.canceled", run.id), ("eval.run.failed", after.id)}
        behind: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 2000, "background": True}
        cancelled = await client.responses.create(**behind)
        await world.until(lambda: world.engine.running)
        await client.responses.cancel(cancelled.id)
        await client.responses.cancel(cancelled.id)  # is told of once
        world.say("Bye.")
        done = await client.responses.create(**behind)
        await client.responses.create(**{**behind, "background": False})  # whose client has its end
        expected |= {("response.cancelled", cancelled.id), ("response.completed", done.id)}
        world.engine.script = lambda request, place: 5
        late, runs = await client.responses.create(**behind), world.app.state.responses
        expected.add(("response.completed", late.id))
        row, task = await world.state.store.responses.get("local", late.id), runs._runs[late.id].task
        world.say("Bye.")
        while not task.done():
            await asyncio.sleep(0)
        assert late.id in runs._runs, "its end is stored, and has not been noticed"
        await runs.cancel(row)
        await runs.wait(late.id)
        await world.until(lambda: len(receiver.got) == 8)
        told = [(one["type"], one["data"]["id"]) for one in receiver.bodies()]  # type: ignore[index]
        assert sorted(told) == sorted(expected)

    (tmp_path / "secret").write_text(WHSEC)
    settings = {"webhook_urls": (receiver.url,), "webhook_secret_file": tmp_path / "secret"}
    play(story, **settings, webhook_hosts=("127.0.0.1",))
