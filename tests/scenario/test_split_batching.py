"""A base executor's batching on a scripted clock (Symbiosis, 3.7 and 4.5).

A product takes a millisecond and a hundredth for each row, where a test does not say otherwise. All times are
in milliseconds but for the cap, which is in seconds as everywhere.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest

from coserve.split.batching import Batching, BatchingConfig
from coserve.split.clients import ACTIVE_SECONDS
from coserve.split.key_shares import FADE_SECONDS
from coserve.split.messages import WorkClass
from coserve.split.work import AGE_SECONDS, Work
from split_clock import LAYERS, Caller, SplitWorld
from timetable import table

MODES = get_args(Batching)


def played(config: BatchingConfig, *callers: Caller, **costs: float) -> SplitWorld:
    world = SplitWorld(config, **costs)  # type: ignore[arg-type]
    world.know()
    world.play(*callers)
    return world


def opportunistic(factor: float, cap: float = 100.0) -> BatchingConfig:
    return BatchingConfig("opportunistic", factor, cap)


def test_clients_that_move_together_wait_for_each_other() -> None:
    """b takes 0.4 ms longer for its own part. In the first pass nobody knows that it comes."""
    world = played(opportunistic(0.5), Caller("a", 1, 0.1, 3), Caller("b", 1, 0.5, 3), per_row=0.0)
    assert world.lines == table(
        """
        0.1-1.1 f0: a
        1.1-2.1 f0: b
        2.1-3.1 f1: a
        3.1-4.1 f1: b
        4.1-5.1 f2: a
        5.1-6.1 f2: b
        6.1-7.1 f3: a
        7.1-8.1 f3: b
        8.1-9.1 f0: a
        9.1-10.1 f0: b    # a has called f1 at 9.2; b, which is behind, goes first
        10.6-11.6 f1: a b # a waits half of its product's time for b
        12.1-13.1 f2: a b
        13.6-14.6 f3: a b
        15.1-16.1 f0: a b
        16.6-17.6 f1: a b
        18.1-19.1 f2: a b
        19.6-20.6 f3: a b
        """
    )


@pytest.mark.parametrize("factor", [0.0, 0.3])
def test_none_waits_for_one_that_comes_too_late(factor: float) -> None:
    world = played(opportunistic(factor), Caller("a", 1, 0.1, 6), Caller("b", 1, 0.5, 6), per_row=0.0)
    assert world.idle == 0


@pytest.mark.parametrize("rows", [1, 200])
def test_a_call_waits_for_a_part_of_what_company_spares_it(rows: int) -> None:
    """Half of the millisecond that reads the weights, whatever its rows add. The other one comes 0.4 or 1 ms
    later."""
    for later, is_together in ((0.4, True), (1.0, False)):
        world = played(opportunistic(0.5), Caller("a", rows, 0.1, 6), Caller("b", 1, 0.1 + later, 6))
        together = sum(len(names) == 2 for *_, names in world.batches[-8:])
        assert (together > 4) is is_together, world.lines


def test_a_pass_waits_no_longer_than_the_cap() -> None:
    world = SplitWorld(opportunistic(1.0, 0.0005))
    world.know()
    a, b = Caller("a", 1, 0.1, 8), Caller("b", 1, 0.4, 8)
    world.play(a, b)
    assert a.account is not None and b.account is not None
    assert 0.0003 < a.account.held <= 8 * 0.0005 + 1e-9  # eight passes
    assert b.account.held <= 8 * 0.0005 + 1e-9


def test_one_client_alone_never_waits_and_none_waits_for_one_that_is_gone() -> None:
    alone = played(opportunistic(10.0), Caller("a", 100, 0.2, 5))
    assert alone.idle == 0
    silent = Caller("silent", 1, lambda: 0.2, 2)  # then it stays connected
    gone = Caller("gone", 1, 0.2, 100, leaves=12.0)
    world = played(opportunistic(10.0), Caller("a", 1, 0.2, 30), silent, gone)
    late = [names for begin, *_, names in world.batches if begin > 20]
    assert late and all(names == ["a"] for names in late)
    begins = [begin for begin, *_ in world.batches if begin > 20]
    assert max(y - x for x, y in itertools.pairwise(begins)) < 1.01 + 0.2 + 1e-6


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (10, "151-151.2 f0: c / 153.7-173.8 f3: a b"),
        (8000, "151-161.1 f3: a / 161.1-171.2 f3: b"),  # it would take 80 ms, so a stops waiting
    ],
)
def test_a_call_that_is_ready_goes_first_if_it_ends_in_time(rows: int, wanted: str) -> None:
    """From 150.2 on a waits 4 ms at most for b, which comes at 153.7; c, which trains, calls at 151."""
    pair = Caller("a", 1000, 0.5, 6), Caller("b", 1000, 4.0, 6)
    other = Caller("c", rows, 100.0, 1, "training", 51.0)
    world = played(opportunistic(40.0), *pair, other, fixed=0.1)
    assert " / ".join(world.lines).partition("129.6-149.7 f2: a b / ")[2].startswith(wanted)


def test_lockstep_has_all_active_clients_in_each_product() -> None:
    callers = [Caller(f"c{number}", number + 1, 0.1 * (number + 1), 5) for number in range(4)]
    callers.append(Caller("late", 1, 0.1, 3, begins=7.0))
    world = played(BatchingConfig("lockstep"), *callers)
    assert Counter(len(names) for *_, names in world.batches)[5] == 3 * LAYERS  # once the late one is there
    assert sum(len(names) < 4 for *_, names in world.batches) == 2  # in the very first product


def test_lockstep_waits_for_a_dead_or_slow_client_a_bounded_time() -> None:
    slow = Caller("slow", 1, 2500.0, 3)
    world = played(BatchingConfig("lockstep"), Caller("a", 1, 0.1, 10), slow, fixed=0.1)
    begins = [begin for begin, *_, names in world.batches if "a" in names]
    assert len(begins) == 10 * LAYERS
    assert max(y - x for x, y in itertools.pairwise(begins)) <= 1e3 * ACTIVE_SECONDS + 0.5
    gone = Caller("gone", 1, 0.1, 100, leaves=3.0)
    world = played(BatchingConfig("lockstep"), Caller("a", 1, 0.1, 40), gone, fixed=0.1)
    begins = [begin for begin, *_, names in world.batches if "a" in names and begin > 3.5]
    assert max(y - x for x, y in itertools.pairwise(begins)) < 0.3


def test_lockstep_does_not_wait_between_directions() -> None:
    world = played(
        BatchingConfig("lockstep"), Caller("t", 100, 0.1, 4, "training"), Caller("a", 1, 0.1, 12), fixed=0.01
    )
    forward = [names for _, _, product, names in world.batches if product.startswith("f")]
    assert sum(len(names) == 2 for names in forward) == 4 + 3 * 3  # a is met on its way where t begins again
    assert world.idle < 1.0


@pytest.mark.parametrize("mode", MODES)
def test_training_is_not_starved_by_inference_that_saturates_the_executor(mode: Batching) -> None:
    answers = [Caller(f"a{number}", 1, 1.0, 800) for number in range(5)]
    training = Caller("t", 500, 1.0, 1, "training")
    played(BatchingConfig(mode), *answers, training, fixed=5.0, per_row=0.1)
    assert len(training.answers) == 2 * LAYERS
    times = [0.0, *(time for time, _ in training.answers)]
    assert max(y - x for x, y in itertools.pairwise(times)) < 1e3 * AGE_SECONDS + 200
    assert min(caller.ended for caller in answers) > times[-1]


def drawn(draws: random.Random) -> list[Caller]:
    """Clients of all sorts, some of which leave in the middle."""

    def think(mean: float) -> Callable[[], float]:
        return lambda: draws.uniform(0.5, 1.5) * mean

    return [
        Caller(
            f"c{number}",
            draws.choice((1, 1, 4, 64, 500)),
            think(draws.choice((0.1, 1.0, 10.0, 500.0))),
            draws.randint(1, 8),
            draws.choice(("inference", "training")),
            draws.uniform(0, 50),
            leaves=draws.choice((float("inf"), float("inf"), draws.uniform(0, 100))),
        )
        for number in range(draws.randint(1, 8))
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", range(8))
def test_every_call_is_answered_once_and_none_waits_too_long(mode: Batching, sample: int) -> None:
    draws = random.Random()
    factor, cap = draws.choice((0.25, 1.0, 3.0)), draws.choice((0.0005, 0.05))
    callers = drawn(draws)
    world = SplitWorld(BatchingConfig(mode, factor, cap), draws.choice((0.1, 3.0)), 0.001, 1000)
    taken: list[Work] = []
    poll = world.queues.poll

    def noted() -> tuple[list[Work], float]:
        works, again = poll()
        taken.extend(works)
        assert works or again > world.now / 1e3  # else the executor would spin
        assert sum(work.call.rows for work in works) <= 1000 or len(works) == 1
        assert len({work.product for work in works}) <= 1
        assert len({work.client for work in works}) == len(works) or mode == "none"
        return works, again

    world.queues.poll = noted  # type: ignore[method-assign]
    world.play(*callers)
    assert len(set(map(id, taken))) == len(taken)
    for caller in callers:
        if caller.leaves == float("inf"):
            assert len(caller.answers) == caller.passes * LAYERS * (1 + (caller.work == "training"))
    assert all(client.waiting_calls == client.waiting_rows == 0 for client in world.queues.status()[1])
    if mode == "opportunistic":
        for work in taken:
            assert work.own_pass.waited <= cap + 1e-9
    elif mode != "lockstep":
        assert world.idle == 0


def rate(mode: Batching, callers: list[Caller], fixed: float, until: float = 600.0) -> tuple[float, float]:
    """Rows a millisecond, and calls in a product."""
    world = SplitWorld(BatchingConfig(mode), fixed, 0.002)
    world.play(*callers, until=until)
    rows = sum(len(caller.answers) * caller.rows for caller in callers)
    return rows / until, sum(len(names) for *_, names in world.batches) / len(world.batches)


def test_opportunistic_batching_is_at_least_as_good_as_the_others() -> None:
    """Table 5's comparison: eight clients of 2 to 256 rows, with adapters of two sizes, then eight alike. The
    paper has 94 tokens/s without batching, 88 in lockstep and 103 opportunistically."""

    def different() -> list[Caller]:
        draws = random.Random(5)
        times = [(0.3 + 0.008 * 2**n) * (1 + 0.5 * (n % 2)) for n in range(1, 9)]
        return [
            Caller(f"c{n}", 2**n, lambda mean=mean: draws.uniform(0.7, 1.3) * mean, 10**6)  # type: ignore[misc]
            for n, mean in enumerate(times, 1)
        ]

    def alike() -> list[Caller]:
        draws = random.Random(6)
        return [
            Caller(f"c{n}", 1, lambda: draws.uniform(0.2, 0.4), 10**6, begins=draws.random())
            for n in range(8)
        ]

    for callers in (different, alike):
        found = {mode: rate(mode, callers(), 0.25) for mode in MODES}
        best = found["opportunistic"][0]
        assert best > 1.2 * found["none"][0]
        assert best > 0.97 * max(rows for rows, _ in found.values()), found
        assert found["none"][1] == 1 < found["waiting"][1] < found["opportunistic"][1] < found["lockstep"][1]
    assert rate("opportunistic", different(), 0.25)[0] > 1.3 * rate("lockstep", different(), 0.25)[0]


def shared(mode: Batching, keys: tuple[str, str], rows: tuple[int, int], kind: WorkClass) -> list[int]:
    """Rows that ten clients got beside one, and that one, in two seconds; each has a key."""
    many = [Caller(f"m{n}", rows[0], 0.3, 10**6, kind, begins=0.1 * n, key=keys[0]) for n in range(10)]
    one = Caller("one", rows[1], 0.3, 10**6, kind, key=keys[1])
    world = SplitWorld(BatchingConfig(mode), 0.2, 0.01)
    world.know()
    world.play(*many, one, until=2000.0)
    return [sum(len(caller.answers) * caller.rows for caller in callers) for callers in (many, [one])]


@pytest.mark.parametrize("kind", get_args(WorkClass))
@pytest.mark.parametrize("mode", ["opportunistic", "waiting", "none"])
def test_ten_connections_with_one_key_get_no_more_than_one_with_another(
    mode: Batching, kind: WorkClass
) -> None:
    """A product of its 200 rows takes 2.2 ms, and then it needs 0.3 ms until it calls again."""
    many, one = shared(mode, ("theirs", "mine"), (200, 200), kind)
    assert one > 0.7 * many, (many, one)
    as_connections, alone = shared(mode, ("theirs", "theirs"), (200, 200), kind)
    assert alone < 0.2 * as_connections  # each connection one share
    assert many + one > 0.88 * (as_connections + alone)  # one product of eleven calls takes 8 % less a call


@pytest.mark.parametrize("mode", ["opportunistic", "waiting"])
def test_clients_with_a_key_each_meet_as_those_with_one_key(mode: Batching) -> None:
    """A small one has had far less than a large one, whose calls are nevertheless not held up: each of them
    has one at a time."""
    rows = []
    for is_keyed in (False, True):
        draws = random.Random(5)
        callers = [
            Caller(f"c{n}", 2**n, partial(draws.uniform, 0.3, 3.0), 10**6, key=str(n * is_keyed))
            for n in range(1, 9)
        ]
        world = SplitWorld(BatchingConfig(mode), 1.25, 0.002)
        world.play(*callers, until=2000.0)
        rows.append(sum(len(caller.answers) * caller.rows for caller in callers))
    assert rows[0] == rows[1]


def test_a_key_whose_calls_wait_alone_is_as_if_there_were_no_keys() -> None:
    """The other one has a connection that calls nothing, and before that one that had half a second."""

    def lines(*others: Caller) -> list[str]:
        callers = [Caller(f"c{n}", 4**n, 0.1 * (n + 1), 6, begins=1000.0, key="theirs") for n in range(4)]
        return [line for line in played(opportunistic(1.0), *callers, *others).lines if "c" in line]

    had = Caller("before", 2000, 0.0, 5, key="mine")
    silent = Caller("silent", 1, 0.1, 0, key="mine")
    assert lines(had, silent) == lines(silent) == lines()


def test_what_a_key_has_had_is_forgotten() -> None:
    """One that had the executor alone for ten seconds waits for a newcomer, which takes all of it, less than
    one second."""
    old = [Caller(f"o{n}", 100, 0.0, 10**6, key="old") for n in range(4)]
    new = [Caller(f"n{n}", 100, 0.0, 10**6, begins=10_000.0, key="new") for n in range(4)]
    world = SplitWorld(BatchingConfig("none"))
    world.know()
    world.play(*old, *new, until=14_000.0)
    begins = [begin for begin, _, _, names in world.batches if begin > 9_990 and names[0].startswith("o")]
    longest = max(y - x for x, y in itertools.pairwise(begins))
    assert 300 < longest < 1000 * FADE_SECONDS
    late = Counter(names[0][0] for begin, *_, names in world.batches if begin > 12_000)
    assert late["o"] == pytest.approx(late["n"], rel=0.1)


@pytest.mark.parametrize("sample", range(2))
def test_every_key_goes_on_however_many_connections_others_have(sample: int) -> None:
    draws = random.Random()
    callers = [
        Caller(
            f"{key}{number}",
            draws.choice((1, 16, 300)),
            draws.choice((0.0, 0.3, 3.0)),
            10**6,
            draws.choice(("inference", "training")),
            draws.uniform(0, 100),
            key=key,
        )
        for key in "abcdefgh"
        for number in range(draws.choice((1, 1, 8)))
    ]
    world = SplitWorld(BatchingConfig("opportunistic"), 1.0, 0.01)
    world.play(*callers, until=8_000.0)
    for caller in callers:
        times = [caller.begins, *(time for time, _ in caller.answers), 8_000.0]
        assert max(y - x for x, y in itertools.pairwise(times)) < 4000, caller.name
