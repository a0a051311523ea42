"""Pages of virtual tokens: one copy for each version, as long as its pages are not needed otherwise."""

import pytest

from coserve.core.plan import BasePlan, Prefix
from coserve.core.request import SLO, FinishReason, Request, SamplingParams, VersionTraits
from coserve.core.sequence import Sequence
from coserve.errors import OutOfPages, PromptTooLong
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import Features
from coserve.schedule.policies import make_policy
from coserve.schedule.prefixes import Prefixes
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor, next_token, virtual_tokens

PAGE = 4


def request(
    adapter: str, virtual: int, prompt: int = 3, answer: int = 4, rows: int = 0, arrival: float = 0.0
) -> Request:
    sampling = SamplingParams(max_tokens=answer)
    tokens = (1,) * prompt
    return Request("r", tokens, sampling, adapter, arrival=arrival, traits=VersionTraits(virtual, rows))


def running(it: Prefixes, key: int, of: Request) -> Sequence:
    sequence = Sequence(key, of)
    assert it.enter(sequence, len(of.prompt))
    return sequence


@pytest.mark.parametrize(
    ("virtual", "shared", "template", "own"),
    [(0, 0, False, 1), (3, 0, True, 2), (4, 1, False, 1), (9, 2, True, 1), (12, 3, False, 1)],
)
def test_full_pages_are_shared_and_the_rest_is_a_template(
    virtual: int, shared: int, template: bool, own: int
) -> None:
    pool = PagePool(16, PAGE)
    it = Prefixes(pool, sharing=False)
    first, second = (running(it, key, request("a@1", virtual)) for key in (1, 2))
    assert first.pages[:shared] == second.pages[:shared] and first.shared == second.shared == shared
    assert (first.template is not None) is template and first.template == second.template
    mine, others = first.pages[shared:], second.pages[shared:]
    assert len(mine) == len(others) == own and not {*mine} & {*others}
    assert first.template not in first.pages
    assert pool.free_count == 16 - shared - template - 2 * own


def test_what_must_be_filled_is_said_once() -> None:
    it = Prefixes(PagePool(16, PAGE), sharing=False)
    of = request("a@1", 6, rows=2)
    assert it.rows(of) == 2
    first = running(it, 1, of)
    assert it.take_unfilled() == (Prefix("a@1", (*first.pages[:1], first.template or 0), 6, 2),)
    running(it, 2, of)
    assert (it.rows(of), it.take_unfilled()) == (0, ())


def test_they_stay_as_long_as_their_pages_are_not_needed() -> None:
    pool = PagePool(16, PAGE)
    it = Prefixes(pool, sharing=False)
    first, second = (running(it, key, request("a@1", 6)) for key in (1, 2))
    other = running(it, 3, request("b@1", 6))
    assert len(it.take_unfilled()) == 2
    kept = first.pages[0], first.template
    for sequence in (first, second, other):
        it.leave(sequence)
        assert (sequence.pages, sequence.shared, sequence.template) == ([], 0, None)
    assert (pool.free_count, pool.cached_count) == (16, 4) and it.rows(request("a@1", 6, rows=6)) == 0
    again = running(it, 4, request("a@1", 6))
    assert (again.pages[0], again.template) == kept and it.take_unfilled() == ()
    it.leave(again)
    pool.allocate("others", 13)  # one of the four goes, the least recently used version's last
    assert it.rows(request("b@1", 6, rows=6)) == 6 and it.rows(request("a@1", 6, rows=6)) == 0


def test_what_is_left_of_them_is_not_found_once_a_page_is_gone() -> None:
    """They are filled together; nobody may write into a page that somebody else still reads."""
    pool = PagePool(6, PAGE)
    it = Prefixes(pool, sharing=False)
    it.leave(running(it, 1, request("a@1", 8, prompt=1)))
    pool.allocate("others", 5)
    it.take_unfilled()
    pool.free("others")
    assert pool.cached_count == 1
    again = running(it, 2, request("a@1", 8, prompt=1))
    assert it.take_unfilled() == (Prefix("a@1", tuple(again.pages[:2]), 8),)
    assert pool.cached_count == 0
    it.leave(again)
    assert (pool.free_count, pool.cached_count) == (6, 2)


def test_no_room_takes_nothing() -> None:
    pool = PagePool(4, PAGE)
    it = Prefixes(pool, sharing=False)
    sequence = Sequence(1, request("a@1", 9, prompt=8))
    assert not it.enter(sequence, 8)  # three of the version's and three of its own
    assert pool.free_count == 4 and not sequence.pages
    assert it.enter(Sequence(2, request("a@1", 9, prompt=2)), 2)


def test_what_can_never_run_is_refused_with_its_virtual_tokens() -> None:
    it = RequestQueues(BaseCache(SchedulerConfig(layers=4, max_positions=64), PagePool(8, PAGE)))
    with pytest.raises(PromptTooLong, match=r"50 prompt tokens .* 5 more after the 10 .*65.*64 positions"):
        it.check(request("a@1", 10, 50, 5))
    with pytest.raises(OutOfPages, match=r"19 cached tokens after the 10 of its adapter, 9 pages of 4"):
        it.check(request("a@1", 10, 16, 4))  # 8 pages and a template
    it.check(request("a@1", 10, 15, 4))


@pytest.mark.parametrize("virtual", [0, 3, 4, 10])
@pytest.mark.parametrize(("pages", "positions"), [(8, 64), (30, 64)])
def test_an_answer_has_room_for_what_is_not_refused(virtual: int, pages: int, positions: int) -> None:
    it = RequestQueues(BaseCache(SchedulerConfig(layers=4, max_positions=positions), PagePool(pages, PAGE)))
    for prompt in (1, 2, 7, 15):
        room = it.room(prompt, virtual)
        it.check(request("a@1", virtual, prompt, room))
        with pytest.raises((PromptTooLong, OutOfPages)):
            it.check(request("a@1", virtual, prompt, room + 1))


def test_growth_may_take_the_pages_of_somebody_else_s_virtual_tokens() -> None:
    pool = PagePool(7, PAGE)
    it = RequestQueues(BaseCache(SchedulerConfig(layers=4, max_positions=64), pool))
    first = Sequence(1, request("a@1", 4, 3, 20))
    second = Sequence(2, request("b@1", 7, 3, 4, arrival=1.0))
    for sequence in (first, second):
        it.check(sequence.request)
        it.join(sequence)
        assert it.enter(sequence, 0.0)
    assert pool.free_count == 1
    first.output = [1] * 10
    assert it.grow(first, 0.0)
    assert (len(first.pages), second.pages, it.waiting) == (5, [], [second])
    assert {*pool.owners} == {1}
    it.retire(first, FinishReason.STOP)
    assert it.enter(second, 1.0) and it.caches.first.prefixes.take_unfilled()[-1].adapter == "b@1"


def test_a_fill_counts_as_a_pass_of_its_own() -> None:
    plan = BasePlan(prefixes=(Prefix("a@1", (0, 1), 7, 5), Prefix("b@1", (2,), 4)))
    found = Features.of(plan).counted()
    assert (found["forward_layers"], found["prefill_layers"], found["forward_rows"]) == (1.0, 1.0, 5.0)
    assert found["forward_attention"] == sum(range(3, 8))


def scheduler(pages: int, **limits: int) -> tuple[Scheduler, PagePool]:
    pool = PagePool(pages, PAGE)
    config = SchedulerConfig(layers=4, max_positions=256, **limits)
    return Scheduler(BaseCache(config, pool), CostModel(), make_policy("hybrid")), pool


def test_the_rows_that_fill_count_among_a_step_s_prompt_rows() -> None:
    it, _ = scheduler(64, max_prefill_rows=28, min_prefill_rows=2)
    for adapter in ("a@1", "a@1", "b@1"):
        it.requests.submit(request(adapter, 12, prompt=8, rows=12), 0.0)
    plan = it.plan(0.0).only
    assert [s.length for s in plan.inference] == [8, 8] and [p.adapter for p in plan.prefixes] == ["a@1"]
    found = it.cost.first.predict(plan)
    assert plan.predicted == pytest.approx(found)


@pytest.mark.parametrize(("rows", "entered"), [(20, 1), (200, 0)])
def test_a_prompt_whose_virtual_tokens_do_not_fit_the_bounds_waits(rows: int, entered: int) -> None:
    """A long fill would break the bound between tokens, so the prompt behind it comes a step later."""
    it, _ = scheduler(512)
    executor = ScriptedExecutor(PAGE)
    for _ in range(32):
        it.cost.misses.observe(1.0, trains=False)
    sampling = SamplingParams(max_tokens=9)
    it.requests.submit(Request("r", (1,) * 40, sampling, slo=SLO(between_tokens=0.04)), 0.0)
    executor.step(it)
    it.requests.submit(Request("s", (1,) * 40, sampling, slo=SLO(first_token=0.5)), executor.now)
    it.requests.submit(request("a@1", rows, prompt=40, rows=rows, arrival=executor.now), executor.now)
    assert len(it.plan(executor.now).only.prefixes) == entered


def test_preempted_sequences_come_back_to_the_same_answer() -> None:
    it, pool = scheduler(12)
    executor = ScriptedExecutor(PAGE)
    asked = [request(f"{'ab'[n % 2]}@1", 6 + n % 2, prompt=3, answer=16, arrival=float(n)) for n in range(6)]
    found = [it.requests.submit(of, of.arrival) for of in asked]
    while it.has_work:
        executor.step(it)
    assert it.stats.preemptions >= 3 and pool.free_count == 12
    filled = [prefix.adapter for plan in executor.plans for prefix in plan.prefixes]
    assert {*filled} == {"a@1", "b@1"}
    for of, sequence in zip(asked, found, strict=True):
        output: list[int] = []
        for _ in range(16):
            before = [*virtual_tokens(of.adapter or "", of.traits.virtual), *of.prompt, *output]
            output.append(next_token(before, 1000))
        assert sequence.output == output
