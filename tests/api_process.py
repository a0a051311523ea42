"""The API's process as its supervisor starts it."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from coserve.serve.settings import ApiStart, ServerSettings
from coserve.wire.control import encode_line
from forking import forked


class Server:
    """One API process, the socket it was given, and its lines."""

    def __init__(self, process: asyncio.subprocess.Process, listener: socket.socket) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def status(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            status = dict(json.loads(line))
            if status["state"] != "alive":
                return status
        return {}


@asynccontextmanager
async def served(settings: ServerSettings, listener: socket.socket) -> AsyncIterator[Server]:
    with forked():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coserve.wire.launch", "coserve.serve.main",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(listener.fileno(),),
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(encode_line(ApiStart(settings, listener.fileno())).encode() + b"\n")
    try:
        yield Server(process, listener)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
