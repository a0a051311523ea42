"""Errors in the form of Anthropic's API."""

from typing import Any, Final

from coserve.serve.errors import ApiError, ErrorShape

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail = {"type": kind, "message": error.body()["error"]["message"]}
    return {"type": "error", "error": detail, "request_id": request_id}


ERRORS: Final = ErrorShape(_body, b"event: error\ndata: ", b"\n\n", "request-id")
