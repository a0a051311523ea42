"""coserve behind Ray Serve: each replica is a server, and multiplexing knows who has which adapter.

    serve run deploy.ray_serve:application model=/models/base state=/var/coserve artifacts=s3://bucket/prefix

Clients send their adapter's name as the header `serve_multiplexed_model_id`, too. Ray then prefers a replica
that has it, and takes another where that one is busy.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

START_SECONDS = 600.0
MOST_ADAPTERS = 64  # that Ray counts as being at one replica; the engine itself may hold more or fewer
_HOPS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_LISTENS = re.compile(r"https?://\S+?:\d+")


@serve.deployment(max_ongoing_requests=64, health_check_period_s=2, graceful_shutdown_timeout_s=90)
class Replica:
    """A server as a child process, and the way to it."""

    def __init__(self, model: str, state: str, *flags: str) -> None:
        self._folder = Path(state) / serve.get_replica_context().replica_id.unique_id
        self._command = ["coserve", "serve", model, "--port", "0", "--state", str(self._folder), *flags]
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._client: httpx.AsyncClient | None = None

    async def _server(self) -> httpx.AsyncClient:
        async with self._starting:
            if self._client is None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdout=pipe, stderr=asyncio.subprocess.STDOUT
                )
                async with asyncio.timeout(START_SECONDS):
                    url = await self._listens(self._process)
                self._client = httpx.AsyncClient(base_url=url, timeout=None)
            return self._client

    async def _listens(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async for line in process.stdout:
            if found := _LISTENS.search(line.decode(errors="replace")):
                self._reading = asyncio.create_task(_drained(process.stdout))
                return found[0]
        raise RuntimeError(f"{' '.join(self._command)} ended with status {await process.wait()}")

    async def check_health(self) -> None:
        """Raises where the server's process has ended: Ray starts another replica."""
        if self._process is not None and self._process.returncode is not None:
            raise RuntimeError(f"the server ended with status {self._process.returncode}")

    @serve.multiplexed(max_num_models_per_replica=MOST_ADAPTERS)
    async def adapter(self, name: str) -> str:
        """Notes that this replica has an adapter: its first request here has the engine load it."""
        return name

    async def __call__(self, request: Request) -> StreamingResponse:
        """Passes a request on, and its answer back as it comes."""
        if name := serve.get_multiplexed_model_id():
            await self.adapter(name)
        server = await self._server()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOPS}
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = server.build_request(request.method, target, headers=headers, content=request.stream())
        answer = await server.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        told = {key: value for key, value in answer.headers.items() if key.lower() not in _HOPS}
        return StreamingResponse(body(), answer.status_code, told)

    async def __del__(self) -> None:
        """Drains: SIGTERM lets answers end and jobs write checkpoints."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def _drained(output: Any) -> None:
    async for _ in output:
        pass


def application(arguments: dict[str, str]) -> serve.Application:
    """Ray Serve's application. `arguments` are model, state, replicas, and further flags of the server."""
    given = dict(arguments)
    model, state = given.pop("model"), given.pop("state", os.path.abspath("coserve-state"))
    replicas = int(given.pop("replicas", "2"))
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    return Replica.options(num_replicas=replicas).bind(model, state, *flags)
