"""The server's ASGI application: routes, middleware and their documentation."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from coserve.serve import errors
from coserve.serve.answering.cost import MOST_BODY_BYTES, MOST_SMALL_BODY_BYTES
from coserve.serve.anthropic import batches as anthropic_batches
from coserve.serve.anthropic import models as anthropic_models
from coserve.serve.anthropic import routes as anthropic
from coserve.serve.anthropic.errors import ERRORS
from coserve.serve.batches.asked import OwnRoutes
from coserve.serve.batches.runner import Batches
from coserve.serve.evals import routes as evals
from coserve.serve.http.access import AccessLog
from coserve.serve.http.auth import Authentication, serves_without_keys
from coserve.serve.http.browsers import AllowedOrigins, TrustedHosts
from coserve.serve.http.idempotency import Idempotency
from coserve.serve.http.middleware import Draining, RequestIds, SizeLimits
from coserve.serve.http.proxies import TrustedProxies, networks_of
from coserve.serve.http.quotas import RequestRate, UploadRoom
from coserve.serve.http.rates import TokenBuckets
from coserve.serve.http.revocation import Revocation
from coserve.serve.http.shedding import ConcurrencyLimit
from coserve.serve.otel import RequestSpans
from coserve.serve.responses import conversations
from coserve.serve.responses import routes as responses
from coserve.serve.responses.background import ResponseRuns
from coserve.serve.routes import (
    adapters,
    batches,
    chat,
    completions,
    docs,
    embeddings,
    files,
    graders,
    health,
    job_progress,
    jobs,
    models,
    permissions,
    stored_chats,
    tokens,
    trace,
    transfers,
    uploads,
    usage,
)
from coserve.serve.state import State
from coserve.serve.tinker import routes as tinker
from coserve.serve.tinker.dialect import Dialect
from coserve.serve.web import overview
from coserve.serve.web import routes as web

_FORM_BYTES = 2 * 2**20  # around the large file in an upload
_UPLOADS = ("/v1/files", "/v1/adapters")
# Requests that create something and have no number of their own, by which to know one that comes again.
CREATING = (
    *_UPLOADS,
    "/v1/load_lora_adapter",
    "/v1/fine_tuning/jobs",
    "/v1/batches",
    "/api/v1/create_session",
)
# Requests for text.
STREAMED = ("/v1/chat/completions", "/v1/completions", anthropic.MESSAGES, responses.RESPONSES)
COMPUTED = (*STREAMED, embeddings.EMBEDDINGS)  # requests that the engine computes
_LARGE = (
    *COMPUTED,
    *tokens.TOKENS,
    anthropic.COUNT_TOKENS,
    anthropic_batches.BATCHES,
    responses.COMPACT,
    responses.COUNT,
    *tinker.LARGE,
)


ROOMS: Final = (  # what has routes, but for those of Tinker
    *(chat, stored_chats, completions, embeddings, anthropic, anthropic_batches, anthropic_models),
    *(responses, conversations, models, adapters),
    *(
        transfers,
        files,
        uploads,
        jobs,
        job_progress,
        batches,
        graders,
        permissions,
        evals,
        tokens,
        usage,
        trace,
        health,
        docs,
        overview,
        web,
    ),
)
# Forms of errors below these paths; elsewhere they are OpenAI's.
SHAPES: Final = {anthropic.MESSAGES: ERRORS}


def error_shape_of(path: str) -> errors.ErrorShape:
    """The form of errors at a path."""
    return next((shape for start, shape in SHAPES.items() if path.startswith(start)), errors.OPENAI)


def create_app(state: State, clock: Callable[[], float] = monotonic) -> FastAPI:
    """The application over a running `state`. `clock` (seconds) is used for rate limits."""
    summary = "OpenAI's API for answers and fine-tuning."
    # FastAPI's own pages run scripts from elsewhere, and its document is made in the loop: see
    # `routes/docs.py`.
    app = FastAPI(
        title="coserve", version=_version(), summary=summary, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.coserve, settings = state, state.settings
    errors.install(app)
    for room in ROOMS:
        app.include_router(room.router)
    app.add_api_route("/openapi.json", docs.openapi, include_in_schema=False)
    app.state.responses = ResponseRuns(state)
    answering = chat, completions, embeddings, responses, anthropic
    routers = [room.router for room in answering]
    own = OwnRoutes(state, app.state.responses, *routers, shape_of=error_shape_of)
    app.state.batches = Batches(state, own)
    app.state.tinker = Dialect(state, clock)
    for router in tinker.ROUTERS:
        app.include_router(router)

    def body_limit(path: str) -> int:
        if path in _UPLOADS:
            return settings.max_file_bytes + _FORM_BYTES
        if path.startswith("/v1/uploads/"):
            return uploads.LARGEST_PART + _FORM_BYTES
        is_large = path in _LARGE
        return MOST_BODY_BYTES if is_large else MOST_SMALL_BODY_BYTES

    rates = TokenBuckets(settings.max_requests_minute, clock)
    bad_keys = TokenBuckets(settings.max_bad_keys_minute, clock)
    state.on_settings.append(lambda new: rates.limit(new.max_requests_minute))
    state.on_settings.append(lambda new: bad_keys.limit(new.max_bad_keys_minute))
    # The last one added is the first to see a request.
    app.add_middleware(
        Revocation,
        tenants=state.store.tenants,
        logins=state.store.logins,
        paths=(*COMPUTED, web.LIVE),
        streams=(f"{responses.RESPONSES}/", "/v1/fine_tuning/jobs/"),
    )
    app.add_middleware(ConcurrencyLimit, queue=state.queue, paths=COMPUTED)
    app.add_middleware(
        UploadRoom,
        files=state.store.files,
        paths=_UPLOADS,
        largest=settings.max_file_bytes,
        folder=settings.state,
    )
    app.add_middleware(Idempotency, creations=state.store.creations, paths=CREATING)
    app.add_middleware(RequestRate, rates=rates)
    app.add_middleware(Authentication, state=state, bad_keys=bad_keys)
    app.add_middleware(Draining, is_draining=lambda: state.draining)
    app.add_middleware(SizeLimits, body_limit=body_limit)
    app.add_middleware(AllowedOrigins, allowed=settings.cors_origins)
    app.add_middleware(TrustedHosts, settings=settings, is_open=lambda: serves_without_keys(state))
    if state.otel is not None:
        app.add_middleware(RequestSpans, telemetry=state.otel)
    if settings.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(RequestIds, shape_of=error_shape_of)
    if settings.trusted_proxies:
        app.add_middleware(TrustedProxies, networks=networks_of(settings.trusted_proxies))
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document, without the status 422 where that is FastAPI's own, and with streams."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for operations in document["paths"].values():
            for operation in operations.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for path in STREAMED:
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            content["text/event-stream"] = {"schema": {"type": "string"}}
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema


def _version() -> str:
    try:
        return version("coserve")
    except PackageNotFoundError:
        return "0"
