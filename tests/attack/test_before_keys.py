"""Who has no key: nothing of the body is read, whatever the route and whatever stands in the header."""

import json
import random
from typing import Any

import pytest
from fastapi.routing import APIRoute

from serving import Play, World

SEEDS = range(3)


def headers_without_a_key(draw: random.Random) -> list[tuple[bytes, bytes]]:
    """Headers as somebody would send them who guesses, errs, or does not care."""
    credentials = draw.choice([
        b"", b"Bearer", b"Bearer ", b"bearer sk-coserve-" + draw.randbytes(16).hex().encode(), b"Basic eDp5",
        b"Bearer " + b"\xc3\xa4" * 8, b"Bearer " + b"x" * 4000, b"Token sk-coserve-1",
    ])  # fmt: skip
    kind = draw.choice([b"application/json", b"multipart/form-data; boundary=x", b"text/plain", b""])
    length = draw.choice([b"0", b"17", b"8000000", b"500000000", b""])
    found = {b"authorization": credentials, b"content-type": kind, b"content-length": length}
    return [(b"host", b"localhost"), *((name, value) for name, value in found.items() if value)]


def requests_to(app: Any, draw: random.Random) -> list[tuple[str, str]]:
    """(method, path) of every route that belongs to the API, with something in place of its parameters."""
    found = []
    for route in every_route(app.routes):
        if route.path.startswith("/v1/"):
            path = route.path_format.replace("{", "").replace("}", draw.choice(["", "/x", "%00"]))
            found += [(method, path) for method in route.methods or ()]
    return found


def every_route(routes: Any) -> list[APIRoute]:
    """Routes of an application, those of included routers among them."""
    found = [route for route in routes if isinstance(route, APIRoute)]
    for route in routes:
        inner = getattr(route, "original_router", None)
        found += every_route(inner.routes) if inner is not None else []
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_read_of_who_has_no_key(play: Play, seed: int) -> None:
    draw = random.Random(seed)

    async def story(world: World) -> None:
        await world.state.store.tenants.create_key("ann")
        asked = requests_to(world.app, draw)
        assert len(asked) > 20
        for method, path in asked:
            status, body = await refused(world.app, method, path, headers_without_a_key(draw))
            assert status in (401, 413) and body["error"]["message"], (method, path)

    play(story)


async def refused(
    app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]]
) -> tuple[int, dict[str, Any]]:
    """(status, body) of an answer that must come without a look at the request's body."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError(f"{method} {path} read the body first")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
