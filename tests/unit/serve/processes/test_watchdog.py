"""The watchdog on a scripted clock: what counts as hanging, and what does not."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from coserve.serve.processes.watchdog import LOOK_SECONDS, START_SECONDS, STOPPED_SECONDS, Watchdog


@dataclass(eq=False)
class Child:
    """As much of a process as the watchdog knows."""

    name: str = "engine"
    heard: float = 0.0
    beats_itself: bool = True
    stopped: float | None = None
    has_ended: bool = False
    is_doomed: bool = False

    def excuse(self, seconds: float, now: float) -> None:
        self.heard = min(self.heard + seconds, now)
        if self.stopped is not None:
            self.stopped = min(self.stopped + seconds, now)

    def stopped_since(self, now: float) -> float | None:
        return self.stopped


class Machine:
    """Time, and children that beat as long as it runs."""

    def __init__(self, *children: Any, seconds: float = 8.0) -> None:
        self.now = 0.0
        self.children = children
        self.watchdog = Watchdog(seconds, clock=lambda: self.now)

    def runs(self, seconds: float, silent: tuple[Any, ...] = (), look: float = LOOK_SECONDS) -> Any:
        """The first that is found to hang, and when; None if none is."""
        end = self.now + seconds
        while self.now < end:
            self.now += look
            for child in self.children:
                if child not in silent:
                    child.heard = self.now
            if found := self.watchdog.look(self.children):
                return [child for child, _ in found], self.now, [why for _, why in found]
        return None


def test_silence_is_found_within_its_time_and_beating_is_not() -> None:
    one, other = Child(), Child("API")
    machine = Machine(one, other)
    assert machine.runs(600) is None
    (found, when, whys) = machine.runs(60, silent=(one,))
    assert found == [one] and 8 <= when - 600 <= 9 and whys == ["it gave no sign of life for 8 s"]


def test_a_stopped_one_is_found_sooner_even_while_it_starts() -> None:
    one = Child(beats_itself=False)
    machine = Machine(one)
    machine.runs(10)
    one.stopped = machine.now
    found, when, whys = machine.runs(60, silent=(one,))
    assert found == [one] and STOPPED_SECONDS <= when - 10 <= STOPPED_SECONDS + 1 and "stopped" in whys[0]


def test_a_start_may_be_silent_for_longer() -> None:
    one = Child(beats_itself=False)
    machine = Machine(one)
    assert machine.runs(START_SECONDS - 1, silent=(one,)) is None
    assert machine.runs(2, silent=(one,)) is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_that_sleeps_or_is_overloaded_ends_nobody(seed: int) -> None:
    """The supervisor runs when it runs, its children beat when they run, and both are kept from it at random,
    by seconds as well as by days."""
    draw = random.Random(seed)
    one = Child()
    machine = Machine(one)
    for _ in range(200):
        machine.now += draw.choice((1.0, 7.0, 30.0, 86400.0)) * draw.random()  # nobody ran
        one.stopped = machine.now - draw.random() if draw.random() < 0.1 else None
        assert not machine.watchdog.look(machine.children)
        for _ in range(draw.randrange(1, 6)):  # of up to 0.5 s each, until the child's turn comes
            machine.now += LOOK_SECONDS * draw.random()
            assert not machine.watchdog.look(machine.children)
        one.heard, one.stopped = machine.now, None


def test_what_really_hangs_is_found_after_a_sleep_too() -> None:
    one = Child()
    machine = Machine(one)
    machine.runs(10)
    machine.now += 86400
    found, when, _ = machine.runs(60, silent=(one,))
    assert found == [one] and when - 86410 <= 9


def test_a_kind_that_was_ended_gets_twice_the_time_and_loses_it_again() -> None:
    times = []
    machine = Machine()
    for _ in range(6):
        child = Child(heard=machine.now)
        machine.children = (child,)
        began = machine.now
        _, when, _ = machine.runs(1000, silent=(child,))
        times.append(round(when - began))
    assert times == [8, 16, 32, 64, 128, 128]
    machine.children = ()
    machine.runs(700)
    child = Child(heard=machine.now)
    machine.children, began = (child,), machine.now
    assert round(machine.runs(1000, silent=(child,))[1] - began) == 8


def test_none_is_ended_twice_nor_where_there_is_no_watchdog() -> None:
    gone, doomed, one = Child(has_ended=True), Child(is_doomed=True), Child()
    assert Machine(gone, doomed).runs(100, silent=(gone, doomed)) is None
    assert Machine(one, seconds=0).runs(1000, silent=(one,)) is None
