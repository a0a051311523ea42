"""The scheduler with a second tier: it moves what is cheaper to move, and computes the rest again."""

from itertools import pairwise
from math import inf

import pytest

from coserve.core.plan import SwapIn, SwapOut
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swap_tier import SwapTier
from coserve.schedule.swapping import Swapping
from scripted_executor import ScriptedExecutor, next_token
from steps import apply

PAGE, FAST, SLOW = 4, 1e-6, 1e-1  # seconds a page; a row takes 1e-4


class World:
    """Requests on few pages, beside a tier of `room` pages; each takes `seconds` there, of which `guess` was
    thought before. Staging memory has room for `staged` pages."""

    def __init__(
        self, pages: int = 10, room: int = 100, seconds: float = FAST, guess: float | None = None,
        sharing: bool = False, policy: str = "hybrid", staged: int = 1000,
    ) -> None:  # fmt: skip
        self.pool, cost = PagePool(pages, PAGE), CostModel()
        config = SchedulerConfig(2, 96, prefix_sharing=sharing)
        tier = SwapTier(room, seconds if guess is None else guess)
        self.swapping = Swapping(cost, room, tier)
        self.it = Scheduler(BaseCache(config, self.pool, self.swapping), cost, make_policy(policy))
        self.swapping.copies.staged = staged
        self.executor = ScriptedExecutor(
            PAGE, swap_pages=room, swap_seconds=(seconds, seconds), staged=staged
        )

    def ask(
        self, prompt: int = 12, answer: int = 16, first: int = 0, newcomer: bool = False,
        bound: float | None = None, deferral: float | None = None,
    ) -> Sequence:  # fmt: skip
        """Prompts with the same `first` are alike as far as both go."""
        tokens, now = tuple(range(first, first + prompt)), self.executor.now
        sampling = SamplingParams(max_tokens=answer)
        slo = SLO(between_tokens=bound, deferral=deferral)
        request = Request("r", tokens, sampling, slo=slo, arrival=now, newcomer=newcomer)
        return self.it.requests.submit(request, now)

    def until_preempted(self, sequence: Sequence) -> None:
        while not sequence.preemptions:
            self.executor.step(self.it)

    def finish(self, *asked: Sequence) -> None:
        """Steps to the end; every answer is what it would be alone."""
        for _ in range(1000):
            if not self.it.has_work:
                break
            self.executor.step(self.it)
        assert all(map(answered, asked))
        assert self.pool.free_count == self.pool.pages
        assert self.swapping.copies.used == len(self.swapping.copies.evictable) == len(self.executor._copies)

    @property
    def outs(self) -> list[SwapOut]:
        return [move for plan in self.executor.plans for move in plan.swap_out]

    @property
    def backs(self) -> list[SwapIn]:
        return [move for plan in self.executor.plans for move in plan.swap_in]

    def pair(self) -> tuple[Sequence, Sequence]:
        """Two that grow beyond ten pages together: the second is preempted."""
        first, second = self.ask(first=100), self.ask(first=200)
        self.until_preempted(second)
        return first, second


def answered(sequence: Sequence) -> bool:
    """Tells whether an answer is what it would be alone."""
    tokens = [*sequence.request.prompt]
    for _ in range(sequence.request.sampling.max_tokens):
        tokens.append(next_token(tokens, 1000))
    return tokens == [*sequence.request.prompt, *sequence.output]


def test_a_fast_tier_saves_computing_again() -> None:
    world = World()
    world.finish(*world.pair())
    stats = world.it.stats
    assert stats.preemptions == len(world.outs) == len(world.backs) > 0 and stats.recomputed_tokens == 0
    assert stats.swapped_out_pages == stats.swapped_in_pages == sum(len(move.pages) for move in world.outs)
    plain = World(room=0)
    plain.finish(*plain.pair())
    assert plain.it.stats.recomputed_tokens > 0 and not plain.outs
    assert world.executor.now < plain.executor.now


def test_a_slow_tier_is_left_alone() -> None:
    world = World(seconds=SLOW)
    world.finish(*world.pair())
    assert world.it.stats.preemptions > 0 and not world.outs and world.it.stats.recomputed_tokens > 0


def test_the_cheaper_way_by_the_predicted_seconds() -> None:
    """Just below and just above what computing the tokens again is predicted to take."""
    for factor in (0.95, 1.05):
        world = World(room=0)
        _, second = world.pair()
        computed, pages = second.reached, -(-second.reached // PAGE)
        weights = world.it.cost.first.weights
        again = weights["forward_rows"] * computed
        again += weights["forward_attention"] * computed * (computed + 1) / 2
        chosen = World(guess=factor * again / (2 * pages))
        chosen.pair()
        assert bool(chosen.outs) is (factor < 1)


def test_a_tier_that_turns_out_slow_is_left_alone_for_a_while() -> None:
    world = World(seconds=SLOW, guess=FAST)
    tries = []
    for _ in range(12):
        before = len(world.outs)
        world.finish(*world.pair())
        tries.append(len(world.outs) - before)
    assert tries[0] > 0 and tries[-1] == 0
    world.executor.skip(3600)
    world.finish(*world.pair())
    assert world.it.stats.swap_failures == 0 and len(world.outs) > sum(tries), "it may be faster by now"


def test_a_full_tier_takes_no_more() -> None:
    world = World(pages=17, room=5)
    asked = [world.ask(first=100 * n) for n in range(1, 6)]
    world.finish(*asked)
    assert world.it.stats.preemptions > len(world.outs) > 0 and world.it.stats.recomputed_tokens > 0


def test_who_is_cancelled_leaves_nothing_behind() -> None:
    for at in ("swapped", "loading", "leaving"):
        world = World()
        first, second = world.pair()
        assert second.swapped is not None and world.swapping.copies.used > 0
        if at == "loading":  # a plan that reads is under way
            while second.swapped is not None:
                plan = world.it.plan(world.executor.now).only
                world.executor.launch(plan)
                if not second.loading:
                    result = world.executor.collect()
                    assert result is not None
                    apply(world.it, result, world.executor.now)
            world.it.requests.cancel(second.key)
            result = world.executor.collect()
            assert result is not None
            apply(world.it, result, world.executor.now)
        else:
            world.it.requests.cancel(second.key)
        world.executor.step(world.it)
        assert not world.executor._copies and world.swapping.copies.used == 0
        world.finish(first)


def test_steps_of_others_go_on_while_pages_move() -> None:
    """A copy takes as long as ten steps either way, and the other answer's tokens come as they would without
    a move."""
    world = World(seconds=0.02, guess=FAST)
    first, second = world.ask(answer=28, first=100), world.ask(first=200)
    times = list[float]()
    while first.finish_reason is None:
        world.executor.step(world.it)
        times.append(world.executor.now)
    assert world.outs and max(after - before for before, after in pairwise(times)) < 0.015
    world.finish(first, second)
    assert world.backs and world.it.stats.recomputed_tokens == 0


# Copies for which staging memory has no room at once


@pytest.mark.parametrize("staged", [1, 4, 9])
def test_a_long_copy_is_written_in_parts_beside_steps(staged: int) -> None:
    """Its pages are held until their part is begun, and all come back."""
    world = World(pages=20, seconds=0.01, guess=FAST, staged=staged)
    first, second = world.ask(20, 36, first=100), world.ask(20, 30, first=200)
    world.until_preempted(second)
    assert second.swapped is not None
    held = len(world.swapping.copies.unwritten)
    assert held and world.pool.free_count + second.swapped.pages + len(first.pages) > world.pool.pages
    times = list[float]()
    while first.finish_reason is None:
        world.executor.step(world.it)
        times.append(world.executor.now)
    assert max(after - before for before, after in pairwise(times)) < 0.015, "no step waits for a page"
    world.finish(first, second)
    parts = max(staged // 4, 1)
    assert {len(out.pages) for out in world.outs[:-1]} <= {parts} and len(world.outs) > held
    assert sum(len(one.pages) for one in world.outs) == sum(len(one.pages) for one in world.backs)
    assert world.it.stats.recomputed_tokens == 0


def test_parts_that_are_still_there_are_not_read() -> None:
    """Full pages have names, and are found after the sequence that needed them has gone."""
    world = World(pages=10, sharing=True, staged=4)
    first, second = world.pair()
    copy = second.swapped
    assert copy is not None and len(copy.numbers) > 2
    world.it.requests.cancel(first.key)
    world.finish(second)
    read = {back.copy for back in world.backs}
    assert read and read < {*copy.numbers}, "a whole part is dropped, as nobody needs it"
    assert world.it.stats.recomputed_tokens == 0


def test_a_copy_is_given_up_where_others_need_its_pages_before_they_are_written() -> None:
    """The one that grows waits for no disk, and preempts nobody else."""
    world = World(pages=10, seconds=10.0, guess=FAST, staged=1)
    first, second = world.pair()
    assert world.swapping.copies.unwritten and second.swapped is not None
    while first.finish_reason is None:
        before = world.executor.now
        world.executor.step(world.it)
        assert world.executor.now - before < 0.015
    assert second.swapped is None and not world.swapping.copies.unwritten
    assert (first.preemptions, second.preemptions) == (0, 1)
    world.finish(first, second)


def test_a_newcomer_waits_for_no_copy_to_be_written() -> None:
    world = World(pages=20, seconds=1.0, guess=FAST, staged=4)
    old = world.ask(56, 8, first=100)
    while len(old.output) < 2:
        world.executor.step(world.it)
    began, newcomer = world.executor.now, world.ask(56, 4, first=300, newcomer=True)
    while newcomer.finish_reason is None:
        world.executor.step(world.it)
    assert old.preemptions == 1 and world.executor.now - began < 0.2
    world.finish(old, newcomer)


@pytest.mark.sample(1, per="way")
@pytest.mark.parametrize("way", ["writing", "reading"])
@pytest.mark.parametrize("staged", [1, 4, 1000])
def test_a_disk_that_hangs_holds_nobody_for_long(staged: int, way: str) -> None:
    """Others go on at once. After ten seconds copies are given up, and their pages go to whoever waits."""
    world = World(pages=20, staged=staged)
    never = (inf, FAST) if way == "writing" else (FAST, inf)
    world.executor._swap_seconds = never
    first, second = world.ask(20, 36, first=100), world.ask(20, 30, first=200)
    world.until_preempted(second)
    while first.finish_reason is None:
        before = world.executor.now
        world.executor.step(world.it)
        assert world.executor.now - before < 0.015
    third, began = world.ask(60, 8, first=600), world.executor.now
    while not (second.is_finished and third.is_finished):
        world.executor.step(world.it)
        assert world.executor.now - began < 11
    assert world.it.stats.recomputed_tokens, "not what the disk has"
    assert all(map(answered, (first, second, third))) and world.pool.free_count == world.pool.pages


def test_a_copy_that_is_read_slower_than_computed_is_computed() -> None:
    """The tier was faster when it was written."""
    world = World()
    first, second = world.pair()
    assert second.swapped is not None
    world.swapping.tier.reading.guess = 0.1
    world.finish(first, second)
    assert world.it.stats.recomputed_tokens > 0 and not world.backs


@pytest.mark.parametrize("policy", ["hybrid", "deferred", "heterogeneous", "adaptive"])
def test_pages_of_a_request_that_may_be_put_off_move_and_wait_like_others(policy: str) -> None:
    """A running request of the tier flex (`deferral`) makes way for urgent ones, and waits with its copy."""
    world = World(policy=policy)
    flex = world.ask(20, 12, first=100, deferral=60.0)
    while len(flex.output) < 4:
        world.executor.step(world.it)
    computed = flex.computed
    urgent = [world.ask(24, 8, first=300 * n, newcomer=True) for n in (1, 2)]
    world.until_preempted(flex)
    (out,) = world.outs
    assert flex.swapped is not None and not flex.pages and flex.swapped.tokens >= computed
    assert len(out.pages) == -(-flex.swapped.tokens // PAGE)
    world.executor.skip(30.0)
    world.executor.step(world.it)
    assert flex.swapped is not None and not flex.pages, "it waits, and its copy with it"
    world.finish(flex, *urgent)
    assert [back.copy for back in world.backs] == [out.copy]
    assert world.it.stats.recomputed_tokens == 0


# Shared beginnings


def test_what_others_read_is_neither_copied_nor_lost() -> None:
    """Twelve tokens in common: three pages that the first one reads as well. When it has ended they stay,
    while others come and go through all other pages."""
    world = World(pages=10, sharing=True)
    first = world.ask(14, 18, first=100)
    world.executor.step(world.it)
    second = world.ask(13, 18, first=100)
    world.until_preempted(second)
    (out,) = world.outs
    assert second.swapped is not None and second.swapped.first == 3
    assert len(out.pages) == -(-second.swapped.tokens // PAGE) - 3
    world.it.requests.cancel(first.key)
    others = [world.ask(24, 4, first=500 * n, newcomer=True) for n in (1, 2)]
    world.finish(second, *others)
    (back,) = world.backs
    assert back.copy == out.copy and back.first == 0 and len(back.pages) == len(out.pages)
    assert world.it.stats.recomputed_tokens == 0


def test_held_beginnings_do_not_keep_others_from_running() -> None:
    """A sequence alone may take all pages: a swapped one loses its beginning, and computes it again."""
    world = World(pages=9, sharing=True)
    first = world.ask(14, 23, first=100)
    world.executor.step(world.it)
    second = world.ask(13, 18, first=100)
    world.until_preempted(second)
    assert second.swapped is not None and second.swapped.first == 3
    (own,) = world.outs
    world.it.requests.cancel(first.key)
    third = world.ask(20, 17, first=500, newcomer=True)
    world.finish(second, third)
    assert world.it.stats.recomputed_tokens > 0 and own.copy not in {back.copy for back in world.backs}


def test_pages_that_are_still_there_are_not_read() -> None:
    """Its own full pages have names, and the pages that it needs go to nobody while it waits."""
    world = World(pages=10, sharing=True)
    first, second = world.pair()
    world.it.requests.cancel(first.key)
    world.finish(second)
    out = world.outs[0]  # others are of its pages that nobody reads
    backs = [back for back in world.backs if back.copy == out.copy]
    assert sum(len(back.pages) for back in backs) < len(out.pages)
    assert world.it.stats.recomputed_tokens == 0


def test_a_failure_is_answered_by_computing_and_by_a_pause() -> None:
    world = World()
    failing = [True]
    world.executor._loses = lambda move: failing[0]
    world.finish(*world.pair())
    stats = world.it.stats
    assert (len(world.outs), stats.swap_failures) == (1, 1) and stats.recomputed_tokens > 0
    failing[0] = False
    world.finish(*world.pair())
    assert len(world.outs) == 1, "the disk may still be full"
    world.executor.skip(61)
    world.finish(*world.pair())
    assert len(world.outs) > 1 and world.it.stats.swapped_in_pages > 0


def _again_after_others(world: World, others: int = 6) -> Sequence:
    """The same prompt of five full pages again, after answers that took all pages one after the other."""
    world.finish(world.ask(21, 2, first=100))
    for n in range(1, others + 1):
        world.finish(world.ask(30, 2, first=500 * n))
    again = world.ask(21, 2, first=100)
    world.finish(again)
    return again


def test_prefixes_are_read_from_a_fast_tier() -> None:
    world, slow = World(sharing=True), World(sharing=True, seconds=SLOW)
    again = _again_after_others(world)
    assert again.cached == 20 and [len(back.pages) for back in world.backs] == [1] * 5
    assert _again_after_others(slow).cached == 0 and not slow.outs
    rows, computed = ([one.it.stats.prefill_tokens, one.it.stats.decode_tokens] for one in (world, slow))
    assert sum(rows) == sum(computed) - 20  # the last token of the prompt is a decode row
    prefixes = world.it.caches.first.prefixes.swapped
    assert (prefixes.written, prefixes.read) == (len(world.outs), len(world.backs))
    assert world.it.stats.swapped_out_pages == len(world.outs) > 5 == world.it.stats.swapped_in_pages


def test_another_scope_finds_no_pages() -> None:
    world = World(sharing=True)
    _again_after_others(world)
    other = Request("r", tuple(range(100, 121)), SamplingParams(max_tokens=2), scope="another")
    sequence = world.it.requests.submit(other, world.executor.now)
    world.finish(sequence)
    assert sequence.cached == 0


def test_prefixes_make_room_for_preempted_sequences() -> None:
    """The least recently used pages go first; the tier is never fuller than it is large."""
    world = World(sharing=True, room=9)
    _again_after_others(world)
    assert world.swapping.copies.used == 9
    first, second = world.pair()
    assert second.swapped is not None and world.swapping.copies.used <= 9
    world.finish(first, second)
    assert second.swapped is None and world.it.stats.recomputed_tokens == 0


def test_prefixes_that_cannot_be_read_are_computed() -> None:
    for fails in (SwapOut, SwapIn):
        world = World(sharing=True)
        world.executor._loses = lambda move, kind=fails: isinstance(move, kind)  # type: ignore[misc]
        _again_after_others(world)
        assert world.it.stats.swap_failures > 0
        assert bool(world.backs) is (fails is SwapIn)


def test_who_is_cancelled_while_its_prefix_is_read_leaves_nothing_behind() -> None:
    for under_way in (False, True):
        world = World(sharing=True)
        _again_after_others(world)
        for n in range(1, 7):
            world.finish(world.ask(30, 2, first=500 * n))
        again = world.ask(21, 2, first=100)
        plan = world.it.plan(world.executor.now).only
        assert again.loading and plan.swap_in and not plan.inference
        world.executor.launch(plan)
        if not under_way:
            result = world.executor.collect()
            assert result is not None
            apply(world.it, result, world.executor.now)
        world.it.requests.cancel(again.key)
        if under_way:
            result = world.executor.collect()
            assert result is not None
            apply(world.it, result, world.executor.now)
        world.finish(world.ask(21, 2, first=100))


def test_prefixes_that_nobody_reads_are_written_no_longer() -> None:
    """With a tier that is hardly faster than computing, after a few pages that were written for nothing."""
    world = World(sharing=True, seconds=added_seconds(CostModel(), 0, PAGE) / 10)
    prefixes = world.it.caches.first.prefixes.swapped
    for n in range(1, 40):
        world.finish(world.ask(30, 2, first=100 * n))
    assert 0 < prefixes.written < 39 * 7 / 2 and not prefixes.read
