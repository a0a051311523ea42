import pytest

from coserve.core.request import BASE, SLO, FinishReason, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.errors import EmptyPrompt, OutOfPages, PromptTooLong
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.request_queues import RequestQueues

PAGE = 4


def lines(pages: int = 8, **limits: int) -> tuple[RequestQueues, PagePool]:
    pool = PagePool(pages, PAGE)
    config = SchedulerConfig(layers=4, max_positions=64, max_running=limits.get("max_running", 8))
    return RequestQueues(BaseCache(config, pool)), pool


def request(prompt: int, answer: int = 4, arrival: float = 0.0, bound: float | None = None) -> Request:
    return Request(
        "r", (1,) * prompt, SamplingParams(max_tokens=answer), slo=SLO(first_token=bound), arrival=arrival
    )


def test_what_can_never_run_is_refused_with_numbers() -> None:
    it, _ = lines(pages=8)
    with pytest.raises(EmptyPrompt):
        it.check(request(0))
    with pytest.raises(PromptTooLong, match=r"60 prompt tokens .* 5 more.*65.*64 positions"):
        it.check(request(60, 5))
    with pytest.raises(OutOfPages, match=r"33 cached tokens, 9 pages of 4; there are 8"):
        it.check(request(30, 4))
    it.check(request(29, 4))  # the last token of an answer is never cached: 32 tokens, 8 pages


def test_the_waiting_line_goes_by_deadline_and_patience() -> None:
    it, _ = lines()
    calm = Sequence(1, request(4, arrival=0.0))
    tight = Sequence(2, request(4, arrival=5.0, bound=0.5))
    late = Sequence(3, request(4, arrival=20.0, bound=0.5))
    for sequence in (late, calm, tight):
        it.join(sequence)
    assert it.waiting == [tight, calm, late]  # ten seconds of patience put `calm` before 20.5


def test_entering_takes_pages_for_the_prompt_and_one_token() -> None:
    it, pool = lines()
    sequence = Sequence(1, request(8))
    it.join(sequence)
    assert it.enter(sequence, now=3.0)
    assert (len(sequence.pages), pool.free_count, sequence.admitted_at) == (3, 5, 3.0)
    assert (it.waiting, it.running) == ([], [sequence])


def test_one_token_answers_need_no_page_for_it() -> None:
    it, _ = lines(pages=2)
    sequence = Sequence(1, request(8, answer=1))
    it.check(sequence.request)
    it.join(sequence)
    assert it.enter(sequence, 0.0)
    assert len(sequence.pages) == 2


def test_no_room_no_entry() -> None:
    it, pool = lines(pages=2, max_running=1)
    big, small = Sequence(1, request(8)), Sequence(2, request(2))
    other = Sequence(3, request(2))
    for sequence in (big, small, other):
        it.join(sequence)
    assert not it.enter(big, 0.0)
    assert pool.free_count == 2
    assert it.enter(small, 0.0)
    assert not it.enter(other, 0.0)  # a page is free, but only one may run
    assert pool.free_count == 1


def test_growth_takes_from_whoever_came_last() -> None:
    it, pool = lines(pages=4)
    first, second = (Sequence(key, request(7, 9, arrival=float(key))) for key in (1, 2))
    for sequence in (first, second):
        it.join(sequence)
        assert it.enter(sequence, 0.0)
        sequence.computed, sequence.told = 7, 2
    first.output = [1, 1]
    assert it.grow(first, 0.0)
    assert (len(first.pages), second.pages, second.computed, second.preemptions) == (3, [], 0, 1)
    assert (it.running, it.waiting, it.released) == ([first], [second], [(BASE, 2)])
    assert pool.free_count == 1


def test_the_last_to_come_gives_up_itself() -> None:
    it, _ = lines(pages=4)
    first, second = (Sequence(key, request(7, 9, arrival=float(key))) for key in (1, 2))
    for sequence in (first, second):
        it.join(sequence)
        it.enter(sequence, 0.0)
    second.output = [1, 1]
    assert not it.grow(second, 0.0)
    assert it.running == [first] and it.waiting == [second]


def test_who_was_preempted_goes_to_the_front() -> None:
    it, _ = lines()
    victim, urgent = Sequence(1, request(4, arrival=9.0)), Sequence(2, request(4, arrival=0.0, bound=0.0))
    it.join(victim)
    it.enter(victim, 9.0)
    it.join(urgent)
    it.preempt(victim, 0.0)
    assert it.waiting == [victim, urgent]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("runs", [True, False])
def test_retiring_frees_and_releases_what_was_held(runs: bool, is_named: bool) -> None:
    it, pool = lines()
    sequence = Sequence(1, request(4))
    it.join(sequence)
    if runs:
        it.enter(sequence, 0.0)
        sequence.told = 2 if is_named else None
    it.retire(sequence, FinishReason.STOP)
    assert sequence.is_finished and list(it) == []
    assert pool.free_count == 8
    assert it.released == ([(BASE, 1)] if runs and is_named else []) and sequence.told is None
