"""A whole server in one process: the real application, store and tokenizer, and a scripted engine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import openai
import pytest

from coserve import tiny
from coserve.core.request import Request
from coserve.serve.app import create_app
from coserve.serve.compose import build_state
from coserve.serve.http.listener import Listener
from coserve.serve.processes.announce import url_of
from coserve.serve.settings import ServerSettings
from coserve.serve.state import State
from coserve.serve.store.store import Store
from fake_engine import FakeEngine
from waiting import until

SECONDS = 90.0  # for one story, on a machine that is busy


@dataclass
class World:
    """The engine, the state and the application of one scenario."""

    engine: FakeEngine
    state: State
    app: Any
    http: httpx2.AsyncClient  # straight into the application

    def client(self, key: str = "unused") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url="http://localhost/v1", http_client=self.http, max_retries=0
        )

    def submits(self) -> list[Request]:
        """All requests that the engine was asked."""
        return [command for command in self.engine.said if isinstance(command, Request)]

    def continued(self) -> list[tuple[int, ...]]:
        """The tokens that came with each of these."""
        return [command.continued for command in self.engine.said if isinstance(command, Request)]

    def say(self, text: str, ends: bool = True) -> list[int]:
        """Makes the engine answer with this text, and then end, or repeat its last token; its tokens."""
        tokens = [token for token in self.state.text.encode(text) if token != 1]
        spoken = [*tokens, self.engine.eos[0]] if ends else tokens
        self.engine.script = lambda request, place: spoken[min(place, len(spoken) - 1)]
        return tokens

    def told(self, tokens: list[int]) -> str:
        """Tokens as text."""
        return self.state.text.decode(tokens)

    async def until(self, holds: Callable[[], object]) -> None:
        await until(holds)


Story = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@asynccontextmanager
async def world(folder: Path, engine: dict[str, Any], fields: dict[str, Any]) -> AsyncIterator[World]:
    settings = ServerSettings(
        **{"model": str(tiny.path()), "state": folder / "state", "name": "tiny", **fields}
    )
    settings.state.mkdir(exist_ok=True)
    if not (database := settings.state / "coserve.db").exists():
        database.write_bytes(_new_database())
    fake = FakeEngine(folder / "engine.sock", step_seconds=0.001)  # one that rests nowhere takes a processor
    for name, value in engine.items():
        assert hasattr(fake, name)
        setattr(fake, name, value)
    async with fake, build_state(settings, fake.socket) as state:
        await state.link.wait_ready(SECONDS)
        app = create_app(state)
        transport = httpx2.ASGITransport(app=app)
        async with (
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http,
            app.state.batches.running(),
        ):
            yield World(fake, state, app, http)


@cache
def _new_database() -> bytes:
    """The file of a store that has nothing in it: its migrations take three quarters of a server's start."""
    with TemporaryDirectory() as folder:
        Store(Path(folder)).close()
        return (Path(folder) / "coserve.db").read_bytes()


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Runs a story with a server of its own. Keywords are settings; `engine` are attributes of the engine."""

    def run(story: Story, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        async def whole() -> None:
            async with asyncio.timeout(SECONDS), world(tmp_path, engine or {}, settings) as it:
                await story(it)

        asyncio.run(whole())

    return run


@pytest.fixture(scope="module")
def shared_play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Runs stories, one after the other, with one server for a module's tests: for those of requests that are
    refused and leave nothing behind."""
    with asyncio.Runner() as runner:
        begun, ends = runner.get_loop().create_future(), asyncio.Event()

        async def host() -> None:
            async with world(tmp_path_factory.mktemp("shared"), {}, {}) as it:
                begun.set_result(it)
                await ends.wait()

        async def begin() -> tuple[World, asyncio.Task[None]]:
            hosting = asyncio.create_task(host())
            await asyncio.wait({hosting, begun}, return_when=asyncio.FIRST_COMPLETED)
            return begun.result() if begun.done() else await hosting, hosting

        async def tell(story: Story) -> None:
            async with asyncio.timeout(SECONDS):
                await story(it)

        async def end() -> None:
            ends.set()
            await hosting

        it, hosting = runner.run(begin())
        yield lambda story: runner.run(tell(story))
        runner.run(end())


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The application behind a real socket; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server, url = Listener(app, listener), url_of(listener)
    task = asyncio.create_task(server.run())
    try:
        await server.started()
        yield url
    finally:
        server.stop()
        await task
