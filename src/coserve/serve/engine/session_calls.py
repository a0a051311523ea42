"""Commands to training sessions, over the connection to the engine."""

import asyncio
from collections.abc import Callable, Iterator

from msgspec import structs

from coserve.errors import EngineLost
from coserve.serve.engine.connection import EngineConnection
from coserve.wire.messages import Reply, SessionCommand


class SessionCalls:
    """Sends a session's commands, in the order of calls. `current` returns the connection, if there is one;
    `refs` numbers its commands."""

    def __init__(self, current: Callable[[], EngineConnection | None], refs: Iterator[int]) -> None:
        self._current, self._refs = current, refs

    def __call__(self, command: SessionCommand) -> "asyncio.Future[Reply]":
        """Sends a command; its `ref` is set here. The future has the reply. It raises the engine's error, or
        EngineLost where the engine dies: its sessions with it. Raises EngineLost where there is none, and
        RequestError for a command that cannot be encoded."""
        connection = self._current()
        if connection is None:
            raise EngineLost("the engine is not there, and no training session either")
        found: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def replied(asked: "asyncio.Future[Reply]") -> None:
            if found.done():  # nobody waits any more
                return
            error = asked.exception()
            if error is None:
                found.set_result(asked.result())
            else:
                lost = EngineLost("the engine died, and its training sessions with it")
                found.set_exception(lost if isinstance(error, ConnectionError) else error)
                found.exception()  # read here, for nobody may be waiting

        connection.ask(structs.replace(command, ref=next(self._refs))).add_done_callback(replied)
        return found
