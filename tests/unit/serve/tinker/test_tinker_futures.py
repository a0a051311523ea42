"""Futures are bounded in number, bytes and age, one for a request, and tell errors as the client knows
them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from coserve.errors import EngineLost, RequestError
from coserve.serve.errors import ApiError
from coserve.serve.tinker.futures import Failure, FutureLimits, Futures, Payload, TinkerFuture

Work = Callable[[TinkerFuture], Coroutine[Any, Any, Payload]]


def saying(text: str) -> Work:
    async def work(future: TinkerFuture) -> Payload:
        return Payload(text.encode())

    return work


async def never(future: TinkerFuture) -> Payload:
    await asyncio.Event().wait()
    raise AssertionError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_is_one_future() -> None:
    async def story() -> None:
        futures = Futures()
        first = futures.begin("t", "a:1", "Sample", saying("x"))
        assert futures.begin("t", "a:1", "Sample", saying("y")) is first
        assert await futures.wait(first, 1.0) == Payload(b"x")
        with pytest.raises(ApiError, match="kind Sample already"):
            futures.begin("t", "a:1", "OptimStep", never)
        assert futures.find("other", "a:1") is None

    asyncio.run(story())


def test_results_are_kept_for_a_while_and_read_ones_for_less() -> None:
    async def story() -> None:
        clock = Clock()
        futures = Futures(FutureLimits(seconds=100.0, seconds_read=10.0), clock)
        read, unread = (futures.begin("t", name, "Sample", saying("x")) for name in ("read", "unread"))
        await futures.wait(read, 1.0)
        await unread.done.wait()
        clock.now = 9.0
        assert futures.find("t", "read") is read
        clock.now = 11.0
        assert futures.find("t", "read") is None and futures.find("t", "unread") is unread
        clock.now = 101.0
        assert futures.find("t", "unread") is None

    asyncio.run(story())


def test_bytes_and_numbers_are_bounded_for_each_tenant_and_for_all() -> None:
    async def story() -> None:
        clock = Clock()
        limits = FutureLimits(most_tenant=3, bytes_tenant=10_000, bytes_all=16_000)
        futures = Futures(limits, clock)

        async def end(tenant: str, name: str, size: int) -> None:
            clock.now += 1.0
            await futures.begin(tenant, name, "Sample", saying("x" * size)).done.wait()

        await end("t", "1", 3_500)
        await end("t", "2", 3_500)
        await end("t", "3", 3_500)  # no room for all three
        assert [futures.find("t", name) is None for name in "123"] == [True, False, False]
        await end("u", "1", 8_000)  # nor for these beside the other tenant's
        assert futures.find("t", "2") is None and futures.find("u", "1") is not None
        pending = [futures.begin("t", f"p{i}", "Sample", never) for i in range(3)]
        with pytest.raises(ApiError) as refused:
            futures.begin("t", "p3", "Sample", never)
        assert refused.value.status == 429
        futures.cancel(pending[0], "left")
        assert await futures.wait(pending[0], 1.0) == Failure("left", "user")
        assert futures.begin("t", "p3", "Sample", saying("x"))
        await futures.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "category"),
    [(RequestError("wrong"), "user"), (ApiError(400, "wrong"), "user"), (EngineLost("wrong"), "server")],
)
def test_errors_are_the_client_s_or_the_server_s(error: Exception, category: str) -> None:
    async def story() -> None:
        async def work(future: TinkerFuture) -> Payload:
            raise error

        futures = Futures()
        outcome = await futures.wait(futures.begin("t", "a", "Sample", work), 1.0)
        assert outcome == Failure("wrong", category)  # type: ignore[arg-type]

    asyncio.run(story())


def test_a_bug_says_nothing_of_itself() -> None:
    async def story() -> None:
        async def work(future: TinkerFuture) -> Payload:
            raise ZeroDivisionError("secret")

        futures = Futures()
        outcome = await futures.wait(futures.begin("t", "a", "Sample", work), 1.0)
        assert (
            isinstance(outcome, Failure) and outcome.category == "server" and "secret" not in outcome.message
        )

    asyncio.run(story())


def test_who_waits_in_vain_may_ask_again() -> None:
    async def story() -> None:
        futures = Futures()
        future = futures.begin("t", "a", "Sample", never)
        assert await futures.wait(future, 0.01) is None
        assert futures.find("t", "a") is future
        await futures.close()

    asyncio.run(story())
