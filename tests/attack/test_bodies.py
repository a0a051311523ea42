"""Large bodies never stop the event loop, whoever sends them: other streams go on."""

import asyncio
import gc
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import senders

import hostile_bodies
from api_process import served
from coserve import tiny
from coserve.serve.settings import ServerSettings
from coserve.serve.store.store import Store
from fake_engine import FakeEngine
from hostile_bodies import CHAT, JOB, TEXT, hostile, text
from serving import Play, World
from waiting import until

SHORT, LONG = 2_000_000, 7_900_000  # bytes
MOST_SECONDS = 0.2  # of the loop's own processor time between two looks, on whatever machine


@asynccontextmanager
async def watched() -> AsyncIterator[list[float]]:
    """The longest that the loop computed without letting others run, in seconds of its thread's time.

    Processor time and not the clock: a test's machine does other things too. Without that of garbage
    collections, which go through all that the tests before have left: 0.2 s after 5,000 of them.
    """
    worst, last, thread = [0.0], time.thread_time(), threading.get_ident()
    begun = 0.0

    async def watch() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            worst[0], last = max(worst[0], now - last), now

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal last, begun
        if threading.get_ident() == thread:
            begun, spent = time.thread_time(), time.thread_time() - begun
            last += spent if phase == "stop" else 0.0

    gc.callbacks.append(collected)
    task = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        gc.callbacks.remove(collected)
        task.cancel()


async def longest_stop(send: Callable[[], Awaitable[object]]) -> float:
    """The longest that the loop computes at once for what is sent, in seconds of its thread's time.

    A body that takes long is sent again, and the shortest of three counts: a virtual machine's processor time
    has in it what its host did meanwhile, but a costly body costs it each time.
    """
    shortest = math.inf
    for _ in range(3):
        async with watched() as worst:
            await send()
        shortest = min(shortest, worst[0])
        if shortest < MOST_SECONDS:
            break
    return shortest


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_no_body_stops_the_loop(play: Play, seed: int) -> None:
    draw = random.Random(seed)
    bodies = [hostile(draw, SHORT) for _ in range(3)]

    async def story(world: World) -> None:
        async def post(path: str, body: bytes) -> int:
            headers = {"content-type": "application/json"}
            return (await world.http.post(path, content=body, headers=headers)).status_code

        for path in (CHAT, TEXT, JOB):
            await post(path, b"{}")  # what is built with the first request

        async def send() -> None:
            statuses = await asyncio.gather(*(post(*body) for body in bodies))
            assert not [status for status in statuses if status >= 500], statuses

        assert await longest_stop(send) < MOST_SECONDS, [body[:80] for _, body in bodies]

    play(story, engine={"step_seconds": 0.01})


@pytest.mark.parametrize("seed", range(2))
def test_no_grader_and_no_eval_stops_the_loop(play: Play, seed: int) -> None:
    """Of twelve bodies each, all are answered, and other tenants' graders go on."""
    draw = random.Random(f"graders {seed}")
    kinds = (hostile_bodies._graders, hostile_bodies._evals)
    drawn = [draw.choice(kinds)(draw, 900_000) for _ in range(12)]
    # Written here: some are 100 MB, whose writing would take the loop's time. All beyond 1 MiB are refused.
    bodies = [(path, json.dumps(body).encode()[: 4 << 20]) for path, body in drawn]
    headers = {"content-type": "application/json"}

    async def story(world: World) -> None:
        world.say('{"result": 1}')
        for path in (hostile_bodies.GRADERS, hostile_bodies.EVALS):
            await world.http.post(path, json={})  # what is built with the first request
        async with watched() as worst:
            for path, body in bodies:
                answer = await world.http.post(path, content=body, headers=headers)
                assert answer.status_code < 500, (path, answer.text[:300])
        assert worst[0] < 2 * MOST_SECONDS, worst
        check = {"type": "string_check", "reference": "a"}
        asked = {"grader": check, "model_sample": "a"}
        found = (await world.http.post(hostile_bodies.GRADERS, json=asked)).json()
        assert found["reward"] == 1.0

    play(story)


def test_prompts_behind_one_that_is_too_long_are_not_tokenized(play: Play) -> None:
    async def story(world: World) -> None:
        encode, tokenized = world.state.text.encode, []

        def counted(prompt: str) -> tuple[int, ...]:
            tokenized.append(len(prompt))
            return encode(prompt)

        world.state.text.encode = counted  # type: ignore[method-assign]
        for first, most in (("a b " * 3_000, 1), ("a" * 300_000, 0)):
            answer = await world.http.post(TEXT, json=text(prompt=[first, *["a b c " * 300] * 127]))
            assert answer.status_code == 400 and "2048 tokens at most" in answer.text
            assert len(tokenized) == most
            tokenized.clear()
        answer = await world.http.post(TEXT, json=text(prompt=["a b c"] * 128, n=3))
        assert answer.status_code == 400 and not tokenized

    play(story)


@pytest.mark.slow
@pytest.mark.parametrize("has_key", [False, True])
def test_streams_go_on_while_large_bodies_come(tmp_path: Path, has_key: bool) -> None:
    """Ten at a time, from outside: prints the worst gap of another stream, with and without them in turn.

    COSERVE_BODIES says how many come in each of COSERVE_ROUNDS rounds.
    """
    settings = ServerSettings(model=str(tiny.path()), state=tmp_path, name="tiny")
    count, rounds = os.environ.get("COSERVE_BODIES", "40"), int(os.environ.get("COSERVE_ROUNDS", "4"))

    async def story() -> None:
        with Store(tmp_path) as store:
            key = (await store.tenants.create_key("ann"))[1]
            other = (await store.tenants.create_key("bob"))[1]
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        given = (host, str(port), count, str(LONG), other if has_key else "wrong")
        fake = FakeEngine(settings.socket, step_seconds=0.02)
        async with fake, served(settings, listener) as server, _senders(*given) as sending:
            await server.status()
            assert sending.stdin is not None and sending.stdout is not None
            await sending.stdout.readline()
            gaps: list[float] = []
            streaming = asyncio.create_task(_stream(server.url, key, gaps))
            await until(lambda: len(gaps) >= 20)
            quiet, attacked = list[float](), list[float]()
            for _ in range(rounds):
                gaps.clear()
                began = time.monotonic()
                sending.stdin.write(b"go\n")
                statuses = json.loads(await sending.stdout.readline())
                lasted = time.monotonic() - began
                attacked.append(max(gaps))
                assert not [status for status in statuses if status.startswith("5")]
                print(f"{lasted:.2f} s of bodies: worst gap {attacked[-1]:.3f} s, {statuses}")
                gaps.clear()
                await asyncio.sleep(max(lasted, 1.0))
                quiet.append(max(gaps))
                print(f"as long without: worst gap {quiet[-1]:.3f} s, load {os.getloadavg()[0]:.1f}")
            streaming.cancel()
            print(f"other streams' worst gap: {max(attacked):.3f} s; {max(quiet):.3f} s while no body came")
            assert max(attacked) <= max(0.2, 3 * max(quiet))

    asyncio.run(story())


@asynccontextmanager
async def _senders(*given: str) -> AsyncIterator[asyncio.subprocess.Process]:
    folder = str(Path(hostile_bodies.__file__).parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable, senders.__file__, *given, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _stream(url: str, key: str, gaps: list[float]) -> None:
    """Streams one answer after the other, noting how long each event took to come after the one before."""
    body = text(stream=True, max_tokens=2000)
    async with httpx2.AsyncClient(
        base_url=url, timeout=90, headers={"Authorization": f"Bearer {key}"}
    ) as http:
        while True:
            last = time.monotonic()
            async with http.stream("POST", TEXT, json=body) as answer:
                async for _ in answer.aiter_raw():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now
