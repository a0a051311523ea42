"""What goes wrong, said as OpenAI says it: `{"error": {"message", "type", "param", "code"}}` and a status."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from coserve import errors

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_KINDS = {"str", "int", "float", "bool", "list", "dict"}
# The first class that an error is an instance of decides; a subclass stands before its base.
_STATUSES: tuple[tuple[type[errors.CoserveError], int, str | None], ...] = (
    (errors.EngineLost, 503, "engine_lost"),
    (errors.AdapterNotFound, 404, "model_not_found"),
    (errors.AdapterError, 400, "invalid_adapter"),
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.OutOfPages, 400, "context_length_exceeded"),
    (errors.RequestError, 400, None),
    (errors.DataError, 400, "invalid_file"),
    (errors.JobError, 409, None),
    (errors.ConflictError, 409, None),
    (errors.ConfigError, 400, None),
)


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
    """An answer other than success. `param` names the part of the request at fault, if one is.

    429 and 503 bring `Retry-After` (1 second unless given); 409 tells clients not to try again.
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
        self.headers = {**_headers_of(status), **(headers or {})}

    @classmethod
    def of(cls, error: errors.CoserveError) -> "ApiError":
        """The answer for a deliberate error; 500 for one that no request can bring about."""
        for kind, status, code in _STATUSES:
            if isinstance(error, kind):
                return cls(status, str(error), code=code)
        return cls(500, str(error))

    def body(self) -> dict[str, Any]:
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The answer for what does not exist, and for what belongs to another tenant."""
    return ApiError(404, message, param=param, code=code)


def fault_error(kind: str, text: str) -> errors.CoserveError:
    """The error that an engine named in a `Fault`."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.CoserveError):
        return found(text)
    return errors.CoserveError(f"{kind}: {text}")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: these statuses, and those that any route may answer."""
    every = sorted({400, 401, 413, 429, 431, 503, *statuses})
    return {
        status: {
            "model": ErrorBody,
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"example": _example(status)}},
        }
        for status in every
    }


def install(app: FastAPI) -> None:
    """Makes an app answer in this shape whatever went wrong."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(errors.CoserveError)
    async def _coserve(request: Request, error: errors.CoserveError) -> JSONResponse:
        return ApiError.of(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _validation(error).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        if error.status_code == 404:
            told.message, told.code = (
                f"Unknown request URL: {request.method} {request.url.path}",
                "unknown_url",
            )
        return told.response()

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        # The server's own error middleware stands outside all others, so this answer adds its id itself.
        told = ApiError(500, "The server had an error while processing your request.")
        request_id = getattr(request.state, "request_id", "")
        log.error("request %s failed", request_id)
        return JSONResponse(told.body(), 500, {"x-request-id": request_id})


def _validation(error: RequestValidationError) -> ApiError:
    """The first of FastAPI's complaints, as a person would say it."""
    first = error.errors()[0]
    param = _place(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', '')}".strip())
    if first["type"] == "missing":
        code, message = "missing_required_parameter", f"Missing required parameter: '{param or 'body'}'."
    elif first["type"] == "extra_forbidden":
        code, message = "unknown_parameter", f"Unknown parameter: '{param}'."
    else:
        reason = str(first["msg"]).removeprefix("Value error, ")
        code, message = "invalid_value", f"Invalid value for '{param}': {reason}" if param else reason
    return ApiError(400, message, param=param, code=code)


def _place(loc: Sequence[str | int]) -> str | None:
    """Where in the request, as `messages.0.role`; names of types, which pydantic puts there too, end it."""
    parts = loc[1:] if loc[:1] in (("body",), ("query",), ("path",), ("header",)) else loc
    named = takewhile(
        lambda part: isinstance(part, int) or (part.isidentifier() and part not in _KINDS), parts
    )
    return ".".join(map(str, named)) or None


def _type_of(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _headers_of(status: int) -> dict[str, str]:
    if status in (429, 503):
        return {"Retry-After": "1"}
    if status == 409:
        return {"x-should-retry": "false"}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}


def _example(status: int) -> dict[str, Any]:
    return ApiError(status, f"{HTTPStatus(status).phrase}: one sentence that says what to change.").body()
