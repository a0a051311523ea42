"""Clients behind a proxy, and clients that pretend to be: whose address counts."""

import asyncio
import ipaddress
import random
from typing import Any

import httpx2
import pytest

from coserve.serve.app import create_app
from coserve.serve.http.proxies import TrustedProxies, networks_of
from coserve.serve.settings import ServerSettings
from serving import Play, World, listening

TRUSTED = ("10.0.0.0/8", "fd00::/8", "192.0.2.7")


def seen(peer: str, *headers: tuple[str, str]) -> tuple[str, str]:
    """The address and scheme that the application sees."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "client": (peer, 5), "scheme": "http", "headers": raw}
    asyncio.run(TrustedProxies(app, networks_of(TRUSTED))(scope, None, None))  # type: ignore[arg-type]
    return found[0]["client"][0], found[0]["scheme"]


def test_what_a_stranger_claims_counts_for_nothing() -> None:
    draw = random.Random(6)

    def stranger() -> str:
        return f"203.0.113.{draw.randrange(1, 255)}"

    def proxy() -> str:
        return draw.choice((f"10.{draw.randrange(256)}.0.1", "fd00::5", "192.0.2.7", "::ffff:10.1.1.1"))

    for _ in range(300):
        claims = [draw.choice((stranger(), proxy(), "", "x", "127.0.0.1", "[::1]:9"))] * draw.randrange(40)
        client, hops = stranger(), [proxy() for _ in range(draw.randrange(4))]
        line = [*claims, client + draw.choice(("", ":1234")), *hops]
        cut = draw.randrange(len(line) + 1)
        headers = [
            ("x-forwarded-for", draw.choice((",", ", ")).join(part))
            for part in (line[:cut], line[cut:])
            if part
        ]
        assert seen(proxy(), *headers)[0] == client
        assert seen(direct := stranger(), *headers, ("x-forwarded-proto", "https")) == (direct, "http")


def test_odd_headers_of_a_proxy_are_its_own() -> None:
    assert seen("10.0.0.1") == ("10.0.0.1", "http")
    assert seen("10.0.0.1", ("x-forwarded-for", "unknown")) == ("10.0.0.1", "http")
    assert seen("10.0.0.1", ("x-forwarded-for", "203.0.113.1, bad, 10.0.0.2"))[0] == "10.0.0.2"
    assert seen("10.0.0.1", ("x-forwarded-for", "[2001:db8::1]:443"))[0] == "2001:db8::1"
    assert seen("10.0.0.1", ("x-forwarded-for", ",".join(["10.0.0.9"] * 5000)))[0] == "10.0.0.9"
    assert seen("10.0.0.1", ("x-forwarded-proto", "gopher, https"))[1] == "https"
    assert seen("10.0.0.1", ("x-forwarded-proto", "gopher"))[1] == "http"
    assert ipaddress.ip_network("192.0.2.7/32") in networks_of(TRUSTED)


def test_guesses_at_keys_are_counted_by_the_client_behind_the_proxy(play: Play) -> None:
    async def story(world: World) -> None:
        await world.state.store.tenants.create_key("ann")

        async def ask(peer: str, client: str) -> int:
            transport = httpx2.ASGITransport(app=app, client=(peer, 1))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                headers = {"authorization": "Bearer wrong", "x-forwarded-for": client}
                return (await http.get("/v1/models", headers=headers)).status_code

        app = create_app(world.state)
        assert [await ask("10.0.0.1", "203.0.113.1") for _ in range(3)] == [401, 401, 429]
        assert await ask("10.0.0.1", "203.0.113.2") == 401
        tries = [await ask("198.51.100.1", f"203.0.113.{n}") for n in range(3, 6)]
        assert tries == [401, 401, 429]  # whatever it claims

    play(story, trusted_proxies=TRUSTED, max_bad_keys_minute=2)


def test_settings_of_proxies_are_checked() -> None:
    for bad in ("10.0.0.0/33", "example.org", ""):
        try:
            ServerSettings("m", "s", trusted_proxies=(bad,))  # type: ignore[arg-type]
        except Exception as error:
            assert "trusted_proxies" in str(error)
        else:
            raise AssertionError(bad)


def test_nobody_is_a_proxy_that_the_settings_do_not_name(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a socket: uvicorn by default believes this machine, and whom its environment names."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def story(world: World) -> None:
        await world.state.store.tenants.create_key("ann")
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["client"][0], scope["scheme"]))
            await world.app(scope, receive, send)

        async with listening(app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            told = []
            for number in range(4):
                claims = {"x-forwarded-for": f"203.0.113.{number}", "x-forwarded-proto": "https"}
                told.append((await http.get("/v1/models", headers=claims)).status_code)
        assert set(seen) == {("127.0.0.1", "http")} and told == [401, 401, 429, 429]

    play(story, max_bad_keys_minute=2)


def test_a_proxy_s_clients_need_a_key(play: Play) -> None:
    """To a server on loopback they look as this machine's own, whom it asks for none."""

    async def story(world: World) -> None:
        transport = httpx2.ASGITransport(app=create_app(world.state), client=("10.0.0.1", 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            answer = await http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.1"})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "missing_api_key"

    play(story, trusted_proxies=TRUSTED)
