import asyncio
from typing import Annotated, Any, Literal

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from coserve import errors
from coserve.errors import error_named
from coserve.serve.answering.cost import MOST_HEADER_BYTES, MOST_URL_BYTES
from coserve.serve.anthropic.errors import ERRORS
from coserve.serve.errors import OPENAI, ApiError, install
from coserve.serve.http.middleware import Draining, RequestIds, SizeLimits


class Round(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["round"]
    radius: float


class Square(BaseModel):
    kind: Literal["square"]
    square: int


class Body(BaseModel):
    size: int
    shape: Annotated[Round | Square, Field(discriminator="kind")] | None = None
    often: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    names: str | list[Annotated[str, Field(max_length=3)]] = ""


def make_app(raised: Exception | None = None, draining: bool = False) -> FastAPI:
    app = FastAPI()
    install(app)

    @app.get("/raise")
    async def _raise() -> None:
        assert raised is not None
        raise raised

    @app.post("/body")
    async def _body(body: Body) -> int:
        return body.size

    @app.get("/query")
    async def _query(limit: Annotated[int, Field(ge=1)]) -> int:
        return limit

    app.add_middleware(Draining, is_draining=lambda: draining)
    app.add_middleware(SizeLimits, body_limit=lambda path: 100)
    app.add_middleware(RequestIds)
    return app


def ask(app: FastAPI, method: str, path: str, **more: Any) -> httpx2.Response:
    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **more)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code"),
    [
        (ApiError(400, "no", param="n", code="c"), 400, "invalid_request_error", "c"),
        (ApiError(401, "no"), 401, "authentication_error", None),
        (ApiError(403, "no"), 403, "permission_error", None),
        (ApiError(409, "no"), 409, "conflict_error", None),
        (ApiError(429, "no", code="rate_limit_exceeded"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.EngineLost("no"), 503, "server_error", "engine_lost"),
        (errors.AdapterNotFound("no"), 404, "invalid_request_error", "model_not_found"),
        (errors.AdapterMismatch("no"), 400, "invalid_request_error", "invalid_adapter"),
        (errors.PromptTooLong("no"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.EmptyPrompt("no"), 400, "invalid_request_error", None),
        (errors.ConflictError("no"), 409, "conflict_error", None),
        (errors.LossNotFinite("no"), 409, "conflict_error", None),
        (errors.UnsupportedModel("no"), 500, "server_error", None),
    ],
)
def test_errors_have_one_shape(raised: Exception, status: int, kind: str, code: str | None) -> None:
    answer = ask(make_app(raised), "GET", "/raise")
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["type"], error["code"]) == ("no", kind, code)
    assert answer.headers["x-request-id"].startswith("req_")
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert answer.headers.get("x-should-retry") == ("false" if status == 409 else None)


def test_a_bug_says_nothing_of_itself_but_keeps_the_shape() -> None:
    answer = ask(
        make_app(ZeroDivisionError("secret path")), "GET", "/raise", headers={"x-request-id": "mine"}
    )
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error" and answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("content", "param", "code", "words"),
    [
        (b'{"size": "x"}', "size", "invalid_value", "Invalid value for 'size'"),
        (b"{}", "size", "missing_required_parameter", "Missing required parameter: 'size'"),
        (b"{", None, None, "not valid JSON"),
        (b"\xff", None, None, ""),
        (b"", None, "missing_required_parameter", "'body'"),
    ],
)
def test_what_fastapi_refuses_is_said_as_openai_says_it(
    content: bytes, param: str | None, code: str | None, words: str
) -> None:
    answer = ask(make_app(), "POST", "/body", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert code is None or error["code"] == code


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"often": 0}, "often", "greater than or equal to 1"),  # not that it should be 'auto'
        ({"often": []}, "often", "Input should be 'auto' or a valid integer"),
        ({"names": ["a", "long"]}, "names.1", "at most 3 characters"),
        ({"names": ["a", 5]}, "names.1", "a valid string"),
        ({"names": 5}, "names", "Input should be a valid string or a valid list"),
        ({"shape": {"kind": "round", "radius": "x"}}, "shape.radius", "Invalid value for 'shape.radius'"),
        ({"shape": {"kind": "square"}}, "shape.square", "Missing required parameter: 'shape.square'"),
        ({"shape": {"kind": "round", "radius": 1, "x": 2}}, "shape.x", "Unknown parameter: 'shape.x'"),
    ],
)
def test_what_is_wrong_is_told_of_what_was_meant(
    fields: dict[str, Any], param: str | None, words: str
) -> None:
    error = ask(make_app(), "POST", "/body", json={"size": 1, **fields}).json()["error"]
    assert error["param"] == param and words in error["message"]


def test_bodies_that_are_no_objects_are_told_what_to_be() -> None:
    for content, kind in ((b"[]", "application/json"), (b"null", "application/json"), (b"{}", "text/plain")):
        answer = ask(make_app(), "POST", "/body", content=content, headers={"content-type": kind})
        assert answer.status_code == 400 and "must be a JSON object" in answer.json()["error"]["message"]


def test_places_in_a_query_are_named() -> None:
    error = ask(make_app(), "GET", "/query?limit=0").json()["error"]
    assert error["param"] == "limit" and "'limit'" in error["message"]


def test_what_is_repeated_of_a_request_is_short_and_is_text() -> None:
    name = "\ud800" + "x" * 5000
    error = ApiError(400, f"Unknown parameter: '{name}'.", param=name)
    for shape in (OPENAI, ERRORS):
        body = shape.written(error, "req_1")
        assert len(body) < 3000 and rb"\\ud800xxx" in body


def test_unknown_places_and_methods() -> None:
    nowhere = ask(make_app(), "GET", "/nowhere")
    assert nowhere.status_code == 404 and nowhere.json()["error"]["code"] == "unknown_url"
    wrong = ask(make_app(), "PUT", "/body")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and "error" in wrong.json()


@pytest.mark.parametrize("given", ["", "x" * 129, "a\tb", "mine tenant=bob"])
def test_ids_of_clients_are_kept_only_if_they_are_sane(given: str) -> None:
    kept = ask(make_app(), "GET", "/nowhere", headers={"x-request-id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    made = ask(make_app(), "GET", "/nowhere", headers={"x-request-id": given})
    assert made.headers["x-request-id"].startswith("req_")


def test_headers_and_bodies_are_bounded() -> None:
    large = {"x-large": "a" * MOST_HEADER_BYTES}
    assert ask(make_app(), "GET", "/nowhere", headers=large).status_code == 431
    assert ask(make_app(), "GET", "/query?limit=1&x=" + "x" * MOST_URL_BYTES).status_code == 414
    body = b'{"size": 1' + b" " * 100 + b"}"
    plain = {"content-type": "application/json"}
    assert ask(make_app(), "POST", "/body", content=body, headers=plain).status_code == 413

    async def pieces() -> Any:
        yield body[:50]
        yield body[50:]

    unannounced = ask(make_app(), "POST", "/body", content=pieces(), headers=plain)
    assert unannounced.status_code == 413 and unannounced.json()["error"]["message"]
    assert ask(make_app(), "POST", "/body", content=b'{"size": 7}', headers=plain).json() == 7


def test_draining_refuses_new_work_and_lets_look() -> None:
    app = make_app(errors.ConflictError("no"), draining=True)
    refused = ask(app, "POST", "/body", json={"size": 1})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "draining" and refused.headers["x-request-id"]
    assert ask(app, "GET", "/raise").status_code == 409


def test_faults_become_what_they_were() -> None:
    assert type(error_named("AdapterMismatch", "x")) is errors.AdapterMismatch
    for kind in ("SystemExit", "NoSuchThing", "__doc__", ""):
        assert type(error_named(kind, "x")) is errors.CoserveError
