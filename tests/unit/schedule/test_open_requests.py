from itertools import count

import pytest

from coserve.core.events import Finished, RequestFailed
from coserve.core.request import BASE, SLO, FinishReason, Request, SamplingParams
from coserve.errors import AdapterError, EmptyPrompt
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.newcomers import LATELY
from coserve.schedule.open_requests import OpenRequests
from coserve.schedule.request_queues import RequestQueues


def made() -> tuple[OpenRequests, PagePool]:
    config, pool = SchedulerConfig(layers=4, max_positions=64), PagePool(8, 4)
    return OpenRequests(RequestQueues(BaseCache(config, pool)), count(1).__next__), pool


def request(prompt: int = 6, slo: SLO = SLO(), arrival: float = 0.0) -> Request:
    return Request("r", (1,) * prompt, SamplingParams(max_tokens=4), slo=slo, arrival=arrival)


def test_a_blocked_request_waits_for_its_turn_only_when_unblocked() -> None:
    it, _ = made()
    sequence = it.submit(request(), 0.0, blocked=True)
    assert (it.blocked_on_adapter, it.waiting) == ((sequence,), ())
    it.unblock(sequence)
    assert (it.blocked_on_adapter, it.waiting) == ((), (sequence,))


def test_ends_between_two_steps_are_reported_once_and_free_their_pages() -> None:
    it, pool = made()
    failed, cancelled = it.submit(request(), 0.0), it.submit(request(), 0.0)
    assert it.queues.enter(failed, 0.0) and pool.free_count < pool.pages
    error = AdapterError("it is gone")
    it.fail(failed.key, error)
    it.cancel(cancelled.key)
    assert pool.free_count == pool.pages and not it.running and not it.waiting and it.has_work
    expected = [
        RequestFailed(failed.key, "r", error),
        Finished(cancelled.key, "r", FinishReason.CANCELLED),
    ]
    assert it.ended == [(BASE, event) for event in expected]
    it.ended.clear()
    assert not it.has_work


def test_a_refused_request_is_not_open() -> None:
    it, _ = made()
    with pytest.raises(EmptyPrompt):
        it.submit(request(prompt=0), 0.0)
    assert not it.has_work and it.places.rate(0.0) == 0.0


def test_training_is_charged_to_those_who_wait_and_to_those_who_came_during_it() -> None:
    it, _ = made()
    waiting = it.submit(request(), 0.0)
    it.charge(0.5, now=2.0)
    assert waiting.deferred == 0.5
    deferred = [it.submit(request(arrival=at), 2.0).deferred for at in (1.0, 1.75, 2.0)]
    assert deferred == [0.5, 0.25, 0.0]


def test_bounds_are_expected_for_a_while_after_the_last_request_that_stated_one() -> None:
    it, _ = made()
    it.submit(request(), 0.0)
    assert not it.has_bounds(0.0)
    bounded = it.submit(request(slo=SLO(first_token=1.0)), 1.0)
    assert it.has_bounds(2.0 + LATELY), "it is open"
    it.cancel(bounded.key)
    assert it.has_bounds(1.0 + LATELY) and not it.has_bounds(1.5 + LATELY)
