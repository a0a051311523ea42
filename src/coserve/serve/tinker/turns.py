"""Requests of one training run in the order of their numbers, whatever the order in which they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from coserve.serve.errors import ApiError
from coserve.serve.tinker.futures import Withdrawn

GAP_SECONDS: Final = 300.0  # seconds that a request waits for earlier ones: clients repeat theirs for as long
MOST_WAITING: Final = 256


class Turns:
    """Turns by number, from `first`. For one event loop."""

    def __init__(self, first: int = 1, gap_seconds: float = GAP_SECONDS) -> None:
        self.next, self._gap_seconds = first, gap_seconds
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._refused: set[int] = set()  # numbers from `next` on that no request has
        self._is_closed = False

    def check(self, number: int) -> None:
        """Raises ApiError 400 for a number whose turn is over, or too far ahead."""
        if number < self.next or number in self._waiting or number in self._refused:
            raise ApiError(400, f"seq_id {number} was used by an earlier request.", param="seq_id")
        if number >= self.next + MOST_WAITING:
            message = f"seq_id {number} is too far ahead: the next one is {self.next}."
            raise ApiError(400, message, param="seq_id")

    def skip(self, number: int) -> None:
        """Has a number's turn be over once it comes, for a request that was refused. Does nothing for a
        number whose turn is over, which another request waits with, or which is too far ahead."""
        if self.next <= number < self.next + MOST_WAITING and number not in self._waiting:
            self._refused.add(number)
            self._go_to(self.next)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Context of a number's turn, which is over with its end, also where that raises.

        Raises ApiError 400 where a number before it does not come in time; so do all that wait then. Raises
        Withdrawn once the turns are closed.
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
            if self._is_closed:
                raise Withdrawn
            if not waiter.result():
                raise self._missing(number)
        try:
            yield
        finally:
            self._go_to(number + 1)

    def close(self) -> None:
        """Has nobody wait any more: the run goes on elsewhere."""
        self._is_closed = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(False)

    def missing(self) -> str:
        """The number that requests wait for."""
        return str(self.next)

    def _go_to(self, number: int) -> None:
        """Continues with this number, or the next one after it that was not refused."""
        while number in self._refused:
            number += 1
        self.next = number
        self._refused = {refused for refused in self._refused if refused > number}
        waiter = self._waiting.get(self.next)
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def _give_up(self) -> None:
        """Fails all requests that wait, and continues after the last of them."""
        last = max((self.next - 1, *self._waiting))
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(False)
        self._go_to(last + 1)

    def _missing(self, number: int) -> ApiError:
        message = f"The request with seq_id {number} waited {self._gap_seconds:g} s for an earlier one."
        return ApiError(400, message, param="seq_id", code="seq_id_gap")
