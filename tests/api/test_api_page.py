"""The page's files and what it asks for beside the API: weight, caching, content policy, usage, health."""

import gzip
import re

import brotli
import pytest

from coserve.serve import telemetry
from coserve.serve.web.files import FOLDER, page_files
from serving import Play, World

STRICT = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
)


def test_the_page_names_what_there_is() -> None:
    files = page_files().files
    for name, file in files.items():
        assert gzip.decompress(file.encoded["gzip"]) == brotli.decompress(file.encoded["br"]) == file.plain
        text = file.plain.decode()
        if name.endswith(".js") and not name.startswith("vendor/"):
            here = FOLDER / name
            for found in re.findall(r'(?:from|import\(|new URL\()\s*"(\.[^"]+)"', text):
                assert (here.parent / found).resolve().relative_to(FOLDER).as_posix() in files, (name, found)
    index = files["index.html"].plain.decode()
    named = re.findall(r'(?:href|src)="/web/([^/"]+)/([^"]+)"', index)
    assert len(named) > 5 and all(
        version == page_files().version and name in files for version, name in named
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?://", index)
    assert {"LICENSE-htm", "LICENSE-preact", "LICENSE-uplot"} <= {
        one.name for one in (FOLDER / "vendor").iterdir()
    }


def test_files_are_cached_and_refuse_to_be_framed(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)

    async def story(world: World) -> None:
        await world.state.store.tenants.create_key("ann")  # the page itself needs no key
        answer = await world.http.get("/")
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-cache"
        version = page_files().version
        script = await world.http.get(f"/web/{version}/app.js")
        assert "immutable" in script.headers["cache-control"]
        assert script.headers["content-type"].startswith("text/javascript")
        encodings = {
            "gzip, deflate, br, zstd": "br",
            "gzip": "gzip",
            "gzip;q=0.5,br;q=0": "gzip",
            "identity": None,
        }
        for accepted, encoding in encodings.items():
            given = {"accept-encoding": accepted}
            other = await world.http.get(f"/web/{version}/app.js", headers=given)
            assert other.headers.get("content-encoding") == encoding and other.text == script.text
        assert script.content == page_files().files["app.js"].plain
        for path, first in (("/", answer), (f"/web/{version}/app.js", script)):
            again = await world.http.get(path, headers={"if-none-match": first.headers["etag"]})
            assert again.status_code == 304 and not again.content
            other = await world.http.get(path, headers={"if-none-match": '"other"'})
            assert other.status_code == 200
            head = await world.http.head(path)
            assert head.status_code == 200
            for policy in STRICT:
                assert policy in first.headers["content-security-policy"]
            assert "unsafe" not in first.headers["content-security-policy"]
            assert first.headers["x-content-type-options"] == "nosniff"
        # An older page's address gives this version's file, and only until the browser asks again.
        older = await world.http.get("/web/0123456789abcdef/app.js")
        assert older.status_code == 200 and older.headers["cache-control"] == "no-cache"
        for path in (
            "../serve/app.py",
            "%2e%2e/serve/app.py",
            "vendor/%2e%2e/%2e%2e/errors.py",
            "README.md",
            "nothing.js",
        ):
            assert (await world.http.get(f"/web/{version}/{path}")).status_code == 404, path

    play(story)


def test_health_and_usage_tell_of_the_caller(play: Play) -> None:
    async def story(world: World) -> None:
        login = (await world.http.get("/web/api/login")).json()
        assert login == {"object": "login", "tenant": "local", "by": "loopback", "token": None}
        assert (await world.http.post("/web/api/login")).status_code == 400
        _, secret = await world.state.store.tenants.create_key("ann", 2.0)
        await world.state.store.tenants.create_key("bob")
        given = {"authorization": f"Bearer {secret}"}
        file = {"file": ("a.jsonl", b'{"a": 1}\n')}
        await world.http.post("/v1/files", data={"purpose": "batch"}, files=file, headers=given)
        used = (await world.http.get("/web/api/usage", headers=given)).json()
        assert used["tenant"] == "ann" and used["weight"] == 2.0 and len(used["keys"]) == 1
        assert used["keys"][0]["tenant"] == "ann" and secret not in str(used)
        assert {(one["kind"], one["rows"]) for one in used["kept"]} == {("files", 1)}
        assert used["kept"][0]["bytes"] > 9 and used["limits"]["files"] == 1000
        health = (await world.http.get("/web/api/health", headers=given)).json()
        assert health["engine"]["deaths"] == 0 and health["health"]["engine"] == "ready"
        assert health["replicas"] == health["workers"] == [] and health["deaths"] == {}
        assert health["keys_required"] and health["disk_free"] <= health["disk_total"]
        await world.engine.die()
        await world.engine.start()
        await world.until(lambda: world.state.link.connections == 2)
        health = (await world.http.get("/web/api/health", headers=given)).json()
        assert health["engine"]["deaths"] == 1
        assert (await world.http.get("/web/api/health")).status_code == 401

    play(story)
