"""Logins of browsers: cookies that are forged, sent by other sites' pages, over, or another tenant's."""

import asyncio
import json
import random
import secrets

import httpx2
import pytest

from coserve.serve import telemetry
from coserve.serve.http import revocation
from coserve.serve.http.auth import COOKIE, TOKEN_HEADER
from coserve.serve.store.logins import LOGIN_SECONDS, MOST_LOGINS, token_of
from coserve.serve.store.store import Store
from serving import Play, World, listening

LOGIN, LIVE = "/web/api/login", "/web/api/live"
READS = ("/v1/models", "/v1/files", "/v1/fine_tuning/jobs", "/metrics", "/web/api/health", "/web/api/usage")


@pytest.fixture(autouse=True)
def samples_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.1)


async def logged_in(world: World, name: str) -> tuple[str, str, str]:
    """A new key of this tenant, its id, and the cookie of a login with it."""
    key, secret = await world.state.store.tenants.create_key(name)
    answer = await world.http.post(LOGIN, headers={"authorization": f"Bearer {secret}"})
    world.http.cookies.clear()
    assert answer.status_code == 200 and answer.json()["tenant"] == name
    kept = answer.headers["set-cookie"]
    assert "HttpOnly" in kept and "SameSite=strict" in kept and "Path=/" in kept and "Secure" not in kept
    cookie = kept.partition("=")[2].partition(";")[0]
    assert answer.json()["token"] == token_of(cookie) and secret not in kept
    return secret, key.id, cookie


def with_cookie(cookie: str, at: str = "", **headers: str) -> dict[str, str]:
    """Headers with a login's cookie, for a server at this address."""
    port = httpx2.URL(at).port if at else None
    return {
        "cookie": f"{COOKIE}{'' if port is None else f'_{port}'}={cookie}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }


def test_a_cookie_reads_but_changes_nothing_without_its_token(play: Play) -> None:
    async def story(world: World) -> None:
        secret, _, cookie = await logged_in(world, "ann")
        _, _, other = await logged_in(world, "bob")
        for path in READS:
            assert (await world.http.get(path, headers=with_cookie(cookie))).status_code == 200, path
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        changes = [
            ("POST", "/v1/chat/completions"), ("POST", "/v1/files"), ("POST", "/v1/fine_tuning/jobs"),
            ("DELETE", "/v1/models/x"), ("DELETE", "/v1/files/file-x"), ("POST", "/tokenize"),
            ("POST", "/v1/load_lora_adapter"), ("DELETE", LOGIN), ("POST", "/api/v1/create_session"),
        ]  # fmt: skip
        wrong = ("", token_of(other), token_of(secret), token_of(cookie)[:-1], token_of(cookie).upper(), "é")
        for method, path in changes:
            for token in wrong:
                given = with_cookie(cookie) | {TOKEN_HEADER: token.encode("latin-1").decode("latin-1")}
                raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
                answer = await world.http.request(method, path, json=chat, headers=raw)
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "token_missing", path
        assert world.submits() == []
        token = with_cookie(cookie, x_coserve_token=token_of(cookie))
        answer = await world.http.post("/v1/chat/completions", json=chat, headers=token)
        assert answer.status_code == 200 and len(world.submits()) == 1
        # A page of another site is refused before the cookie is looked at, with a token or without.
        for origin in ("https://evil.example", "null", "http://localhost:3000"):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", LIVE)):
                answer = await world.http.request(
                    method, path, json=chat, headers={**token, "origin": origin}
                )
                assert answer.status_code == 403, (origin, path)
                assert answer.json()["error"]["code"] == "origin_not_allowed"
        # One that the settings allow gets no further with a cookie than any other.
        assert len(world.submits()) == 1

    play(story)


def test_an_allowed_origin_does_not_borrow_the_cookie(play: Play) -> None:
    async def story(world: World) -> None:
        _, _, cookie = await logged_in(world, "ann")
        headers = with_cookie(cookie, origin="https://chat.example.org")
        answer = await world.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=headers
        )
        assert answer.status_code == 403 and world.submits() == []
        answer = await world.http.get("/v1/models", headers=headers)
        assert "access-control-allow-credentials" not in answer.headers  # browsers hide the answer then

    play(story, cors_origins=("https://chat.example.org",))


def test_a_login_is_its_tenants_and_ends_with_its_key_its_time_or_by_hand(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.05)

    async def story(world: World) -> None:
        _, ann_key, ann = await logged_in(world, "ann")
        bob_secret, _, bob = await logged_in(world, "bob")
        upload = {"file": ("a.jsonl", b'{"messages": []}\n', "text/plain")}
        answer = await world.http.post(
            "/v1/files", data={"purpose": "batch"}, files=upload,
            headers=with_cookie(bob, x_coserve_token=token_of(bob)),
        )  # fmt: skip
        assert answer.status_code == 200
        path = f"/v1/files/{answer.json()['id']}"
        assert (await world.http.get(path, headers=with_cookie(ann))).status_code == 404
        assert (await world.http.get(path, headers=with_cookie(bob))).status_code == 200
        # A key in the headers counts, whatever the cookie is.
        both = with_cookie(ann, authorization=f"Bearer {bob_secret}")
        assert (await world.http.get(LOGIN, headers=both)).json()["tenant"] == "bob"
        async with (
            listening(world.app) as url,
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("GET", LIVE, headers=with_cookie(ann, url)) as watched,
        ):
            events = watched.aiter_lines()
            assert "rows" in await anext(events)
            with Store(world.state.settings.state) as elsewhere:
                assert await elsewhere.tenants.revoke_key(ann_key)
            last = [line async for line in events if "error" in line]
            assert "logged_out" in last[-1]
        answer = await world.http.get("/v1/models", headers=with_cookie(ann))
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "logged_out"
        assert (await world.http.get("/v1/models", headers=with_cookie(bob))).status_code == 200
        ending = with_cookie(bob, x_coserve_token=token_of(bob))
        answer = await world.http.delete(LOGIN, headers=ending)
        assert answer.status_code == 204 and "Max-Age=0" in answer.headers["set-cookie"]
        assert (await world.http.get("/v1/models", headers=with_cookie(bob))).status_code == 401
        # A week later, and beyond the number of logins of a key.
        store, now = world.state.store, world.state.store.logins._clock()
        cookies = [await store.logins.begin(bob_secret) for _ in range(MOST_LOGINS + 1)]
        assert [await store.logins.owner(one or "") is not None for one in cookies].count(True) == MOST_LOGINS
        store.logins._clock = lambda: now + LOGIN_SECONDS + 1
        assert not any([await store.logins.owner(one or "") for one in cookies])
        assert await store.logins.begin(bob_secret)

    play(story)


def test_servers_on_two_ports_of_a_host_keep_their_logins_apart(play: Play) -> None:
    """A browser sends a host's cookies to all its ports."""

    async def story(world: World) -> None:
        hosts = {f"localhost{port}": name for port, name in ((":8000", "ann"), (":8001", "bob"), ("", "eve"))}
        kept = []
        for host, name in hosts.items():
            _, secret = await world.state.store.tenants.create_key(name)
            given = {"authorization": f"Bearer {secret}", "host": host}
            answer = await world.http.post(LOGIN, headers=given)
            kept.append(answer.headers["set-cookie"].partition(";")[0])
        assert len({one.partition("=")[0] for one in kept}) == 3
        jar = {"cookie": "; ".join(kept)}
        for host, name in hosts.items():
            answer = await world.http.get(LOGIN, headers={**jar, "host": host})
            assert answer.json()["tenant"] == name
        token = {**jar, "host": "localhost:8001", "x-coserve-token": token_of(kept[1].partition("=")[2])}
        ended = await world.http.delete(LOGIN, headers=token)
        assert ended.status_code == 204 and "coserve_login_8001=" in ended.headers["set-cookie"]
        assert [
            (await world.http.get(LOGIN, headers={**jar, "host": host})).status_code for host in hosts
        ] == [200, 401, 200]
        odd = await world.http.get(LOGIN, headers={**jar, "host": "localhost:port"})
        assert odd.json()["tenant"] == "eve"

    play(story)


def test_guesses_are_limited_as_those_of_keys_are(play: Play) -> None:
    async def story(world: World) -> None:
        secret, _, cookie = await logged_in(world, "ann")
        draw = random.Random(0)
        told = []
        for _ in range(12):
            guess = draw.choice(
                (secrets.token_urlsafe(32), cookie[:-1], "", "é" * 9, cookie + "x", "x" * 3000)
            )
            raw = [(b"cookie", f"{COOKIE}={guess}".encode("latin-1"))]
            if draw.random() < 0.4:
                raw = [(b"authorization", f"Bearer {secret[:-4]}{draw.randrange(1000, 9999)}".encode())]
            path = draw.choice((LOGIN, "/v1/models", "/web/api/live"))
            told.append((await world.http.get(path, headers=raw)).status_code)
        assert told[:5] == [401] * 5 and set(told[5:]) == {429}
        assert (await world.http.get("/v1/models", headers=with_cookie(cookie))).status_code == 200
        good = {"authorization": f"Bearer {secret}"}
        assert (await world.http.post(LOGIN, headers=good)).status_code == 200

    play(story, max_bad_keys_minute=5)


def test_the_database_has_no_cookie(play: Play) -> None:
    async def story(world: World) -> None:
        _, _, cookie = await logged_in(world, "ann")
        for file in world.state.settings.state.glob("coserve.db*"):
            assert cookie.encode() not in file.read_bytes()
        # Behind TLS the cookie is for TLS alone.
        _, secret = await world.state.store.tenants.create_key("ann")
        given = {"authorization": f"Bearer {secret}", "origin": "https://localhost"}
        answer = await world.http.post(LOGIN, headers=given)
        assert "Secure" in answer.headers["set-cookie"]

    play(story)


def test_viewers_are_bounded_and_see_their_own_names_alone(play: Play) -> None:
    async def story(world: World) -> None:
        _, _, ann = await logged_in(world, "ann")
        _, _, bob = await logged_in(world, "bob")
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            opened = [
                await http.send(http.build_request("GET", LIVE, headers=with_cookie(ann, url)), stream=True)
                for _ in range(9)
            ]
            first = [asyncio.ensure_future(anext(one.aiter_lines())) for one in opened[:8]]
            await asyncio.gather(*first)
            assert [one.status_code for one in opened].count(200) >= 8
            late = await http.get(LIVE, headers=with_cookie(ann, url))
            assert late.status_code == 429 and late.json()["error"]["code"] == "too_many_viewers"
            async with http.stream("GET", LIVE, headers=with_cookie(bob, url)) as watched:
                events = watched.aiter_lines()
                await anext(events)
                chat = {"model": "tiny", "prompt": "x", "max_tokens": 30}
                given = with_cookie(ann, url, x_coserve_token=token_of(ann))
                assert (await http.post("/v1/completions", json=chat, headers=given)).status_code == 200
                seen = []
                async for line in events:
                    if line:
                        seen.append(json.loads(line.removeprefix("data: ")))
                    if len(seen) == 3:
                        break
            assert any(row[15] for told in seen for row in told["rows"])  # latency of all, as in /metrics
            assert [own for told in seen for own in told["own"]] == [None] * 3
            for one in opened:
                await one.aclose()
        await world.until(lambda: not world.state.telemetry._viewers)

    play(story)
