"""The official `tinker` client, unmodified, against a server in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tinker

from coserve import tiny
from coserve.serve.app import create_app
from coserve.serve.compose import build_state
from coserve.serve.settings import ServerSettings
from engine_process import EngineProcess
from serving import SECONDS, World, listening

T = TypeVar("T")


class Client:
    """A service client at a server's address. Its calls block, so they run in threads beside the server."""

    def __init__(self, url: str, key: str = "tml-unused") -> None:
        self.url, self.key = url, key

    async def call(self, work: Callable[..., T], *given: Any, **named: Any) -> T:
        """`work` in a thread; a future that it returns is waited for."""

        def run() -> T:
            made = work(*given, **named)
            return made.result() if hasattr(made, "result") else made  # type: ignore[no-any-return]

        return await asyncio.to_thread(run)

    async def service(self, **named: Any) -> tinker.ServiceClient:
        return await asyncio.to_thread(
            lambda: tinker.ServiceClient(base_url=self.url, api_key=self.key, **named)
        )


@asynccontextmanager
async def tinkering(world: World, key: str = "tml-unused") -> AsyncIterator[Client]:
    """A client of this world's server."""
    async with listening(world.app) as url:
        yield Client(url, key)


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
