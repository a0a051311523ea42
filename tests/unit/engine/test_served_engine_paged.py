"""Messages to a server about adapters on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coserve import Engine, SamplingParams
from coserve.adapters.files import WEIGHTS
from coserve.core.request import Request
from coserve.engine.background import Background
from coserve.engine.link import Done, Inbox
from coserve.engine.served_engine import ServedEngine
from coserve.wire.messages import (
    AddAdapter,
    Command,
    EngineStats,
    Hello,
    PinAdapter,
    RemoveAdapter,
    Reply,
    Token,
)
from paged import make_engine, stored

HELLO = Hello("g", "m", "float32", "cpu", 1, 256, 96, 16, 512, 64, (0,), False, 0.0)


class Desk:
    """A worker whose commands are done, and all that it has said."""

    def __init__(self) -> None:
        self.engine: Engine = make_engine()
        self._inbox = Inbox()
        self._worker = ServedEngine(self.engine, HELLO, Background(self._inbox, threads=1))
        self._worker.connected()
        self.replies: dict[int, Reply] = {}
        self.tokens: dict[str, list[Token]] = {}
        self.stats: EngineStats | None = None

    def say(self, command: Command, until: Callable[[], bool]) -> None:
        self._worker.take(command)
        for _ in range(2000):
            if until():
                return
            if self._worker.has_work:
                self._worker.step()
            else:
                item = self._inbox.get(timeout=10)
                assert isinstance(item, Done)
                item.then()
            report = self._worker.report()
            if report is not None:
                self.replies |= {reply.ref: reply for reply in report.replies}
                for token in report.tokens:
                    self.tokens.setdefault(token.id, []).append(token)
                self.stats = report.stats or self.stats
        pytest.fail("nothing comes of it")

    def load(self, ref: int, key: str, folder: Path) -> Reply:
        self.say(AddAdapter(ref, key, str(folder)), lambda: ref in self.replies or self._replied(ref))
        return self.replies[ref]

    def ask(self, name: str, adapter: str) -> list[Token]:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
        self.say(Request(name, (5, 9), sampling, adapter=adapter), lambda: self._is_over(name))
        return self.tokens[name]

    def at_once(self, command: AddAdapter | PinAdapter | RemoveAdapter) -> Reply:
        """The reply to a command, which needs no step."""
        self._worker.take(command)
        assert self._replied(command.ref)
        return self.replies[command.ref]

    def _replied(self, ref: int) -> bool:
        report = self._worker.report()
        if report is not None:
            self.replies |= {reply.ref: reply for reply in report.replies}
        return ref in self.replies

    def _is_over(self, name: str) -> bool:
        last = self.tokens.get(name, [None])[-1]
        return last is not None and (last.finish is not None or last.fault is not None)


def test_an_adapter_is_known_at_once_and_read_when_it_is_asked_for(tmp_path: Path) -> None:
    desk = Desk()
    one, two = (stored(desk.engine, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    assert desk.load(1, "one", one).fault is None and desk.load(2, "two", two).fault is None
    assert len(desk.engine.adapters.cache) == 0 and desk.engine.stats().paging.known == 2
    assert len(desk.ask("a", "one")) == 3
    assert desk.engine.stats().paging.resident == ("one",)
    assert desk.at_once(AddAdapter(3, "one", str(one))).fault is None, "it is known already"
    assert desk.at_once(RemoveAdapter(4, "one")).fault is None
    assert desk.engine.stats().paging.known == 1 and len(desk.engine.adapters.cache) == 0


def test_what_is_no_adapter_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    desk = Desk()
    folder = stored(desk.engine, tmp_path)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-10])
    fault = desk.load(1, "one", folder).fault
    assert fault is not None and fault.kind == "AdapterError"


def test_files_that_are_gone_fail_the_request_with_one_sentence(tmp_path: Path) -> None:
    desk = Desk()
    folder = stored(desk.engine, tmp_path / "one")
    desk.load(1, "one", folder)
    (folder / WEIGHTS).unlink()
    (token,) = desk.ask("a", "one")
    assert token.fault is not None and token.fault.kind == "AdapterError"
    assert WEIGHTS in token.fault.text and str(tmp_path) not in token.fault.text
    assert not desk.engine.has_work
    assert desk.at_once(RemoveAdapter(2, "one")).fault is None


def test_pins_are_kept_or_refused(tmp_path: Path) -> None:
    desk = Desk()
    desk.load(1, "one", stored(desk.engine, tmp_path))
    assert desk.at_once(PinAdapter(2, "one", True)).fault is None
    assert desk.engine.stats().paging.pinned == ("one",)
    assert desk.at_once(PinAdapter(3, "one", False)).fault is None
    assert desk.engine.stats().paging.pinned == ()
    fault = desk.at_once(PinAdapter(4, "two", True)).fault
    assert fault is not None and fault.kind == "AdapterNotFound"
