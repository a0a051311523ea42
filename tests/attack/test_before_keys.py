"""Callers without a key: nothing of their body is read, whatever the route and the header."""

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from fastapi.routing import APIRoute

from serving import Play, World

SEEDS = range(3)
ADDRESSES = itertools.cycle(range(256))  # an address may guess few keys in a minute


def headers_without_a_key(draw: random.Random) -> list[tuple[bytes, bytes]]:
    """Headers as somebody would send them who guesses, errs, or does not care."""
    credentials = draw.choice([
        b"", b"Bearer", b"Bearer ", b"bearer sk-coserve-" + draw.randbytes(16).hex().encode(), b"Basic eDp5",
        b"Bearer " + b"\xc3\xa4" * 8, b"Bearer " + b"x" * 4000, b"Token sk-coserve-1",
    ])  # fmt: skip
    kind = draw.choice([b"application/json", b"multipart/form-data; boundary=x", b"text/plain", b""])
    length = draw.choice([b"0", b"17", b"8000000", b"500000000", b""])
    name = draw.choice([b"authorization", b"authorization", b"x-api-key"])
    found = {name: credentials, b"content-type": kind, b"content-length": length}
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
        "root_path": "", "client": (f"10.{next(ADDRESSES)}.0.1", 1), "server": ("localhost", 80),
        "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_who_could_not_even_wait_is_refused_before_the_body(play: Play) -> None:
    """And as soon as an answer has ended the next one is let in."""

    async def story(world: World) -> None:
        path, body = "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2000}
        asked = [asyncio.create_task(world.http.post(path, json=body)) for _ in range(6)]
        while world.state.queue.inside + world.state.queue.waiting < 6:
            await asyncio.sleep(0.005)
        status, told = await refused(world.app, "POST", path, [(b"host", b"localhost")])
        assert status == 429 and told["error"]["code"] == "rate_limit_exceeded"
        assert (await world.http.get("/v1/models")).status_code == 200
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        short = {**body, "max_tokens": 1}
        assert (await world.http.post(path, json=short)).status_code == 200

    play(story, engine={"max_running": 1, "step_seconds": 0.005}, max_queue_tenant=4)
