"""Training sessions across the deaths of engines: what each engine is told, and who is guilty."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from coserve.core.request import Request, SamplingParams
from coserve.core.training import Datum
from coserve.errors import EngineLost, JobError, Quarantined, RequestError
from coserve.serve.engine import journal, live_sessions
from coserve.serve.engine.link import EngineLink
from coserve.serve.engine.live_sessions import MOST_LIVES, LiveSession, pass_key
from coserve.serve.engine.probation import QuarantineVerdict
from coserve.wire.messages import (
    CloseTraining,
    Command,
    Fault,
    Forward,
    LoadTraining,
    OpenTraining,
    SaveTraining,
    SessionCommand,
    StepOptimizer,
)
from fake_engine import FakeEngine
from waiting import until

POISON = 13  # a token that the engine dies of
Story = Callable[[FakeEngine, EngineLink], Coroutine[Any, Any, None]]


def play(folder: Path, story: Story, **engine: Any) -> tuple[FakeEngine, list[QuarantineVerdict]]:
    fake = FakeEngine(folder / "engine.sock", step_seconds=0.001)
    for name, value in engine.items():
        setattr(fake, name, value)
    guilty: list[QuarantineVerdict] = []

    async def note(found: QuarantineVerdict) -> None:
        guilty.append(found)

    async def run() -> None:
        async with asyncio.timeout(60), fake:
            link = EngineLink(fake.socket, 5.0)
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


def opened(link: EngineLink, folder: Path, name: str = "s") -> LiveSession:
    return link.sessions.open(OpenTraining(0, name, name), folder / f"spare-{name}")


def passing(token: int = 5, name: str = "s", backward: bool = True) -> Forward:
    return Forward(0, name, (Datum((token, 6), (6, 7)),), backward=backward)


def step(name: str = "s") -> StepOptimizer:
    return StepOptimizer(0, name)


def said(fake: FakeEngine, since: int = 0) -> list[SessionCommand]:
    return [command for command in fake.said[since:] if isinstance(command, SessionCommand)]


def told(fake: FakeEngine, since: int = 0) -> list[str | int]:
    """The commands sent to the engine: of a pass the first token, of others their names."""
    return [
        one.data[0].tokens[0] if isinstance(one, Forward) else type(one).__name__ for one in said(fake, since)
    ]


async def restart(fake: FakeEngine, link: EngineLink) -> int:
    """Kills the engine from outside and starts the next one; what had been said before."""
    before, engines = len(fake.said), link.connections
    await fake.die()
    await fake.start()
    await until(lambda: link.connections > engines)
    return before


def test_commands_go_out_in_order_and_replies_come_once(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session = opened(link, tmp_path)  # before there is an engine
        fake.refusals["Forward"] = Fault("RequestError", "no")
        first, second, third = [session.send(one) for one in (step(), passing(), step())]
        assert session.reason
        assert (await first).said == "StepOptimizer" and (await third).said == "StepOptimizer"
        with pytest.raises(RequestError, match="no"):
            await second
        assert (await session.opened).fault is None and not session.reason
        assert told(fake) == ["OpenTraining", "StepOptimizer", 5, "StepOptimizer"]
        with pytest.raises(JobError, match="already"):
            opened(link, tmp_path)
        session.close()
        with pytest.raises(JobError, match="was closed"):
            session.send(step())
        await until(lambda: isinstance(said(fake)[-1], CloseTraining))
        assert len(link.sessions) == 0

    play(tmp_path, story)


def test_a_session_goes_on_in_the_next_engine(tmp_path: Path) -> None:
    """Commands with a reply are replayed, those without are sent again, and a forward changes nothing."""

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session = opened(link, tmp_path)
        for command in (passing(1), step(), passing(2, backward=False), passing(3)):
            await session.send(command)
        fake.deaf_to = (StepOptimizer, Forward)
        late = [session.send(step()), session.send(passing(4))]
        await until(lambda: len(said(fake)) == 7)
        fake.deaf_to = ()
        before = await restart(fake, link)
        assert (await late[0]).said == "StepOptimizer" and (await late[1]).said == "Forward"
        assert told(fake, before) == ["OpenTraining", 1, "StepOptimizer", 3, "StepOptimizer", 4]
        idle = await restart(fake, link)
        await until(lambda: not session.reason)
        assert told(fake, idle) == ["OpenTraining", 1, "StepOptimizer", 3, "StepOptimizer", 4]

    play(tmp_path, story)


def test_a_session_goes_on_from_the_state_that_its_server_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEPS", 2)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session, spare = opened(link, tmp_path), tmp_path / "spare-s"
        for number in range(4):
            await session.send(passing(number))
            await session.send(step())
        await session.send(passing(4))
        await until(lambda: len(list(spare.iterdir())) == 1 and len(said(fake)) == 12)
        (kept,) = spare.iterdir()
        before = await restart(fake, link)
        await until(lambda: not session.reason)
        assert told(fake, before) == ["OpenTraining", "LoadTraining", 4]
        (load,) = [one for one in said(fake, before) if isinstance(one, LoadTraining)]
        assert load.path == str(kept / "state") and load.optimizer
        session.close()
        await until(lambda: not spare.exists())

    play(tmp_path, story)


def test_a_session_whose_data_is_not_kept_ends_with_an_engine_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 100)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session, other = opened(link, tmp_path), opened(link, tmp_path, "other")
        for number in range(4):
            await session.send(passing(number))
        await restart(fake, link)
        with pytest.raises(EngineLost, match="more data under way than is repeated"):
            session.send(step())
        assert (await other.send(step("other"))).said == "StepOptimizer"

    play(tmp_path, story)


def test_a_session_that_cannot_be_brought_back_says_why(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session = opened(link, tmp_path)
        await session.send(passing(1))
        fake.refusals["OpenTraining"] = Fault("OutOfMemory", "400 MB are missing")
        await restart(fake, link)
        await until(lambda: session.error is not None)
        with pytest.raises(EngineLost, match="could not be brought back: 400 MB"):
            session.send(step())

    play(tmp_path, story)


@pytest.mark.parametrize("place", ["opening", "pass"])
def test_a_session_that_crashes_engines_is_quarantined_and_nobody_else(place: str, tmp_path: Path) -> None:
    def is_poison(command: Command) -> bool:
        if place == "opening":
            return isinstance(command, OpenTraining) and command.session == "bad"
        return isinstance(command, Forward) and command.data[0].tokens[0] == POISON

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        asked = Request("r", (5, 6), SamplingParams(max_tokens=300, seed=3))
        answer = asyncio.create_task(_tokens(link, asked))
        good = opened(link, tmp_path, "good")
        await good.send(passing(1, "good"))
        bad = opened(link, tmp_path, "bad")
        with pytest.raises(Quarantined, match=r"worked on this session \(exit status 1\)"):
            await bad.opened
            await bad.send(passing(POISON, "bad"))
        with pytest.raises(Quarantined, match="worked on this session"):
            bad.send(step("bad"))
        assert (await good.send(step("good"))).said == "StepOptimizer"
        assert len(await answer) == 300
        before = fake.collapses
        again = opened(link, tmp_path, "again")
        await again.opened
        if place == "pass":  # the same data in another session ends no engine
            with pytest.raises(Quarantined):
                again.send(passing(POISON, "again"))
        assert (await again.send(passing(2, "again"))).said == "Forward"
        assert fake.collapses == before and not link.probation.suspects

    fake, guilty = play(tmp_path, story, poison=is_poison)
    assert 2 <= fake.collapses <= 4
    assert [found.item for found in guilty] == [("session", "bad")]


async def _tokens(link: EngineLink, asked: Request) -> list[int | None]:
    return [token.token async for token in link.generate(asked)]


def test_engines_that_are_killed_blame_no_session_but_end_one_that_gets_nowhere(tmp_path: Path) -> None:
    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session = opened(link, tmp_path)
        await session.opened
        fake.deaf_to = (Forward,)
        sent = session.send(passing())
        for _ in range(MOST_LIVES):
            assert not sent.done()
            await restart(fake, link)
        with pytest.raises(EngineLost, match=f"{MOST_LIVES} engines died"):
            await sent

    assert play(tmp_path, story)[1] == []


def test_a_session_that_waits_for_memory_keeps_no_suspect_from_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_sessions, "ALONE_SECONDS", 0.05)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        waiting, other = opened(link, tmp_path, "a"), opened(link, tmp_path, "b")
        fake.deaf_to = (Forward,)
        sent = [waiting.send(passing(1, "a")), other.send(passing(2, "b"))]
        await until(lambda: told(fake).count("OpenTraining") == 2 and 1 in told(fake) and 2 in told(fake))
        fake.deaf_to = (OpenTraining,)  # as one does that waits
        await fake.collapse()
        await until(lambda: told(fake).count("OpenTraining") == 4)  # the second did not wait
        assert not any(one.done() for one in sent)

    play(tmp_path, story)


def test_a_state_that_cannot_be_kept_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "STEPS", 1)

    async def story(fake: FakeEngine, link: EngineLink) -> None:
        session = opened(link, tmp_path)
        fake.refusals["SaveTraining"] = Fault("JobError", "the disk is full")
        await session.send(passing(1))
        await session.send(step())
        await until(lambda: any(isinstance(one, SaveTraining) for one in said(fake)))
        await session.send(passing(2))
        before = await restart(fake, link)
        await until(lambda: not session.reason)
        assert told(fake, before) == ["OpenTraining", 1, "StepOptimizer", 2]

    play(tmp_path, story)


def test_equal_passes_of_two_sessions_have_one_key_on_one_base() -> None:
    one, other = (Forward(ref, name, (Datum((1,), (2,)),)) for ref, name in ((1, "a"), (2, "b")))
    assert pass_key(one, "base") == pass_key(other, "base") != pass_key(other, "wide")
