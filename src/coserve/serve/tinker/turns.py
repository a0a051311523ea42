"""Requests of one training run in the order of their numbers, whatever the order in which they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from coserve.serve.errors import ApiError

GAP_SECONDS: Final = 300.0  # seconds that a request waits for earlier ones: clients repeat theirs for as long
MOST_WAITING: Final = 256


class Turns:
    """Turns by number, from `first`. For one event loop."""

    def __init__(self, first: int = 1, gap_seconds: float = GAP_SECONDS) -> None:
        self.next, self._gap_seconds = first, gap_seconds
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def check(self, number: int) -> None:
        """Raises ApiError 400 for a number whose turn is over, or too far ahead."""
        if number < self.next or number in self._waiting:
            raise ApiError(400, f"seq_id {number} was used by an earlier request.", param="seq_id")
        if number >= self.next + MOST_WAITING:
            message = f"seq_id {number} is too far ahead: the next one is {self.next}."
            raise ApiError(400, message, param="seq_id")

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Context of a number's turn, which is over with its end, also where that raises.

        Raises ApiError 400 where a number before it does not come in time; so do all that wait then.
        """
        self.check(number)
        if number != self.next:
            waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(waiter, self._gap_seconds)
            except TimeoutError:
                self._give_up()
                raise self._missing(number) from None
            finally:
                self._waiting.pop(number, None)
            if not waiter.result():
                raise self._missing(number)
        try:
            yield
        finally:
            self.next = number + 1
            self._wake()

    def missing(self) -> str:
        """The number that requests wait for."""
        return str(self.next)

    def _wake(self) -> None:
        waiter = self._waiting.get(self.next)
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def _give_up(self) -> None:
        """Fails all requests that wait, and continues after the last of them."""
        self.next = max((self.next - 1, *self._waiting)) + 1
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(False)

    def _missing(self, number: int) -> ApiError:
        message = f"The request with seq_id {number} waited {self._gap_seconds:g} s for an earlier one."
        return ApiError(400, message, param="seq_id", code="seq_id_gap")
