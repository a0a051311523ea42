"""Web pages of other sites in a browser on this machine: names that are pointed here, foreign origins."""

import asyncio
import random
import string

import pytest

from coserve.serve.http.browsers import is_own_host
from coserve.serve.settings import ServerSettings
from serving import Play, World, listening

EVIL = ("evil.example", "rebind.it", "xn--80ak6aa92e.com", "local", "internal", "metadata.google")
OWN = ("localhost", "127.0.0.1", "[::1]", "tiny-host")
PAGES = ("https://evil.example", "http://127.0.0.1.evil.example:8000", "null", "http://localhost:3000")


def hostile(draw: random.Random) -> str:
    """A `Host` that is not ours, close to one that is."""
    evil, own = draw.choice(EVIL), draw.choice(OWN)
    address = ".".join(str(draw.randrange(128, 255)) for _ in range(4))
    label = "".join(draw.choices(string.ascii_lowercase + string.digits, k=draw.randrange(1, 30)))
    made = draw.choice((
        f"{own}.{evil}", f"{label}.{evil}", f"{label}-{own}", f"{own}@{evil}", f"{evil}#{own}",
        f"{own}/{evil}", f"{own} {evil}", f"{own},{evil}", f"{own}:80:{evil}", f"[{evil}]", f"[::1]{evil}",
        f"::1.{evil}", address, f"{address}.nip.io", "2130706433", "0x7f.1", "017700000001",
        f"[2001:db8::{draw.randrange(1, 9999):x}]", f"{evil}.", "0.0.0.0", "[::]", f"localhost{label}",
        "127.0.0.1\u00e9", f"%31{own}",
    ))  # fmt: skip
    return made + draw.choice(("", "", ":80", ":8000", f":{draw.randrange(1, 65536)}"))


def own(draw: random.Random) -> str:
    """A `Host` that always means this machine."""
    made = draw.choice((
        "localhost", "LocalHost", "localhost.", "[::1]", f"127.{draw.randrange(256)}.{draw.randrange(256)}.1",
        "[::ffff:127.0.0.1]",
    ))  # fmt: skip
    return made + draw.choice(("", ":80", f":{draw.randrange(1, 65536)}"))


@pytest.mark.parametrize("seed", range(3))
def test_names_that_are_pointed_here_are_told_from_our_own(seed: int) -> None:
    draw, settings = random.Random(seed), ServerSettings("m", "s")  # type: ignore[arg-type]
    for _ in range(2000):
        assert not is_own_host(name := hostile(draw), settings), name
        assert is_own_host(name := own(draw), settings), name


def test_without_keys_nothing_is_answered_to_another_name(play: Play) -> None:
    paths = (
        "/v1/models",
        "/health",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/v1/files",
        "/v1/fine_tuning/jobs",
    )

    async def story(world: World) -> None:
        draw = random.Random(0)
        for _ in range(60):
            given = {"host": hostile(draw).encode("latin-1")}
            answer = await world.http.get(draw.choice(paths), headers=given)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed", given
            answer = await world.http.get("/v1/models", headers={"host": own(draw)})
            assert answer.status_code == 200
        body = {"model": "tiny", "prompt": "x"}
        answer = await world.http.post("/v1/completions", json=body, headers={"host": "evil.example:8000"})
        assert "--allowed-host evil.example," in answer.json()["error"]["message"]
        assert world.submits() == []

    play(story)


def test_names_that_settings_allow(play: Play) -> None:
    async def some(world: World) -> None:
        for host, status in {"chat.example.org:80": 200, "a.example.net": 200, "example.net": 403}.items():
            assert (await world.http.get("/v1/models", headers={"host": host})).status_code == status, host

    async def keyed(world: World) -> None:  # behind a proxy, under any name
        _, secret = await world.state.store.tenants.create_key("ann")
        headers = {"host": "api.example.com", "authorization": f"Bearer {secret}"}
        assert (await world.http.get("/v1/models", headers=headers)).status_code == 200

    play(some, allowed_hosts=("chat.example.org", "*.example.net"))
    play(keyed)


def test_on_all_addresses_any_address_is_ours_and_no_name(play: Play) -> None:
    async def story(world: World) -> None:
        for host, status in {"192.168.0.7:8000": 200, "[fe80::1]:8000": 200, "evil.example": 403}.items():
            assert (await world.http.get("/v1/models", headers={"host": host})).status_code == status, host

    play(story, host="0.0.0.0", allow_insecure=True)


@pytest.mark.parametrize("keyed", [False, True])
def test_pages_of_other_origins_are_told_why_and_change_nothing(play: Play, keyed: bool) -> None:
    async def story(world: World) -> None:
        key = (await world.state.store.tenants.create_key("ann"))[1] if keyed else "unused"
        headers = {"authorization": f"Bearer {key}"}
        for origin in PAGES:
            preflight = await world.http.options("/v1/completions", headers={
                "origin": origin, "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            })  # fmt: skip
            assert preflight.status_code < 300  # or the page could not read why
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/v1/files")):
                sent = {"origin": origin, **headers}
                answer = await world.http.request(method, path, headers=sent, json={"model": "tiny"})
                told = answer.json()["error"]
                assert answer.status_code == 403 and told["code"] == "origin_not_allowed"
                assert f"--cors-origin {origin}" in told["message"]
                assert answer.headers["access-control-allow-origin"] == origin
        assert world.submits() == []

    play(story)


def test_a_page_of_an_allowed_origin_works_as_in_a_browser(play: Play) -> None:
    page = "https://chat.example.org"

    async def story(world: World) -> None:
        _, secret = await world.state.store.tenants.create_key("ann")
        preflight = await world.http.options("/v1/chat/completions", headers={
            "origin": page, "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        })  # fmt: skip
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert "authorization" in allowed and "x-stainless-lang" in allowed
        assert "POST" in preflight.headers["access-control-allow-methods"]
        world.say(" yes")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        headers = {"origin": page, "authorization": f"Bearer {secret}"}
        answer = await world.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200 and "data: [DONE]" in answer.text
        assert answer.headers["access-control-allow-origin"] == page
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await world.http.get("/v1/models", headers={"origin": page})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page

    play(story, cors_origins=(page,))


def test_a_server_whose_last_key_was_revoked_stays_closed(play: Play) -> None:
    async def status(world: World, **headers: str) -> int:
        return int((await world.http.get("/v1/models", headers=headers)).status_code)

    async def story(world: World) -> None:
        tenants = world.state.store.tenants
        assert await status(world) == 200
        made = [await tenants.create_key("ann") for _ in range(3)]
        assert await status(world) == 401
        for key, _ in made:
            assert not await tenants.forget_keys()
            assert await tenants.revoke_key(key.id)
        assert [await status(world, authorization=f"Bearer {secret}") for _, secret in made] == [401] * 3
        assert await status(world) == 401

    async def later(world: World) -> None:
        assert await status(world) == 401
        assert await world.state.store.tenants.forget_keys()

    async def opened(world: World) -> None:
        assert await status(world) == 200

    play(story)
    play(later)
    play(opened)


def test_the_real_listener_refuses_a_rebound_name(play: Play) -> None:
    async def story(world: World) -> None:
        async with listening(world.app) as url:
            port = int(url.rsplit(":", 1)[1])
            told = {}
            for host in (f"127.0.0.1:{port}", f"evil.example:{port}"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                told[host] = (await reader.read()).split(b" ", 2)[1]
                writer.close()
            assert list(told.values()) == [b"200", b"403"]

    play(story)
