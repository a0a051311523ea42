"""Errors: a status, and a body in the dialect of their request: `{"error": {"message", "type", "param",
"code"}}` in OpenAI's."""

import errno
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from coserve import errors
from coserve.core.masking import masked
from coserve.serve.http.streams import DONE, EVENT_BEGIN, EVENT_END

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_LONGEST = 1000  # characters of a message
# The first class that an error is an instance of decides; a subclass stands before its base.
_STATUSES: tuple[tuple[type[errors.CoserveError], int, str | None], ...] = (
    (errors.EngineLost, 503, "engine_lost"),
    (errors.Quarantined, 400, "quarantined"),  # no 5xx: clients would send it again by themselves
    (errors.OutOfMemory, 400, "out_of_memory"),
    (errors.AdapterNotFound, 404, "model_not_found"),
    (errors.NotOffered, 400, "not_offered"),
    (errors.AdapterError, 400, "invalid_adapter"),
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.OutOfPages, 400, "context_length_exceeded"),
    (errors.RequestError, 400, None),
    (errors.DataError, 400, "invalid_file"),
    (errors.JobError, 409, None),
    (errors.ConflictError, 409, None),
    (errors.QuotaExceeded, 429, "quota_exceeded"),
    (errors.ConfigError, 400, None),
    (errors.StateError, 503, "storage_unavailable"),
    (errors.OffloadFailed, 503, "storage_unavailable"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ErrorDetail(BaseModel):
    """One error, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response. `param` names the part of the request at fault, if any.

    429 and 503 bring `Retry-After` (1 second unless given, a minute for quotas); 409 and quotas tell clients
    not to retry automatically.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or _type_of(status)
        self.headers = {**_headers_of(status, code), **(headers or {})}

    @classmethod
    def of(cls, error: errors.CoserveError) -> "ApiError":
        """The response to a deliberate error; 500 for one that no request can cause."""
        for kind, status, code in _STATUSES:
            if isinstance(error, kind):
                return cls(status, str(error), code=code)
        return cls(500, str(error))

    def body(self) -> dict[str, Any]:
        param = None if self.param is None else _said(self.param)
        message = _said(self.message) if self.status < 500 else masked(_said(self.message))
        detail = ErrorDetail(message=message, type=self.type, param=param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def response(self) -> "ErrorResponse":
        """The response to whatever request it is sent to."""
        return ErrorResponse(self)


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Form of errors in a dialect: the `body` of one, given the id of its request, and what is around it in a
    stream that it ends. Replies have the id in the header `id_header`."""

    body: Callable[[ApiError, str], Mapping[str, Any]]
    before: bytes
    after: bytes
    id_header: str

    def written(self, error: ApiError, request_id: str) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body(error, request_id)).encode()

    def event(self, error: ApiError, scope: Scope) -> bytes:
        """The events that end the stream of a request."""
        return self.before + self.written(error, request_id(scope)) + self.after


OPENAI: Final = ErrorShape(lambda error, _: error.body(), EVENT_BEGIN, EVENT_END + DONE, "x-request-id")


def openai_shape(path: str) -> ErrorShape:
    """OpenAI's form, for every path."""
    return OPENAI


def error_shape(scope: Scope) -> ErrorShape:
    """The form of errors in the dialect of a request (`middleware.RequestIds`)."""
    found: ErrorShape = scope.get("state", {}).get("error_shape", OPENAI)
    return found


def request_id(scope: Scope) -> str:
    """The id of a request; empty before it has one."""
    found: str = scope.get("state", {}).get("request_id", "")
    return found


class ErrorResponse(Response):
    """The response to an error, in the dialect of the request that it is sent to."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, body = self._error, error_shape(scope).written(self._error, request_id(scope))
        told = Response(body, error.status, error.headers, "application/json")
        await told(scope, receive, send)


class Refusal(HTTPException):
    """An ApiError raised while a body is read, where FastAPI turns all others into 400."""

    def __init__(self, told: ApiError) -> None:
        super().__init__(told.status, told.message)
        self.told = told


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The response for a resource that does not exist or belongs to another tenant."""
    return ApiError(404, message, param=param, code=code)


def error_responses(
    *statuses: int, shape: ErrorShape = OPENAI, model: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: these statuses, and those that any route may answer. `model` is that of
    errors of this form."""
    every = sorted({400, 401, 413, 414, 429, 431, 503, *statuses})
    return {
        status: {
            "model": model,
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"example": shape.body(_example(status), "req_0123")}},
        }
        for status in every
    }


def install(app: FastAPI) -> None:
    """Installs handlers that give all errors this format."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(errors.CoserveError)
    async def _coserve(request: Request, error: errors.CoserveError) -> Response:
        return ApiError.of(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return _validation(error).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, Refusal):
            return error.told.response()
        told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        if error.status_code == 404:
            told.message, told.code = (
                f"Unknown request URL: {request.method} {request.url.path}",
                "unknown_url",
            )
        return told.response()

    @app.exception_handler(OSError)
    async def _disk(request: Request, error: OSError) -> Response:
        if error.errno not in _FULL:
            raise error  # a bug
        return ApiError(503, "The server's disk is full.", code="storage_unavailable").response()

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        # The server's own error middleware stands outside all others, so this answer adds its id itself.
        told = ApiError(500, "The server had an error while processing your request.")
        id, shape = request_id(request.scope), error_shape(request.scope)
        log.error("request %s failed", id)
        return Response(shape.written(told, id), 500, {shape.id_header: id}, "application/json")


def _validation(error: RequestValidationError) -> ApiError:
    """The most specific of FastAPI's validation errors, as a sentence."""
    complaints = [_Complaint.of(found, error.body) for found in error.errors()]
    told = _most_telling(complaints)
    param, message, code = told.place, told.message, "invalid_value"
    match told.kind:
        case "json_invalid":
            return ApiError(400, f"The body is not valid JSON: {told.context.get('error', '')}")
        case "missing":
            code, message = "missing_required_parameter", f"Missing required parameter: '{param or 'body'}'."
        case "extra_forbidden":
            code, message = "unknown_parameter", f"Unknown parameter: '{param}'."
        case "unknown_parameter":
            param = ".".join(filter(None, (param, told.context["name"])))
            code, message = told.kind, f"Unknown parameter: '{param}'; {message}"
        case _ if param is not None:
            message = f"Invalid value for '{param}': {message}"
        case kind if kind.endswith("_type"):
            message = "The body must be a JSON object, sent with the content type application/json."
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One validation error of pydantic's. `place` is its path in the request, as `messages.0.role`."""

    kind: str
    field: tuple[str | int, ...]  # the parameter at the top that this is about
    place: str | None
    message: str
    context: Mapping[str, Any]

    @classmethod
    def of(cls, found: Mapping[str, Any], body: object) -> "_Complaint":
        loc, kind = tuple(found["loc"]), str(found["type"])
        parts = _in_body(loc[1:], body, kind == "missing") if loc[:1] == ("body",) else list(loc[1:])
        message = str(found["msg"]).removeprefix("Value error, ")
        return cls(kind, loc[:2], ".".join(map(str, parts)) or None, message, found.get("ctx", {}))

    @property
    def is_mismatch(self) -> bool:
        """Tells whether the value is of a wrong type, rather than a wrong value of the right type."""
        return self.kind == "literal_error" or self.kind.endswith(("_type", "_from_float"))

    @property
    def depth(self) -> int:
        return 0 if self.place is None else self.place.count(".")


def _in_body(loc: Sequence[str | int], body: Any, is_missing: bool) -> list[str | int]:
    """Path of a value in the body, without the type names and tags in pydantic's paths."""
    way: list[str | int] = []
    for number, part in enumerate(loc, 1):
        is_item = isinstance(body, list) and isinstance(part, int)
        if is_item or (isinstance(body, Mapping) and part in body):
            body = body[part]
        elif not (is_missing and number == len(loc)):
            continue
        way.append(part)
    return way


def _most_telling(complaints: Sequence[_Complaint]) -> _Complaint:
    """Picks one error about the first field. A union field has an error for each of its types, of which one
    is relevant."""
    rivals = [complaint for complaint in complaints if complaint.field == complaints[0].field]
    meant = next((complaint for complaint in rivals if not complaint.is_mismatch), None)
    if meant is not None:
        return meant
    deepest = max(rivals, key=lambda complaint: complaint.depth)
    same = (rival.message for rival in rivals if rival.place == deepest.place)
    first, *others = dict.fromkeys(same)
    wanted = [other.removeprefix("Input should be ") for other in others]
    return replace(deepest, message=" or ".join([first, *wanted]))


def _said(text: str) -> str:
    """Text of a request as quoted in errors: shortened, and valid Unicode."""
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return shown.encode(errors="backslashreplace").decode()


def _type_of(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _headers_of(status: int, code: str | None) -> dict[str, str]:
    if status == 409:
        return {"x-should-retry": "false"}
    if code == "quota_exceeded":  # retrying is of no use until something is deleted
        return {"Retry-After": "60", "x-should-retry": "false"}
    if status in (429, 503):
        return {"Retry-After": "1"}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}


def _example(status: int) -> ApiError:
    return ApiError(status, f"{HTTPStatus(status).phrase}: one sentence that says what to change.")
