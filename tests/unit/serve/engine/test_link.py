import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from coserve.core.plan import TokenLogprobs
from coserve.core.request import FinishReason, Request, SamplingParams
from coserve.errors import AdapterMismatch, AdapterNotFound, EngineLost, StateError
from coserve.serve.engine import news
from coserve.serve.engine.link import MOST_LIVES, EngineLink
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    Cancel,
    Drain,
    Fault,
    Hello,
    JobEnded,
    Numbered,
    RemoveAdapter,
    StopJob,
    Token,
)
from coserve.wire.scores import Scores
from fake_engine import FakeEngine, expected
from waiting import until

Story = Callable[[FakeEngine, EngineLink], Coroutine[Any, Any, None]]


def play(folder: Path, story: Story, patience: float = 5.0, **engine: Any) -> FakeEngine:
    """Runs a story with an engine and a link to it, within ten seconds."""
    fake = FakeEngine(folder / "engine.sock", **engine)

    async def run() -> None:
        async with asyncio.timeout(60), fake:
            link = EngineLink(fake.socket, patience)
            task = asyncio.create_task(link.run())
            try:
                await story(fake, link)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return fake


def request(name: str = "r", most: int = 8, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=most, seed=3)
    return Request(name, (5, 6, 7), sampling, arrival=time.monotonic(), **fields)


async def answer(link: EngineLink, wanted: Request, folder: Path | None = None) -> list[Token]:
    """The answer of an adapter in `folder`, if there is one."""
    folders = {wanted.adapter: folder} if wanted.adapter is not None and folder is not None else {}
    return [token async for token in link.generate(wanted, folders)]


def said(fake: FakeEngine, kind: type) -> list[Any]:
    return [command for command in fake.said if isinstance(command, kind)]


def test_answers_come_whole_and_in_order(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        wanted = [request(f"r{i}", most=5 + i) for i in range(10)]
        answers = await asyncio.gather(*(answer(link, one) for one in wanted))
        for one, tokens in zip(wanted, answers, strict=True):
            assert [token.token for token in tokens] == expected(fake, one)
            assert [token.finish for token in tokens[:-1]] == [None] * (len(tokens) - 1)
            assert tokens[-1].finish is FinishReason.LENGTH
        assert not link.live and link.stats is not None

    fake = play(tmp_path, story)
    assert not said(fake, Cancel)


def test_an_engine_that_dies_loses_and_repeats_nothing(tmp_path: Path) -> None:
    wanted = [request(f"r{i}", most=40) for i in range(6)]

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        tasks = [asyncio.create_task(answer(link, one)) for one in wanted]
        for death in range(1, 4):
            await until(lambda death=death: fake.steps >= 10 * death)  # type: ignore[misc]
            await fake.die()
            await until(lambda: not link.ready)
            await fake.start()
        answers = await asyncio.gather(*tasks)
        assert link.connections == 4
        for one, tokens in zip(wanted, answers, strict=True):
            assert [token.token for token in tokens] == expected(fake, one)

    fake = play(tmp_path, story, step_seconds=0.001)
    again = [command for command in said(fake, Request) if command.continued]
    assert again and all(-60 < command.arrival < 0 for command in again)
    assert all(command.continued == tuple(expected(fake, wanted[0]))[: len(command.continued)]
               for command in again if command.id == "r0")  # fmt: skip


def test_what_has_ended_is_not_asked_for_again(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async with aclosing(link.generate(request(most=3))) as tokens:
            await anext(tokens)
            await until(lambda: fake.steps >= 3 and not fake.running)
            await until(lambda: not link.live)
            await fake.die()
            await fake.start()
            await until(lambda: link.connections == 2)
            assert [token.token async for token in tokens] == expected(fake, request(most=3))[1:]

    assert len(said(play(tmp_path, story), Request)) == 1


def test_prompt_scores_come_once(tmp_path: Path) -> None:
    wanted = Request("r", tuple(range(20)), SamplingParams(max_tokens=6, seed=1, prompt_logprobs=0))

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async with aclosing(link.generate(wanted)) as tokens:
            first = await anext(tokens)
            await fake.die()
            await fake.start()
            rest = [token async for token in tokens]
        assert len(first.prompt_logprobs) == 19
        assert sum(len(token.prompt_logprobs) for token in rest) == 0
        assert said(fake, Request)[-1].sampling.prompt_logprobs is None  # nor are they computed again

    play(tmp_path, story, step_seconds=0.005)


def test_prompt_scores_that_an_engine_died_among_come_once(tmp_path: Path) -> None:
    wanted = Request("r", tuple(range(20)), SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0))

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async with aclosing(link.generate(wanted)) as tokens:
            first = asyncio.ensure_future(anext(tokens))
            await until(lambda: bool(fake.running))
            fake.step_seconds = 0.0  # of the next engine
            fake.tell_tokens(Token("r", prompt_logprobs=Scores.of((TokenLogprobs(-1.0),) * 5)))
            assert len((await first).prompt_logprobs) == 5
            await fake.die()
            await fake.start()
            rest = [token async for token in tokens]
        assert [len(token.prompt_logprobs) for token in rest] == [14, 0]

    play(tmp_path, story, step_seconds=3.0)


def test_closing_an_answer_cancels_it_within_a_step(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async with aclosing(link.generate(request(most=1000))) as tokens:
            for _ in range(3):
                await anext(tokens)
        steps = fake.steps
        await until(lambda: not fake.running)
        assert fake.steps <= steps + 1 and not link.live

    assert said(play(tmp_path, story, step_seconds=0.01), Cancel) == [Cancel("r")]


def test_adapters_are_loaded_on_first_use_of_each_engine(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        wanted = [request(f"r{i}", adapter="a") for i in range(3)]
        await asyncio.gather(*(answer(link, one, tmp_path / "a") for one in wanted))
        assert len(said(fake, AddAdapter)) == 1
        await fake.die()
        await until(lambda: not link.ready)
        await fake.start()
        await answer(link, wanted[0], tmp_path / "a")
        assert len(said(fake, AddAdapter)) == 2 and fake.adapters == {"a": str(tmp_path / "a")}

    play(tmp_path, story)


def test_an_adapter_that_an_engine_refuses_is_refused_by_name(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        fake.refusals["a"] = Fault("AdapterMismatch", "it does not fit")
        with pytest.raises(AdapterMismatch, match="does not fit"):
            await answer(link, request(adapter="a"), tmp_path)
        with pytest.raises(AdapterMismatch):
            await link.load("a", tmp_path)
        fake.refusals.clear()
        await link.load("a", tmp_path)  # mended
        await link.unload("a")
        await link.unload("a")
        assert len(said(fake, RemoveAdapter)) == 1 and not link.live

    play(tmp_path, story)


def test_a_request_that_is_refused_raises_what_the_engine_named(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        await link.load("a", tmp_path)
        fake.adapters.clear()  # it forgot, against its promise
        with pytest.raises(AdapterNotFound):
            await answer(link, request(adapter="a"), tmp_path)

    play(tmp_path, story)


def test_a_load_outlives_the_engine_it_was_asked_of(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        await link.wait_ready(1)
        loading = asyncio.create_task(link.load("a", tmp_path))
        await until(lambda: bool(said(fake, AddAdapter)))
        await fake.die()
        await asyncio.sleep(0.02)
        assert not loading.done()
        fake.step_seconds = 0.0
        await fake.start()
        await loading
        assert fake.adapters == {"a": str(tmp_path)}

    play(tmp_path, story, step_seconds=3.0)


def test_requests_wait_for_an_engine_but_not_for_ever(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        await link.wait_ready(1)
        await fake.die()
        with pytest.raises(EngineLost, match="did not come back"):
            await answer(link, request())
        with pytest.raises(EngineLost):
            await link.wait_ready(0.01)
        await fake.start()
        assert len(await answer(link, request())) == 8

    play(tmp_path, story, patience=0.1)


def test_a_request_that_engines_die_of_is_given_up(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        task = asyncio.create_task(answer(link, request()))
        for death in range(MOST_LIVES):
            await until(lambda death=death: len(said(fake, Request)) == death + 1)  # type: ignore[misc]
            fake.disconnect()
        with pytest.raises(EngineLost, match="died under this request"):
            await task

    play(tmp_path, story, step_seconds=30.0)


def test_news_are_told_in_order_once_and_acknowledged(tmp_path: Path) -> None:
    told: list[tuple[str, object]] = []

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async def on_news(numbered: Numbered) -> None:
            await asyncio.sleep(0.001)
            told.append(("news", numbered.number))

        async def on_connect(hello: Hello) -> None:
            told.append(("hello", hello.generation))

        link.news.on_news = on_news
        link.news.on_connect.append(on_connect)
        await link.wait_ready(1)
        for number in range(1, 6):
            fake.tell(Numbered(number, JobEnded("job", "succeeded", number)))
        await until(lambda: not fake.news)
        fake.tell(Numbered(6, JobEnded("job", "succeeded", 6)))
        fake.disconnect()  # before it is acknowledged: told again on the next connection
        await until(lambda: link.connections == 2)
        await until(lambda: not fake.news)
        await fake.die()
        await fake.start()
        await until(lambda: link.connections == 3)
        fake.tell(Numbered(1, JobEnded("job", "failed", 1)))
        await until(lambda: not fake.news)

    fake = play(tmp_path, story)
    assert told[:6] == [("hello", "generation-1"), *[("news", number) for number in range(1, 6)]]
    assert set(told[6:8]) == {("hello", "generation-1"), ("news", 6)}
    assert told[8:] == [("hello", "generation-2"), ("news", 1)]
    assert said(fake, Acknowledge)[-1] == Acknowledge(1)


def test_commands_without_an_engine_are_dropped(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        link.send(StopJob("early", keep=True))
        await link.wait_ready(1)
        link.send(StopJob("late", keep=True))
        await until(lambda: bool(said(fake, StopJob)))

    assert said(play(tmp_path, story), StopJob) == [StopJob("late", keep=True)]


def test_news_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told again until they are written down; answers go on meanwhile."""
    monkeypatch.setattr(news, "WRITE_SECONDS", 0.01)
    attempts: list[int] = []

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async def on_news(numbered: Numbered) -> None:
            attempts.append(numbered.number)
            if len(attempts) < 4:
                raise StateError("the disk is full")

        link.news.on_news = on_news
        await link.wait_ready(1)
        for number in (1, 2):
            fake.tell(Numbered(number, JobEnded("job", "succeeded", number)))
        await until(lambda: len(attempts) == 2)
        assert len(await answer(link, request())) == 8
        assert not said(fake, Acknowledge)
        await until(lambda: not fake.news)

    fake = play(tmp_path, story)
    assert attempts == [1, 1, 1, 1, 2]
    assert [command.number for command in said(fake, Acknowledge)] == [1, 2]


def test_refusing_ends_answers_and_frees_the_engine(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        task = asyncio.create_task(answer(link, request(most=10_000)))
        await until(lambda: fake.steps > 3)
        link.refuse(EngineLost("no more"))
        for ended in (task, answer(link, request("late"))):
            with pytest.raises(EngineLost, match="no more"):
                await ended
        await until(lambda: not fake.running)
        assert not link.live

    fake = play(tmp_path, story, step_seconds=0.001)
    assert [command.id for command in said(fake, Cancel)] == ["r"]
    assert [command.id for command in said(fake, Request)] == ["r"]


def test_a_drain_is_over_when_the_engine_has_nothing_more_to_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        async def on_news(numbered: Numbered) -> None:
            await asyncio.sleep(0.02)
            told.append(numbered.number)

        link.news.on_news = on_news
        await link.wait_ready(1)
        fake.tell(Numbered(1, JobEnded("job", "paused", 1)))
        await link.drain(1.0)
        assert said(fake, Drain) and told == [1]
        await fake.die()
        await until(lambda: not link.ready)
        await asyncio.wait_for(link.drain(0.01), 1)  # there is none that could be waited for

    play(tmp_path, story)
    assert "was lost" not in caplog.text  # it ended as it should


def test_a_drain_ends_with_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        await link.wait_ready(1)
        draining = asyncio.create_task(link.drain(1.0))
        await until(lambda: bool(said(fake, Drain)))
        assert not draining.done()
        await fake.die()
        await asyncio.wait_for(draining, 1)

    play(tmp_path, story, step_seconds=30.0)
    assert "the connection to the engine was lost: the engine closed it" in caplog.text
