"""The official `tinker` client, unmodified, against a server in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import tinker

from serving import World, listening

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
