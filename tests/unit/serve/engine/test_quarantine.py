"""Things that crash engines, on a real link: others go on, and they are tried no more than a few times."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from coserve.core.request import Request, SamplingParams
from coserve.errors import EngineLost, Quarantined, RequestError
from coserve.serve.engine.link import EngineLink
from coserve.serve.engine.probation import QuarantineVerdict
from coserve.wire.messages import AddAdapter, CheckJob, CheckMethod, Command, JobSpec
from fake_engine import FakeEngine, expected
from waiting import until

POISON = 13  # a token that the engine dies of


def play(folder: Path, story: Any, **engine: Any) -> tuple[FakeEngine, list[QuarantineVerdict]]:
    fake = FakeEngine(folder / "engine.sock")
    fake.step_seconds = 0.001
    for name, value in engine.items():
        setattr(fake, name, value)
    guilty: list[QuarantineVerdict] = []

    async def note(found: QuarantineVerdict) -> None:
        guilty.append(found)

    async def run() -> None:
        async with asyncio.timeout(60), fake:
            link = EngineLink(fake.socket)
            link.news.on_guilty = note
            task = asyncio.create_task(link.run())
            try:
                await story(fake, link)
                await link.news.settled()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return fake, guilty


def request(name: str, *prompt: int, most: int = 30, **fields: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=most, seed=hash(name) % 1000), **fields)


async def answer(link: EngineLink, wanted: Request, **folders: Path) -> list[int | None]:
    """The answer; `folders` are those of adapters."""
    return [token.token async for token in link.generate(wanted, folders)]


def is_poison(command: Command) -> bool:
    return isinstance(command, Request) and POISON in command.prompt


@pytest.mark.parametrize("place", [0, 7])
def test_a_request_that_crashes_engines_fails_and_others_end_as_they_would_have(
    place: int, tmp_path: Path
) -> None:
    others = [request(f"r{i}", 5, i) for i in range(12) if i != POISON]

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        running = [asyncio.create_task(answer(link, one)) for one in others]
        await asyncio.sleep(0.005)
        with pytest.raises(Quarantined, match=r"worked on this request \(exit status 1\): it is quarantined"):
            await answer(link, request("bad", POISON))
        assert [await one for one in running] == [expected(fake, one) for one in others]
        before = fake.collapses
        with pytest.raises(Quarantined):  # whatever its id and seed
            await answer(link, request("bad again", POISON))
        assert fake.collapses == before
        assert await answer(link, request("later", 6)) == expected(fake, request("later", 6))

    fake, guilty = play(tmp_path, story, fatal=lambda asked, at: POISON in asked.prompt and at == place)
    assert 2 <= fake.collapses <= 4
    assert [(g.item.kind, g.item.id) for g in guilty] == [("request", "bad")]
    assert guilty[0].request is not None and guilty[0].request.prompt == (POISON,)


def test_many_bad_ones_among_many(tmp_path: Path) -> None:
    draws = random.Random(7)
    bad = [request(f"bad{i}", POISON, i) for i in range(4)]
    good = [request(f"good{i}", 5, 50 + i, most=draws.randrange(2, 40)) for i in range(20)]

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async def come(one: Request) -> Any:
            await asyncio.sleep(draws.random() * 0.1)
            return await answer(link, one)

        mixed = [*bad, *good]
        draws.shuffle(mixed)
        came = await asyncio.gather(*map(come, mixed), return_exceptions=True)
        for one, found in zip(mixed, came, strict=True):
            if one in bad:
                assert isinstance(found, Quarantined)
            else:
                assert found == expected(fake, one), one.id

    fake, guilty = play(tmp_path, story, poison=is_poison)
    assert {g.item.id for g in guilty} == {one.id for one in bad}
    assert fake.collapses <= 4 * len(bad)


def test_an_adapter_and_checks_that_crash_engines(tmp_path: Path) -> None:
    def is_bad(command: Command) -> bool:
        return isinstance(command, CheckMethod | CheckJob) or (
            isinstance(command, AddAdapter) and command.key == "bad"
        )

    other = request("r", 5, most=200)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        running = asyncio.create_task(answer(link, other))
        await asyncio.sleep(0.01)
        with pytest.raises(Quarantined, match="this adapter"):
            await link.load("bad", tmp_path)
        with pytest.raises(Quarantined, match="this check"):
            await link.check({})
        with pytest.raises(Quarantined, match="this check"):
            await link.check(JobSpec("j", "data.jsonl", str(tmp_path)))
        await link.load("good", tmp_path)
        assert await running == expected(fake, other)

    fake, guilty = play(tmp_path, story, poison=is_bad)
    assert [g.item.kind for g in guilty] == ["adapter", "check", "check"]
    assert fake.collapses <= 9


def test_an_adapter_of_which_requests_are_guilty_is_guilty_itself(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        for number in range(2):
            with pytest.raises(Quarantined):
                await answer(link, request(f"r{number}", number, adapter="bad"), bad=tmp_path)
        before = fake.collapses
        with pytest.raises(Quarantined, match="requests for this adapter"):
            await answer(link, request("r9", 9, adapter="bad"), bad=tmp_path)
        assert fake.collapses == before

    _, guilty = play(tmp_path, story, fatal=lambda asked, at: asked.adapter == "bad")
    assert [g.item.kind for g in guilty] == ["request", "request", "adapter"]


def test_who_is_killed_from_outside_blames_nobody(tmp_path: Path) -> None:
    wanted = request("r", 5, most=60)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        running = asyncio.create_task(answer(link, wanted))
        for _ in range(8):
            await asyncio.sleep(0.01)
            await fake.die()
            await fake.start()
            await link.wait_ready(5)
        assert await running == expected(fake, wanted)
        assert not link.probation.suspects

    assert play(tmp_path, story)[1] == []


def test_who_left_is_not_tried_again(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        loading = asyncio.create_task(link.load("bad", tmp_path))
        asking = asyncio.create_task(answer(link, request("bad", POISON)))
        await until(lambda: fake.collapses)
        loading.cancel()
        asking.cancel()
        await asyncio.gather(loading, asking, return_exceptions=True)
        await link.wait_ready(5)
        before = fake.collapses
        assert len(await answer(link, request("good", 5))) == 30
        assert fake.collapses <= before + 1

    play(tmp_path, story, poison=lambda c: is_poison(c) or isinstance(c, AddAdapter))


def test_what_no_message_can_hold_is_refused_and_others_are_sent(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        await link.wait_ready(5)
        good = asyncio.create_task(answer(link, request("good", 5)))
        for value in (10**400, "\ud800", object()):
            with pytest.raises(RequestError, match="nothing here can be"):
                await link.check({"lora_alpha": value})
        assert len(await good) == 30

    try:
        play(tmp_path, story)
    except EngineLost as error:
        raise AssertionError from error
