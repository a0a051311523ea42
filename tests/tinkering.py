"""The official `tinker` client, unmodified, against a server in this process; and its requests by hand."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import tinker
from tinker.lib import internal_client_holder
from tinker.proto import tinker_public_pb2 as public

from coserve import tiny
from coserve.serve.app import create_app
from coserve.serve.compose import build_state
from coserve.serve.settings import ServerSettings
from engine_process import EngineProcess
from serving import SECONDS, World, listening

T = TypeVar("T")


def passed(model: str, number: int, tokens: tuple[int, ...] = (5, 6, 7), **fields: Any) -> bytes:
    """The body of a forward_backward."""
    message = public.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy", **fields)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"".join(token.to_bytes(4, "little") for token in tokens)
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense = b"".join(token.to_bytes(8, "little") for token in tokens)
    targets.dtype, targets.shape[:] = public.DTYPE_INT64, [len(tokens)]
    return bytes(message.SerializeToString())


class Caller:
    """A client's requests, by hand."""

    def __init__(self, world: World, key: str = "local") -> None:
        self.world, self.headers = world, {"X-API-Key": f"tml-{key}"}

    async def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> Any:
        said: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.world.http.post(f"/api/v1/{path}", **said, headers={**self.headers, **headers})

    async def session(self) -> str:
        return str((await self.post("create_session", {"tags": []})).json()["session_id"])

    async def run(self, base: str = "tiny") -> str:
        """An open run."""
        body = {"session_id": await self.session(), "model_seq_id": 0, "base_model": base}
        made = await self.result(await self.post("create_model", {**body, "lora_config": {"rank": 4}}))
        return str(made["model_id"])

    async def result(self, answer: Any) -> Any:
        """The result of a request's future."""
        assert answer.status_code == 200, answer.text
        found = await self.post("retrieve_future", {"request_id": answer.json()["request_id"]})
        assert found.status_code == 200, found.text
        return found.json()


def sent(world: World, *kinds: type) -> list[Any]:
    return [command for command in world.engine.said if isinstance(command, kinds)]


class Client:
    """A service client at a server's address. Its calls block, so they run in threads beside the server."""

    def __init__(self, url: str, key: str = "tml-unused") -> None:
        self.url, self.key = url, key
        self._services: list[tinker.ServiceClient] = []

    async def call(self, work: Callable[..., T], *given: Any, **named: Any) -> T:
        """`work` in a thread; a future that it returns is waited for."""

        def run() -> T:
            made = work(*given, **named)
            return made.result() if hasattr(made, "result") else made  # type: ignore[no-any-return]

        return await asyncio.to_thread(run)

    async def service(self, **named: Any) -> tinker.ServiceClient:
        """A service client, which is closed with this one."""
        made = await asyncio.to_thread(
            lambda: tinker.ServiceClient(base_url=self.url, api_key=self.key, **named)
        )
        self._services.append(made)
        return made

    async def close(self) -> None:
        """Ends the sessions and their heartbeats, while the server is there."""
        for service in self._services:
            with suppress(tinker.TinkerError):  # of a key that was revoked
                await self.call(service.close, "success")


@asynccontextmanager
async def tinkering(world: World, key: str = "tml-unused") -> AsyncIterator[Client]:
    """A client of this world's server."""
    async with listening(world.app) as url:
        client = Client(url, key)
        try:
            yield client
        finally:
            await client.close()


def heartbeats() -> list["asyncio.Task[Any]"]:
    """Tasks of clients in this process that send signs of life of their sessions: those of clients that
    nobody has closed."""
    loop = internal_client_holder._internal_client_holder_thread_singleton.loop_if_started()
    beating = internal_client_holder.InternalClientHolder._session_heartbeat
    if loop is None:
        return []
    return [
        task
        for task in asyncio.all_tasks(loop)
        if getattr(task.get_coro(), "__qualname__", "") == beating.__qualname__
    ]


@contextmanager
def serving_tiny(folder: Path, **settings: Any) -> Iterator[str]:
    """The whole server with the embedded model, its engine in a process and its application in a thread; the
    address."""
    (folder / "tiny").symlink_to(tiny.path())  # so that the client finds the base's tokenizer by its name
    model = folder / "tiny"
    found: list[str] = []
    started, stop = threading.Event(), threading.Event()

    with EngineProcess(folder, cache_tokens=4096, page_size=16, dtype="float32") as engine:
        engine.feed(model)
        assert [engine.phase().state for _ in range(3)] == ["standby", "loading", "ready"]

        async def serve() -> None:
            fields = {"model": str(model), "state": folder / "state", "name": "tiny", **settings}
            (folder / "state").mkdir()
            async with build_state(ServerSettings(**fields), engine.socket) as state:
                await state.link.wait_ready(SECONDS)
                async with listening(create_app(state)) as url:
                    found.append(url)
                    started.set()
                    while not stop.is_set():
                        await asyncio.sleep(0.02)

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert started.wait(SECONDS)
            yield found[0]
        finally:
            stop.set()
            thread.join(SECONDS)
