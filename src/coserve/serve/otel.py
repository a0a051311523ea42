"""Traces of requests and jobs by OpenTelemetry, where the settings ask for them (`coserve[otel]`).

Where they go is said by OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and others). Spans hold
figures and ids, and no texts and no keys.
"""

import hashlib
import time
from importlib.util import find_spec
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.errors import ConfigError
from coserve.serve.answering.call import Call, CallUsage
from coserve.serve.store.records import JobRecord
from coserve.wire.logs import context
from coserve.wire.messages import JobStep

_NANO = 1_000_000_000
_STEP_SECONDS: Final = 10.0  # between the spans of two steps of one job, at least
_MODULE = "opentelemetry.exporter.otlp.proto.http"


class OtelSpans:
    """Makes spans and has a thread of OpenTelemetry's send them. Raises ConfigError where it is not
    installed."""

    def __init__(self, exporter: Any = None) -> None:
        """`exporter` is OTLP's over HTTP by default."""
        if find_spec("opentelemetry") is None or find_spec(_MODULE) is None:
            raise ConfigError("otel needs OpenTelemetry, which coserve[otel] installs")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Random ids, but for the span of a job, so that its steps can name it before it is over."""

            job = ""

            def generate_trace_id(self) -> int:
                return _ids_of(self.job)[0] if self.job else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return _ids_of(self.job)[1] if self.job else super().generate_span_id()

        self._ids, self._steps = Ids(), dict[str, tuple[float, int]]()
        resource = Resource.create({"service.name": "coserve"})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer("coserve")

    def call(self, call: Call, usage: CallUsage) -> None:
        """Adds the spans of a call that is over, within that of its request: the queue, the time to the first
        token, and the answers."""
        from opentelemetry.trace import Status, StatusCode

        clock, now, waited = call.clock, time.time_ns(), time.monotonic() - call.asked.arrival
        began = now - int(waited * _NANO)
        about: dict[str, Any] = {
            "gen_ai.request.model": call.model.name,
            "gen_ai.response.id": call.asked.id,
            "gen_ai.usage.input_tokens": usage.read,
            "gen_ai.usage.output_tokens": usage.written,
            "coserve.cached_tokens": usage.cached,
            "coserve.version": call.model.key or call.model.name,
            "coserve.tier": call.tier,
        }
        whole = self.tracer.start_span("answer", start_time=began, attributes=about)
        if not clock.whole:
            whole.set_status(Status(StatusCode.ERROR, "it ended early"))
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(whole)
        marks = [
            ("queue", 0.0, clock.queued),
            ("prompt", clock.queued, clock.first),
            ("decode", clock.first, waited),
        ]
        for name, start, end in marks:
            if end > start:
                part = self.tracer.start_span(name, inside, start_time=began + int(start * _NANO))
                part.end(began + int(end * _NANO))
        whole.end(now)

    def job(self, job: JobRecord) -> None:
        """Adds the span of a job that is over."""
        about: dict[str, Any] = {
            "coserve.job": job.id,
            "coserve.job.status": str(job.status),
            "coserve.job.step": job.step or 0,
            "coserve.job.trained_tokens": job.trained_tokens,
            "gen_ai.request.model": job.model,
        }
        from opentelemetry.context import Context

        self._steps.pop(job.id, None)
        self._ids.job = job.id
        try:
            began = job.created * _NANO
            span = self.tracer.start_span("fine_tuning.job", Context(), start_time=began, attributes=about)
        finally:
            self._ids.job = ""
        span.end()

    def step(self, news: JobStep) -> None:
        """Adds the span of an optimizer step, within its job's, unless one of the last seconds has one."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        last, left_out = self._steps.get(news.job, (0.0, 0))
        if (now := time.monotonic()) - last < _STEP_SECONDS and last:
            self._steps[news.job] = last, left_out + 1
            return
        self._steps[news.job] = now, 0
        trace, span = _ids_of(news.job)
        drawn = self._provider.sampler.should_sample(None, trace, "fine_tuning.job").decision
        flags = TraceFlags(TraceFlags.SAMPLED if drawn is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)
        job = set_span_in_context(NonRecordingSpan(SpanContext(trace, span, True, flags)))
        about: dict[str, Any] = {
            "coserve.job": news.job,
            "coserve.job.step": news.step,
            "coserve.step.tokens": news.tokens,
            "coserve.step.loss": news.loss,
            "coserve.steps_left_out": left_out,
        }
        ended = time.time_ns()
        began = ended - int(news.seconds * _NANO)
        self.tracer.start_span("fine_tuning.step", job, start_time=began, attributes=about).end(ended)

    def close(self) -> None:
        """Sends what is left; blocks for some seconds at most."""
        self._provider.shutdown()


def _ids_of(job: str) -> tuple[int, int]:
    """The ids of a job's trace and of its span in there, the same whoever makes them."""
    digest = hashlib.sha256(job.encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


class RequestSpans:
    """Gives each request a span, of the trace that its `traceparent` names (W3C). It comes after
    `RequestIds`."""

    def __init__(self, app: ASGIApp, telemetry: OtelSpans) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.app, self._telemetry, self._format = app, telemetry, TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = Headers(scope=scope)
        given = {name: headers[name] for name in self._format.fields if name in headers}
        about = {"http.request.method": scope["method"], "coserve.request_id": context().request_id}
        tracer = self._telemetry.tracer
        # An exception's words, which OpenTelemetry notes in the span and in its status, may be a prompt's.
        with tracer.start_as_current_span(
            scope["method"],
            self._format.extract(given),
            SpanKind.SERVER,
            about,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self.app(scope, receive, send_noted)
            except Exception:
                span.set_status(Status(StatusCode.ERROR))
                raise
            finally:
                route = getattr(
                    scope.get("route"), "path", ""
                )  # its template: a path may hold what is secret
                if route:
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                if tenant := context().tenant:
                    span.set_attribute("coserve.tenant", tenant)
