"""Reasons why requests wait in an engine."""

from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.waits import MOST_WAITS, reasons

PAGE = 4


def queues(pages: int, places: int) -> RequestQueues:
    config = SchedulerConfig(layers=4, max_positions=64, max_running=places)
    return RequestQueues(BaseCache(config, PagePool(pages, PAGE)))


def asked(number: int, prompt: int) -> Sequence:
    sampling = SamplingParams(max_tokens=4)
    return Sequence(number, Request(f"r{number}", (1,) * prompt, sampling, arrival=float(number)))


def test_each_reason_is_that_of_the_moment() -> None:
    it = queues(pages=4, places=2)
    first, large, small, blocked = asked(1, 4), asked(2, 12), asked(3, 2), asked(4, 2)
    for sequence in (first, large, small):
        it.join(sequence)
    it.join(blocked, blocked=True)
    assert it.enter(first, 0.0)
    told = dict(reasons(it, held=False))
    assert told == {
        "r2": "it needs 4 pages, and 2 are free",
        "r3": "others' prompts come first in the next steps",
        "r4": "its adapter's weights are being read",
    }
    assert list(told) == ["r2", "r3", "r4"]
    assert dict(reasons(it, held=True))["r2"] == "the policy holds answers back while it trains"
    assert it.enter(small, 0.0)
    assert dict(reasons(it, held=False))["r2"] == "all places for sequences are taken"
    it.preempt(small, 1.0)
    assert dict(reasons(it, held=False))["r3"].startswith("others took its pages: ")


def test_reasons_are_bounded() -> None:
    it = queues(pages=4, places=1)
    for number in range(2 * MOST_WAITS):
        it.join(asked(number, 2), blocked=number % 2 == 0)
    told = [id for id, _ in reasons(it, held=False)]
    assert len(told) == MOST_WAITS and told[0] == "r1"
