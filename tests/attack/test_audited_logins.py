"""Logins and wrong keys in the audit log: told of, and not so that strangers fill it."""

from functools import partial
from typing import Final

import httpx2
import pytest

from coserve.serve.app import create_app
from coserve.serve.http import auth
from coserve.serve.http.auth import COOKIE
from coserve.serve.http.rates import TokenBuckets
from coserve.serve.store.audit import STRANGER
from coserve.serve.store.logins import token_of
from serving import Play, World

MOST: Final = 12  # wrong keys that the log gets in a minute


def test_logins_and_wrong_keys_are_in_the_audit_log(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = partial(TokenBuckets, clock=lambda: 100.0)  # however long it takes, it is one minute
    monkeypatch.setattr(auth, "TokenBuckets", stopped)
    monkeypatch.setattr(auth, "_MOST_NOTED", MOST)

    async def story(world: World) -> None:
        store, app = world.state.store, create_app(world.state)
        key, secret = await store.tenants.create_key("ann")
        wrong = secret[:-3] + "xyz"

        async def ask(peer: str, **given: str) -> int:
            transport = httpx2.ASGITransport(app=app, client=(peer, 1))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return (await http.get("/v1/models", headers=given)).status_code

        login = await world.http.post("/web/api/login", headers={"authorization": f"Bearer {secret}"})
        cookie = login.headers["set-cookie"].partition("=")[2].partition(";")[0]
        world.http.cookies.clear()
        given = {"cookie": f"{COOKIE}={cookie}", "x-coserve-token": token_of(cookie)}
        assert (await world.http.delete("/web/api/login", headers=given)).status_code == 204
        assert await ask("203.0.113.9") == 401  # nothing was tried
        assert await ask("203.0.113.1", authorization=f"Bearer {wrong}", **{"x-request-id": "mine"}) == 401
        for number in range(5):  # one of an address is enough, and of all addresses there are many
            assert await ask("203.0.113.1", authorization=f"Bearer hunter{number}") == 401
        for number in range(2 * MOST):
            assert await ask(f"10.0.{number}.1", authorization="Bearer hunter2") == 401
        rows = await store.audit.list()
        told = [(row.action, row.actor, row.subject, row.tenant) for row in rows]
        (owner,) = [one.id for one in await store.tenants.list() if one.name == "ann"]
        assert told[1:3] == [("login.begun", "ann", key.id, owner), ("login.ended", "ann", key.id, owner)]
        refused = [row for row in rows if row.action == "key.refused"]
        assert {(row.actor, row.tenant) for row in refused} == {(STRANGER, STRANGER)}
        assert (refused[0].address, refused[0].request_id) == ("203.0.113.1", "mine")
        assert refused[0].subject == key.prefix and {row.subject for row in refused[1:]} == {""}
        assert len(refused) == MOST and [row.address for row in refused].count("203.0.113.1") == 1
        kept = " ".join(f"{row.subject} {row.details}" for row in rows)
        assert wrong not in kept and "hunter" not in kept and cookie not in kept

    play(story, max_bad_keys_minute=0)
