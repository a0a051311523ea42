"""Passes connections of engines, their job events and quarantine verdicts on to listeners."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coserve.errors import StateError
from coserve.serve.engine.probation import QuarantineVerdict
from coserve.wire.messages import Hello, Numbered

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0  # seconds between two attempts to store an event


class EngineNews:
    """Calls listeners, one after the other, in the order of the events: `on_connect` for each new connection,
    `on_guilty` for each verdict, and `on_news` once for each job event. An event is acknowledged, by its
    generation and number, when `on_news` has returned.

    A listener that raises StateError is called again every second until it does not: while the disk is full,
    answers go on and events wait.
    """

    def __init__(self, acknowledge: Callable[[str, int], None]) -> None:
        self.on_connect: list[Callable[[Hello], Awaitable[None]]] = []
        self.on_guilty: Callable[[QuarantineVerdict], Awaitable[None]] | None = None
        self.on_news: Callable[[Numbered], Awaitable[None]] | None = None
        self._acknowledge = acknowledge
        self._told: asyncio.Queue[Hello | QuarantineVerdict | tuple[str, Numbered]] = asyncio.Queue()
        self._seen = ("", 0)  # generation and number of the newest event that was passed on

    def tell(self, told: Hello | QuarantineVerdict | tuple[str, Numbered]) -> None:
        """Queues a connection, a verdict, or an engine's generation with its job events."""
        self._told.put_nowait(told)

    async def settled(self) -> None:
        """Returns when everything queued so far has been passed to the listeners."""
        await self._told.join()

    async def run(self) -> None:
        """Passes events on until cancelled."""
        while True:
            told = await self._told.get()
            while not await self._hand_on(told):
                await asyncio.sleep(WRITE_SECONDS)
            self._told.task_done()

    async def _hand_on(self, told: Hello | QuarantineVerdict | tuple[str, Numbered]) -> bool:
        """Tells whether the listeners have taken an event, and need not be called again."""
        try:
            if isinstance(told, Hello):
                for callback in self.on_connect:
                    await callback(told)
            elif isinstance(told, QuarantineVerdict):
                if self.on_guilty is not None:
                    await self.on_guilty(told)
            else:
                await self._tell_news(*told)
        except StateError as error:
            log.error("what the engine told waits to be written down: %s", error)
            return False
        return True

    async def _tell_news(self, generation: str, numbered: Numbered) -> None:
        seen = self._seen[1] if self._seen[0] == generation else 0
        if numbered.number > seen and self.on_news is not None:
            await self.on_news(numbered)
            self._seen = generation, numbered.number
        self._acknowledge(generation, numbered.number)
