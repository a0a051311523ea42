"""Settings and certificates that change in a server that runs."""

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority, Signed
from coserve.core.setting import Hot, noted
from coserve.errors import ConfigError
from coserve.serve.http.connections import ConnectionLimits
from coserve.serve.http.listener import Listener
from coserve.serve.main import Reload
from coserve.serve.processes.supervisor import listen
from coserve.serve.settings import ServerSettings, hot_changes
from coserve.wire.control import encode_line
from serving import Play, World
from training import create, upload


def test_limits_that_change_hold_for_the_next_request(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")  # which it restores: a reload sets the root's level

    async def story(world: World) -> None:
        reload, settings = (
            Reload(world.state, Listener(world.app, listen("127.0.0.1", 0))),
            world.state.settings,
        )
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "n": 3}

        async def statuses(count: int) -> list[int]:
            return [(await world.http.post("/v1/completions", json=body)).status_code for _ in range(count)]

        def change(**fields: Any) -> None:
            reload.take(encode_line(replace(settings, **fields)).encode())

        assert await statuses(2) == [200, 200]
        change(max_n=2)
        assert await statuses(1) == [400]
        change(max_requests_minute=3)
        assert await statuses(5) == [200, 200, 200, 429, 429]
        change(max_requests_minute=0)
        change(max_queue=2, max_queue_tenant=2)
        assert await statuses(1) == [400]  # three choices
        change(max_jobs_tenant=1)
        await create(world, training_file=(file := await upload(world)))
        with pytest.raises(Exception, match="may have 1"):
            await create(world, training_file=file)
        change(max_jobs_tenant=2, model="other", port=1)
        await create(world, training_file=file)
        assert world.state.settings.model == settings.model and world.state.settings.port == settings.port
        before = world.state.settings
        reload.take(b'{"model": "m", "state": "s", "max_queue": 0}')
        reload.take(b"nonsense")
        assert world.state.settings is before
        noted_ = [row.subject for row in await world.state.store.audit.list() if "limits" in row.action]
        assert noted_[0] == "max_n" and "max_jobs_tenant" in noted_[-1]

    play(story)


def test_hot_settings_are_those_that_have_somebody_to_take_them_over() -> None:
    """Others of `ServerSettings` are captured when the server starts, and must not be called hot."""
    hot = set(noted(ServerSettings, Hot))
    assert hot == {
        "max_queue", "max_queue_tenant", "max_requests_minute", "max_bad_keys_minute", "max_files_tenant",
        "max_bytes_tenant", "max_records_tenant", "max_jobs_tenant", "max_idempotency_keys", "max_n", "slo",
        "keep_days", "keep_responses_days", "keep_usage_days", "keep_audit_days", "log_level",
    }  # fmt: skip
    old = ServerSettings("m", Path("s"))
    new = replace(old, port=9, max_n=3, slo={"flex": {}})  # type: ignore[dict-item]
    changed, cold = hot_changes(old, new)
    assert set(changed) == {"max_n", "slo"} and cold == ["port"]


def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    first, second = authority.sign("first"), authority.sign("second")
    used = Signed(tmp_path / "cert.pem", tmp_path / "key.pem")

    def put(signed: Signed) -> None:
        used.certificate.write_bytes(signed.certificate.read_bytes())
        used.key.write_bytes(signed.key.read_bytes())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def shown(port: int) -> str:
        context = ssl.create_default_context(cafile=authority.certificate)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert()["subject"][0][0][1]
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 204")
        writer.close()
        return str(found)

    async def story() -> None:
        put(first)
        socket = listen("127.0.0.1", 0)
        listener = Listener(app, socket, ConnectionLimits(), certificate=(used.certificate, used.key))
        running = asyncio.create_task(listener.run())
        await listener.started()
        port = socket.getsockname()[1]
        assert await shown(port) == "first"
        used.certificate.write_bytes(second.certificate.read_bytes())  # without its key
        with pytest.raises(ConfigError, match="cannot be used"):
            listener.renew()
        assert await shown(port) == "first"
        put(second)
        listener.renew()
        assert await shown(port) == "second"
        listener.stop()
        await running

    asyncio.run(asyncio.wait_for(story(), 60))
    with pytest.raises(ConfigError, match="No such file"):
        Listener(app, listen("127.0.0.1", 0), certificate=(tmp_path / "none.pem", used.key))
