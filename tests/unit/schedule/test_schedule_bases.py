"""One schedule of two bases: one queue and one ledger of time, pages and limits for each."""

import pytest

from bases import LAYERS, PAGE, SMALL, WIDE, TwoBases, request, two_costs
from coserve.core.events import TokenEvent
from coserve.core.plan import BaseResult, OffloadReads, StepResult, SwapIn, SwapOut, TrainingSegment
from coserve.core.request import FinishReason
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import OutOfPages, PromptTooLong
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import StepFeatures
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import INFINITE, Allowance
from coserve.schedule.training_packer import TrainingPacker
from scripted_executor import next_token


def batch(world: TwoBases, job: str, base: str, rows: int = 64) -> MicroBatch:
    return MicroBatch(world.it.new_key(), job, f"{job}@0", (rows,), LAYERS[base])


def test_answers_and_training_of_both_share_steps() -> None:
    world = TwoBases()
    sequences = [world.submit(request(base, answer=9)) for base in (SMALL, WIDE, SMALL, WIDE)]
    for base in (SMALL, WIDE):
        world.it.training.add(f"of {base}", [batch(world, f"of {base}", base)], base=base)
    world.drain()
    assert all(len(sequence.output) == 9 for sequence in sequences)
    for plan in world.plans[:9]:
        assert all(plan.bases[base].inference for base in (SMALL, WIDE))
    both = [plan for plan in world.plans if sum(bool(part.jobs) for part in plan.bases.values()) == 2]
    assert both, "no step trains on both"
    for base, executor in world.executors.items():
        assert executor.trained == {f"of {base}": 64} and executor.plans, "its executor has its part alone"


def test_pages_of_one_that_are_used_up_do_not_block_the_other() -> None:
    world = TwoBases(pages=4)
    first = world.submit(request(SMALL, prompt=12, answer=3))  # 14 tokens: all pages
    waits = world.submit(request(SMALL, prompt=12, answer=3, first=100))
    other = world.submit(request(WIDE, prompt=30, answer=3))
    world.step()
    assert first.pages and other.pages and not waits.pages, "the other one's enters behind the one that waits"
    world.drain()
    assert [len(one.output) for one in (first, waits, other)] == [3, 3, 3]


def test_a_sequence_takes_pages_from_others_of_its_base_alone() -> None:
    world = TwoBases(pages=5, wide_pages=7)
    small, wide = ([world.submit(request(base, 4, 13, n)) for n in (0, 50)] for base in (SMALL, WIDE))
    while not world.it.stats.preemptions:
        world.step()
    assert small[1].preemptions == 1, "the later one of its base, though others came later still"
    assert not any(one.preemptions for one in wide)
    world.drain()
    assert all(len(one.output) == 13 for one in (*small, *wide))
    assert all(pool.free_count == pool.pages for pool in world.pools.values())


def test_each_has_limits_of_its_own() -> None:
    world = TwoBases(wide_pages=10, wide={"max_positions": 64, "eos_token_ids": (1,)})
    with pytest.raises(PromptTooLong, match="64 positions"):
        world.submit(request(WIDE, prompt=62))
    with pytest.raises(OutOfPages, match="there are 10 in all"):
        world.submit(request(WIDE, prompt=50))
    long = world.submit(request(SMALL, prompt=62))
    assert not world.submit(request(SMALL, prompt=50)).is_finished
    room = world.it.requests.queues.room
    assert room(30, 0, WIDE) == 10 * PAGE - 30 + 1 and room(30, 0) == 64 * PAGE - 30 + 1
    world.drain()
    assert len(long.output) == 4


def test_tokens_that_end_an_answer_are_the_base_s() -> None:
    world = TwoBases()
    probe = world.submit(request(WIDE, answer=3))
    world.drain()
    ends = probe.output[1]
    world = TwoBases(wide={"eos_token_ids": (ends,)})
    own, other = (world.submit(request(base, answer=3)) for base in (WIDE, SMALL))
    events: list[TokenEvent] = []
    while world.it.has_work:
        events += [event for event in world.step() if isinstance(event, TokenEvent)]
    assert own.output == probe.output[:2] and own.finish_reason is FinishReason.STOP
    assert other.output == probe.output and other.finish_reason is FinishReason.LENGTH


def features(base: str, rows: int) -> StepFeatures:
    found = StepFeatures()
    found[base].add_inference(20, rows, 1, None)
    window = TrainingSegment(9, "j", "j@0", 0, 32, 99, Direction.BACKWARD, Span(0, 2), 2)
    found[base].add_training(window)
    found[base].add_update()
    return found


def test_seconds_of_bases_add_up() -> None:
    cost = two_costs()
    cost.bases[WIDE] = CostModel({name: 3 * weight for name, weight in cost.first.weights.items()})
    for rows in (1, 40):
        small, other = features(SMALL, rows), features(WIDE, rows)
        both = small.copy()
        both[WIDE] = other[WIDE].copy()
        assert cost.predict_features(other) == pytest.approx(3 * cost.predict_features(small))
        assert cost.predict_features(both) == pytest.approx(4 * cost.predict_features(small))
        assert both.copy()[WIDE].counted() == other[WIDE].counted()
        alone = 4 * cost.predict_features(small.without_rows)
        assert cost.predict_features(both.without_rows) == pytest.approx(alone)


def test_each_learns_from_its_own_seconds() -> None:
    cost = two_costs()
    both = features(SMALL, 8)
    both[WIDE] = features(WIDE, 8)[WIDE]
    usual = cost.predict_features(features(SMALL, 8))
    for _ in range(200):
        cost.observe(both, StepResult({SMALL: BaseResult(usual), WIDE: BaseResult(2 * usual)}))
    assert cost.predict_features(features(SMALL, 8)) == pytest.approx(usual, rel=0.02)
    assert cost.predict_features(features(WIDE, 8)) == pytest.approx(2 * usual, rel=0.05)
    before = cost.first.weights
    for _ in range(50):
        cost.observe(features(WIDE, 8), StepResult({WIDE: BaseResult(2 * usual)}))
    assert cost.first.weights == before, "steps of the other one alone teach it nothing"


def test_jobs_of_two_bases_are_no_window_group() -> None:
    """Windows of two jobs at one layer share its weights where they are of one base."""
    cost = two_costs()
    for bases, expected in (((SMALL, SMALL), ["a", "b"]), ((WIDE, WIDE), ["a", "b"]), ((SMALL, WIDE), [])):
        batches = [
            MicroBatch(key, job, f"{job}@0", (40,), LAYERS[base], base=base)
            for key, (job, base) in enumerate(zip("ab", bases, strict=True))
        ]
        builder = PlanBuilder(0.0)
        packer = TrainingPacker(builder, Allowance(INFINITE, 512), cost, SchedulerConfig(3, 512))
        assert packer.window_group(batches[0], batches) is bool(expected)
        assert [segment.job for segment in builder.training] == expected, bases


def answered(sequence: Sequence) -> bool:
    """Tells whether an answer is what it would be alone."""
    tokens = [*sequence.request.prompt]
    for _ in range(sequence.request.sampling.max_tokens):
        tokens.append(next_token(tokens, 1000))
    return tokens == [*sequence.request.prompt, *sequence.output]


def test_preempted_sequences_of_both_go_to_one_tier_and_come_back() -> None:
    world = TwoBases(10, 10, swap=100)
    asked = [world.submit(request(base, 12, 16, first)) for base in (SMALL, WIDE) for first in (100, 200)]
    world.drain()
    parts = [(base, part) for plan in world.plans for base, part in plan.bases.items()]
    outs = [(base, move) for base, part in parts for move in part.swap_out]
    backs = [(base, move) for base, part in parts for move in part.swap_in]
    assert {base for base, _ in outs} == {base for base, _ in backs} == {SMALL, WIDE}
    assert len({move.copy for _, move in outs}) == len(outs), (
        "whatever the base, a copy has a number of its own"
    )
    assert all(map(answered, asked)) and world.it.stats.recomputed_tokens == 0
    assert world.it.tier.used == 0 and not any(part._copies for part in world.executors.values())


def test_steps_of_one_base_do_not_wait_for_pages_of_another() -> None:
    """A base that has no rows while its pages move waits for them where no other has rows either."""
    world = TwoBases(64, 10, swap=100)
    world.executors[WIDE]._swap_seconds = (0.05, 0.05)
    wide = [world.submit(request(WIDE, 12, 16, first)) for first in (100, 200)]
    small = world.submit(request(SMALL, 6, 200))
    took = dict[bool, list[float]]({True: [], False: []})  # by whether the other base has rows
    while world.it.has_work:
        world.step()
        plan, result = world.plans[-1], world.results[-1]
        if WIDE in plan.bases and not plan.bases[WIDE].has_rows:
            took[small.finish_reason is None].append(result.bases[WIDE].seconds)
    assert took[True] and max(took[True]) < 0.01, "tokens of the other base come no later"
    assert all(map(answered, (small, *wide)))


def test_prefixes_of_one_make_room_for_the_other_s_sequences() -> None:
    world = TwoBases(10, 10, swap=12, sharing=True)
    for number in range(1, 6):
        world.submit(request(SMALL, 30, 2, 500 * number))
        world.drain()
    assert world.it.tier.used == 12, "bytes: a page of this base has one, of the other one two"
    first, second = (world.submit(request(WIDE, 12, 16, first)) for first in (100, 200))
    while not second.preemptions:
        world.step()
    assert second.swapped is not None and 2 * second.swapped.pages <= world.it.tier.used <= 12
    world.drain()
    assert answered(first) and answered(second) and world.it.stats.recomputed_tokens == 0
    assert world.it.tier.used == len(world.executors[SMALL]._copies) and not world.executors[WIDE]._copies


@pytest.mark.parametrize("fails", [SwapOut, SwapIn])
def test_copies_that_fail_are_computed_again(fails: type) -> None:
    """And no base makes further copies for a while: the disk is one."""
    world = TwoBases(10, 10, swap=100)
    world.executors[WIDE]._loses = lambda move: isinstance(move, fails)
    asked = [world.submit(request(base, 12, 16, first)) for base in (SMALL, WIDE) for first in (100, 200)]
    world.drain()
    assert world.it.stats.swap_failures == 1 and world.it.stats.recomputed_tokens > 0
    assert all(map(answered, asked)) and world.it.tier.used == 0 and world.it.tier.barred_until > world.now


def test_a_sequence_of_a_further_base_may_be_longer_than_its_pages() -> None:
    world = TwoBases(wide_pages=6, swap=60)
    with pytest.raises(OutOfPages, match="there are 6 in all, and 30 elsewhere"):
        world.submit(request(WIDE, prompt=31 * PAGE))
    long, other, small = (world.submit(request(*of, answer=4)) for of in ((WIDE, 90), (WIDE, 80), (SMALL, 6)))
    world.drain()
    assert all(map(answered, (long, other, small))) and world.it.tier.used == 0
    rows = [[one.key for one in plan.inference if one.offloaded] for plan in world.plans]
    assert {key for keys in rows for key in keys} == {long.key, other.key}
    assert max(len(keys) for keys in rows) == 1, "30 pages do not hold both at once"


def test_what_reading_elsewhere_takes_is_learned_by_the_base_that_reads() -> None:
    cost, read = two_costs(), StepFeatures()
    read[WIDE].add_inference(50, 1, 1, None, offloaded=True)
    before = cost.first.offload.token_seconds
    cost.observe(read, StepResult({WIDE: BaseResult(1.0, offload_reads=OffloadReads(99, 0.5))}))
    assert cost.bases[WIDE].offload.token_seconds == pytest.approx(0.01)
    assert cost.first.offload.token_seconds == before
