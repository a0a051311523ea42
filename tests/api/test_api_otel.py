"""Traces of requests and jobs: their parents, their times, and nothing that is secret."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from coserve.core.job_status import JobStatus
from coserve.errors import ConfigError
from coserve.serve import otel
from coserve.serve.app import create_app
from coserve.serve.otel import OtelSpans, RequestSpans
from coserve.wire.messages import JobEnded, JobStarted, JobStep, Numbered
from serving import Play, World
from training import create

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_is_a_span_of_its_client_s_trace(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        exporter = InMemorySpanExporter()
        world.state.otel = made = OtelSpans(exporter)
        _, key = await world.state.store.tenants.create_key("ann")
        transport = httpx2.ASGITransport(app=create_app(world.state))
        headers = {"authorization": f"Bearer {key}", "traceparent": PARENT, "x-request-id": "mine"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"model": "tiny", "prompt": "zqsecretzq", "max_tokens": 5}
            for stream in (False, True):
                answer = await http.post("/v1/completions", json={**body, "stream": stream}, headers=headers)
                assert answer.status_code == 200
            assert (await http.get("/v1/models/zqsecretzq", headers=headers)).status_code == 404
            assert (await http.get("/v1/models", headers={"traceparent": "bad"})).status_code == 401
        job = await create(world, key)
        world.engine.tell(Numbered(1, JobStarted(job.id, 0, 3, 30, 900, 0, 0, 1, 10, 1e-3)))
        for step in (1, 2, 3):  # the third after the pause, with the second's absence noted
            monkeypatch.setattr(otel, "_STEP_SECONDS", 10.0 if step < 3 else 0.0)
            world.engine.tell(Numbered(1 + step, JobStep(job.id, step, 1.5, 9, 30, 1.0, 1e-3, 0.25)))
            await world.until(lambda: not world.engine.news)
        assert {*made._steps} == {job.id}
        world.engine.tell(Numbered(5, JobEnded(job.id, JobStatus.CANCELLED, 3)))
        await world.until(lambda: not world.engine.news)
        await asyncio.to_thread(made.close)
        spans = exporter.get_finished_spans()
        assert "zqsecretzq" not in str([one.to_json() for one in spans]) and key not in str(
            [one.to_json() for one in spans]
        )
        requests = [one for one in spans if one.name == "POST /v1/completions"]
        assert len(requests) == 2
        for request in requests:
            assert format(request.context.trace_id, "032x") == PARENT[3:35]
            assert request.parent is not None and format(request.parent.span_id, "016x") == PARENT[36:52]
            told = dict(request.attributes or {})
            assert told["http.response.status_code"] == 200 and told["coserve.tenant"] == "ann"
            assert told["coserve.request_id"] == "mine"
            (answer_,) = [one for one in spans if one.parent == request.context]
            assert (
                answer_.name == "answer" and dict(answer_.attributes or {})["gen_ai.usage.output_tokens"] == 5
            )
            parts = [one for one in spans if one.parent == answer_.context]
            assert [one.name for one in parts] == ["queue", "prompt", "decode"]
            for before, after in pairwise(parts):
                assert before.end_time == after.start_time
            assert answer_.start_time == parts[0].start_time and parts[-1].end_time == answer_.end_time
        names = sorted(one.name for one in spans)
        assert names.count("GET /v1/models/{model:path}") == 1 and "fine_tuning.job" in names
        alone = next(
            one for one in spans if dict(one.attributes or {}).get("http.response.status_code") == 401
        )
        assert alone.parent is None
        (of_job,) = [one for one in spans if one.name == "fine_tuning.job"]
        assert dict(of_job.attributes or {})["coserve.job"] == job.id and of_job.parent is None
        steps = [one for one in spans if one.name == "fine_tuning.step"]
        told_of = [dict(one.attributes or {}) for one in steps]
        assert [one["coserve.job.step"] for one in told_of] == [1, 3]
        assert [one["coserve.steps_left_out"] for one in told_of] == [0, 1]
        for one in steps:
            assert one.parent is not None and one.parent.span_id == of_job.context.span_id
            assert one.context.trace_id == of_job.context.trace_id
            assert one.end_time is not None and one.start_time is not None
            assert one.end_time - one.start_time == 250_000_000
        assert not made._steps and requests[0].context.trace_id != of_job.context.trace_id

    play(story)


def test_spans_go_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    made = OtelSpans()
    made.tracer.start_span("one").end()
    made.close()
    server.shutdown()
    server.server_close()
    assert [path for path, _ in got] == ["/v1/traces"] and b"coserve" in got[0][1]
    monkeypatch.setattr(otel, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"coserve\[otel\] installs"):
        OtelSpans()


def test_a_fault_is_told_without_its_words() -> None:
    """The exception of a library may hold a prompt."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("the prompt is zqsecretzq")

    exporter = InMemorySpanExporter()
    spans = RequestSpans(app, telemetry := OtelSpans(exporter))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with pytest.raises(ValueError, match="zqsecretzq"):
        asyncio.run(spans(scope, None, None))  # type: ignore[arg-type]
    telemetry.close()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and "zqsecretzq" not in span.to_json()
