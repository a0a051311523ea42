"""A worker with an engine of its own, without a process, a socket or a clock, for tests."""

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.request import BASE, Request
from coserve.engine.background import Background
from coserve.engine.link import Done, Inbox
from coserve.engine.remembered import CostFile
from coserve.engine.served_engine import ServedEngine
from coserve.wire.codec import decode_answer, encode_answer
from coserve.wire.messages import (
    Command,
    Hello,
    JobEnded,
    JobNews,
    JobSpec,
    Reply,
    Report,
    Token,
)
from models import letter_tokenizer, tiny

HELLO = Hello("g", "m", "float32", "cpu", 1, 256, 96, 16, 512, 64, False, 0.0)


class Desk:
    """A worker, and all that it has said."""

    def __init__(
        self,
        costs: CostFile | None = None,
        engine: Engine | None = None,
        stitched: tuple[str, ...] = (),
        **config: Any,
    ) -> None:
        """`engine` is one that is there already; else one with a model of letters is made. `stitched` are ids
        of its chains of two bases."""
        self.engine = engine or Engine(
            tiny("llama"),
            EngineConfig(calibrate=False, cache_tokens=512, page_size=8, **config),
            tokenizer=letter_tokenizer(),
        )
        self.inbox = Inbox()
        hello = msgspec.structs.replace(HELLO, stitched=stitched)
        self.worker = ServedEngine(self.engine, hello, Background(self.inbox, threads=1), {BASE: costs})
        self.reports: list[Report] = []
        self.asked = 0  # ends of jobs
        self.worker.connected()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.worker.take(command)
        self.report()

    def step(self) -> None:
        """As the loop does it."""
        wait = not self.worker.has_work
        try:
            item = self.inbox.get(wait, 60 if wait else None)
            assert isinstance(item, Done)
            item.then()
        except queue.Empty:
            assert not wait, "nothing to do, and nothing comes"
        if self.worker.has_work:
            self.worker.step()
        self.report()

    def report(self) -> None:
        report = self.worker.report()
        if report is not None:
            assert decode_answer(encode_answer(report)) == report
            self.reports.append(report)

    def until(self, done: Callable[[], object]) -> None:
        for _ in range(5000):
            if done():
                return
            self.step()
        raise AssertionError("it does not get there")

    @property
    def tokens(self) -> list[Token]:
        return [token for report in self.reports for token in report.tokens]

    @property
    def replies(self) -> list[Reply]:
        return [reply for report in self.reports for reply in report.replies]

    def news(self, kind: type[JobNews] | None = None) -> list[JobNews]:
        found = [numbered.news for report in self.reports for numbered in report.jobs]
        return [news for news in found if kind is None or isinstance(news, kind)]

    def ended(self) -> JobEnded:
        """The end of a job that has not been asked for yet."""
        self.asked += 1
        self.until(lambda: len(self.news(JobEnded)) >= self.asked)
        ended = self.news(JobEnded)[self.asked - 1]
        assert isinstance(ended, JobEnded)
        return ended


def write_data(file: Path) -> Path:
    """Twelve short examples."""
    lines = [{"prompt": f"{i}?", "completion": f" {i * i}"} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def job(data: Path, folder: Path, name: str = "j", weight: float = 1.0, **fields: Any) -> JobSpec:
    options = {"batch_size": 2, "learning_rate": 1e-2, "keep": "everything"} | fields.pop("options", {})
    method = {"rank": 2, "targets": ["q_proj"]}
    return JobSpec(name, str(data), str(folder), options, method, weight=weight, **fields)


def ask(name: str, tokens: int = 3, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
    return Request(name, (5, 6), sampling, **fields)
