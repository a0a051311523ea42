"""Common prefixes of prompts are computed once: pages found, pages not found, and pages written."""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from coserve.core.events import TokenEvent
from coserve.core.plan import BasePlan
from coserve.core.request import Request, SamplingParams, VersionTraits
from coserve.core.sequence import Direction, MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.policies.base import View
from coserve.schedule.prefixes import page_name, root
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor, next_token, virtual_tokens
from steps import apply

PAGE = 4
TEXT = tuple(range(100, 140))


class World:
    """A scheduler that shares, its pages, and the strict executor."""

    def __init__(self, pages: int = 64, sharing: bool = True, **limits: float) -> None:
        self.pool = PagePool(pages, PAGE)
        config = SchedulerConfig(layers=4, max_positions=256, prefix_sharing=sharing, **limits)  # type: ignore[arg-type]
        self.it = Scheduler(BaseCache(config, self.pool), CostModel(), make_policy("hybrid"))
        self.executor = ScriptedExecutor(PAGE)
        self.events: list[TokenEvent] = []

    def submit(self, prompt: Iterable[int], answer: int = 1, **fields: object) -> Sequence:
        sampling = SamplingParams(max_tokens=answer, prompt_logprobs=fields.pop("scored", None))  # type: ignore[arg-type]
        request = Request("r", tuple(prompt), sampling, arrival=self.executor.now, **fields)  # type: ignore[arg-type]
        return self.it.requests.submit(request, self.executor.now)

    def step(self) -> BasePlan:
        self.events += [e for e in self.executor.step(self.it) if isinstance(e, TokenEvent)]
        return self.executor.plans[-1]

    def run(self) -> None:
        while self.it.has_work:
            self.step()

    def answer(self, prompt: Iterable[int], answer: int = 1, **fields: object) -> Sequence:
        """Alone, to its end; the answer is the one of a fake that has never seen anything."""
        sequence = self.submit(prompt, answer, **fields)
        self.run()
        request, wanted = sequence.request, []
        for _ in range(answer):
            virtual = virtual_tokens(request.adapter or "", request.traits.virtual)
            wanted.append(next_token([*virtual, *request.prompt, *wanted], 1000))
        assert sequence.output == wanted
        return sequence

    def rows(self) -> int:
        """Inference rows that have passed so far."""
        return sum(segment.length for plan in self.executor.plans for segment in plan.inference)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (TEXT[:20], TEXT[:30], 20),  # all its pages are full
        (TEXT[:19], TEXT[:30], 16),  # the last one is not
        (TEXT[:30], (*TEXT[:10], 7, 7, 7, 7), 8),  # they part in the middle of a page
        (TEXT[:30], TEXT[:28], 27),  # one row must say what follows
        (TEXT[:30], TEXT[:8], 7),
        (TEXT[:8], TEXT[:1], 0),
        (TEXT[:3], TEXT[:9], 0),
        (TEXT, (1, *TEXT), 0),  # the same pages at other places are others
        (TEXT, (*TEXT[4:8], *TEXT[:4], *TEXT[8:]), 0),
    ],
)
def test_a_prompt_finds_the_pages_that_it_begins_with(
    before: tuple[int, ...], after: tuple[int, ...], found: int
) -> None:
    world = World()
    assert world.answer(before).cached == 0
    passed = world.rows()
    assert world.answer(after).cached == found
    assert world.rows() - passed == len(after) - found
    stats = world.it.stats
    assert (stats.asked_tokens, stats.found_tokens) == (len(before) + len(after), found)
    assert [event.cached for event in world.events] == [0, found]


def test_nothing_is_found_where_nothing_is_shared() -> None:
    world = World(sharing=False)
    assert [world.answer(TEXT).cached for _ in range(2)] == [0, 0]
    assert world.pool.cached_count == 0 and world.rows() == 2 * len(TEXT)


def test_a_chat_finds_its_own_answers() -> None:
    world = World()
    first = world.answer(TEXT[:10], answer=9)
    turn = (*TEXT[:10], *first.output, 5, 5)
    assert world.answer(turn).cached == 16  # of 18 computed: the last token of an answer never is
    assert [event.cached for event in world.events] == [0] * 9 + [16]
    world.answer((*turn, 6), answer=3)
    assert [event.cached for event in world.events[10:]] == [20, 0, 0], "told once"


def test_requests_that_run_share_what_is_full_so_far() -> None:
    world = World(max_prefill_rows=16, min_prefill_rows=1)
    world.submit(TEXT[:30], answer=20)
    world.step()
    second = world.submit((*TEXT[:18], 9, 9), answer=20)
    world.step()
    first = world.it.requests.running[0]
    assert first.pages[:4] == second.pages[:4] and second.cached == 16 and second.shared == 4
    assert not {*first.pages[4:]} & {*second.pages[4:]}
    assert [world.pool.readers(page) for page in first.pages[:5]] == [2, 2, 2, 2, 1]
    world.run()
    assert world.pool.free_count == 64


def test_a_page_that_others_read_is_copied_before_it_is_written() -> None:
    world = World()
    first = world.submit(TEXT[:8], answer=9)
    world.step()
    second = world.submit(TEXT[:8], answer=9)
    plan = world.it.plan(world.executor.now).only
    assert (second.cached, second.shared, second.template) == (7, 1, first.pages[1])
    apply(world.it, world.executor.run(plan), world.executor.now)
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    assert world.pool.readers(first.pages[1]) == 1
    world.run()
    assert first.output == second.output


def test_a_page_that_nobody_reads_is_taken_over() -> None:
    """It loses its name while it is written, and has it again in the next step."""
    world = World()
    world.answer(TEXT[:8])
    kept = dict(world.pool._names)
    second = world.submit(TEXT[:8], answer=9)
    plan = world.it.plan(world.executor.now).only
    assert (second.cached, second.shared, second.template) == (7, 1, second.pages[1])
    assert {*second.pages[:2]} == {*kept} and not world.pool.is_named(second.pages[1])
    apply(world.it, world.executor.run(plan), world.executor.now)
    assert dict(world.pool._names) == kept
    world.run()
    assert world.answer(TEXT[:8], answer=9).output == second.output


def test_two_at_once_do_not_take_over_the_same_page() -> None:
    world = World()
    world.answer(TEXT[:8])
    pair = [world.submit(TEXT[:8], answer=5) for _ in range(2)]
    world.step()
    assert [s.cached for s in pair] == [7, 4]
    assert pair[0].pages[0] == pair[1].pages[0] and pair[0].pages[1] != pair[1].pages[1]
    world.run()
    assert pair[0].output == pair[1].output


SEPARATE: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {"scope": "tenant"}),
    ({"scope": "one"}, {"scope": "two"}),
    ({"scope": None}, {"scope": None}),
    ({}, {"scope": None}),
    ({"scope": None}, {}),
    ({}, {"adapter": "a@1"}),
    ({"adapter": "a@1"}, {"adapter": "a@2"}),
    ({"adapter": "a@1", "traits": VersionTraits(4)}, {"adapter": "b@1", "traits": VersionTraits(4)}),
]


@pytest.mark.parametrize(("one", "other"), SEPARATE)
def test_who_has_nothing_in_common(one: dict[str, object], other: dict[str, object]) -> None:
    """Tenants, adapters, their versions; and who shares nothing leaves nothing either."""
    world = World()
    world.answer(TEXT, **one)
    assert world.answer(TEXT, **other).cached == 0
    for fields in (one, other):
        again = world.answer(TEXT, **fields).cached
        assert again == (0 if fields.get("scope", "") is None else len(TEXT) - 1)


def test_names_are_of_all_that_keys_and_values_depend_on() -> None:
    one = Request("r", TEXT, scope="ab", adapter="c@1")
    others = [
        replace(one, **changed)
        for changed in ({"scope": "a"}, {"adapter": "d@1"}, {"traits": VersionTraits(3)})
    ]
    others += [replace(one, base="other"), replace(one, scope="abb", base="ase"), replace(one, adapter=None)]
    assert len({root(of) for of in [one, *others]}) == 7
    assert root(replace(one, id="s", prompt=(1,), arrival=9.0)) == root(one)
    names = {page_name(root(one), tokens) for tokens in ((1, 2), (2, 1), (1, 2, 0), (258,), (1, 1))}
    assert len(names) == 5 and page_name(root(one), (1, 2)) in names
    assert page_name(root(others[0]), (1, 2)) not in names


@pytest.mark.parametrize("virtual", [2, 4, 7])
def test_pages_that_begin_with_virtual_tokens_are_found_too(virtual: int) -> None:
    world = World()
    of = {"adapter": "a@1", "traits": VersionTraits(virtual)}
    world.answer(TEXT[:20], **of)
    assert world.answer((*TEXT[:18], 1, 2, 3), **of).cached == (virtual + 18) // 4 * 4 - virtual
    whole = 12 - virtual % 4
    assert world.answer(TEXT[:whole], **of).cached == whole - 1


def test_found_pages_outlive_the_virtual_tokens_before_them() -> None:
    """These are filled again, into other pages; what follows them is what it was."""
    world = World(pages=16)
    of = {"adapter": "a@1", "traits": VersionTraits(6)}
    world.answer(TEXT[:14], **of)
    first = world.pool.find(("virtual", "a@1", 0))
    assert first is not None
    world.pool.forget(first)
    again = world.answer(TEXT[:15], **of)
    assert again.cached == 14 and sum(len(plan.prefixes) for plan in world.executor.plans) == 2


def test_prompts_that_are_scored_are_read_whole_and_leave_what_they_computed() -> None:
    world = World()
    world.answer(TEXT)
    assert world.answer(TEXT, scored=0).cached == 0
    scored = [score for event in world.events for score in event.prompt_logprobs]
    assert len(scored) == len(TEXT) - 1
    fresh = World()
    fresh.answer(TEXT, scored=0)
    assert fresh.answer(TEXT).cached == len(TEXT) - 1


def test_preempted_sequences_find_their_own_pages() -> None:
    """Three of 28 tokens at their ends, in 16 pages: the last to come goes, and finds what is left."""
    world, plain = World(pages=16), World(pages=16, sharing=False)
    for it in (world, plain):
        asked = [it.submit((n, *TEXT[:7]), answer=21) for n in range(3)]
        it.run()
        for sequence in asked:
            wanted: list[int] = []
            for _ in range(21):
                wanted.append(next_token([*sequence.request.prompt, *wanted], 1000))
            assert sequence.output == wanted and sequence.cached == 0
        assert it.it.stats.preemptions >= 1 and it.it.stats.asked_tokens == 24
    assert world.rows() <= plain.rows() - 8


def test_cached_pages_stand_in_nobody_s_way() -> None:
    """Whatever lies in them, pages that nobody reads are free: as many enter, and nobody is preempted."""
    world = World(pages=12)
    for n in range(6):
        world.answer((n, *TEXT[:15]))
    assert (world.pool.free_count, world.pool.cached_count) == (12, 12)
    fresh = [world.submit((9 + n, *TEXT[:11]), answer=4) for n in range(3)]
    world.step()
    assert len(world.it.requests.running) == 3
    world.run()
    assert world.it.stats.preemptions == 0 and all(sequence.cached == 0 for sequence in fresh)


def test_what_was_used_least_recently_goes_first() -> None:
    world = World(pages=9)
    old, older = (1, *TEXT[:12]), (2, *TEXT[:12])
    world.answer(older)
    world.answer(old)
    assert world.answer((*older, 5)).cached == 12  # it is the younger one now
    world.answer((3, *TEXT[:15]))  # four pages; three have nothing in them
    assert world.answer((*older, 6)).cached == 12
    assert world.answer((*old, 6)).cached == 4, "two pages were needed: the last ones of the older text"


def test_what_a_prompt_would_find_may_go_while_others_enter() -> None:
    """It was counted when the step began to be planned; whoever enters before it may take a page of it."""
    world = World(pages=16)
    world.answer(TEXT[:20])
    world.answer((2, *TEXT[:19]))  # younger, so the first text's last page goes when seven are needed
    world.submit((1, *TEXT[:25]), answer=2)
    late = world.submit(TEXT[:20], answer=2)
    plan = world.step()
    assert [(s.start, s.length) for s in plan.inference] == [(0, 26), (16, 4)] and late.cached == 16
    world.run()


def test_predictions_know_what_is_found() -> None:
    """A prompt that lies in the cache costs what is left of it; more of them enter in one step."""
    world = World(max_prefill_rows=32)
    world.answer(TEXT[:32])
    asked = [world.submit((*TEXT[:32], n, n)) for n in range(8)]
    plan = world.it.plan(world.executor.now).only
    assert [segment.length for segment in plan.inference] == [2] * 8
    assert all(sequence.cached == 32 for sequence in asked)
    fresh = World()
    for n in range(8):
        fresh.submit((n, *TEXT[:33]))
    assert plan.predicted < fresh.it.plan(0.0).only.predicted / 2


def test_policies_see_what_is_left_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.answer(TEXT[:32])
    world.submit((*TEXT[:32], 1, 2))
    seen: list[int] = []

    def holds(view: View) -> bool:
        seen.extend(sequence.remaining for sequence in view.waiting)
        return False

    monkeypatch.setattr(world.it.policy, "holds", holds)
    world.step()
    assert seen == [2]


def test_who_waits_counts_only_what_it_would_have_to_compute() -> None:
    world = World(max_running=1, pages=64)
    world.answer(TEXT[:32])
    world.submit(TEXT[:3], answer=30)
    world.step()
    waiting = world.submit((*TEXT[:32], 1, 2), answer=2)
    world.step()
    assert not waiting.pages and (waiting.computed, waiting.remaining) == (32, 2)


def test_training_leaves_nothing_to_be_found() -> None:
    """Its keys and values belong to an activation store; no page is taken for them."""
    world = World()
    batch = MicroBatch(world.it.new_key(), "job", "a@0", (len(TEXT),), 4)
    world.it.training.add("job", [batch])
    world.run()
    assert world.executor.trained == {"job": len(TEXT)}
    assert {s.direction for plan in world.executor.plans for s in plan.training} >= {Direction.BACKWARD}
    assert (world.pool.free_count, world.pool.cached_count) == (64, 0)
    assert world.answer(TEXT, adapter="a@0").cached == 0
