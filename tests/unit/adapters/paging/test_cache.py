"""Which items are in memory: a scripted mover, bytes that are small numbers, and no tensor."""

import random
from dataclasses import dataclass

import pytest

from coserve.adapters.paging.cache import AT_ONCE, AdapterCache, Place
from coserve.errors import OutOfMemory


@dataclass(frozen=True)
class Thing:
    key: str
    cost: int = 1


class Script:
    """Notes what is to be moved; `bring` says when something has arrived."""

    def __init__(self, room: int, *things: Thing) -> None:
        self.room = room
        self.said: list[str] = []
        self.under_way: list[str] = []
        self.it: AdapterCache[Thing] = AdapterCache(self, lambda: self.room)
        for thing in things:
            self.it.add(thing)

    def load(self, item: Thing) -> None:
        self.said.append(f"+{item.key}")
        self.under_way.append(item.key)

    def drop(self, item: Thing) -> None:
        self.said.append(f"-{item.key}")

    def bring(self) -> None:
        """Everything that is on its way arrives."""
        for key in self.under_way:
            self.it.arrived(key)
        self.under_way.clear()

    def use(self, *keys: str) -> None:
        """All of these are wanted, and come, one after the other."""
        for key in keys:
            assert self.it.advance([key]) == []
            self.bring()
            assert self.it.place(key) is Place.IN
            self.it.hold(key, 0), self.it.release(key, 0)
        self.said.clear()


def things(names: str, cost: int = 1) -> list[Thing]:
    return [Thing(name, cost) for name in names]


def test_what_is_not_wanted_stays_on_disk_and_what_is_comes_in() -> None:
    script = Script(2, *things("abc"))
    script.it.advance([])
    assert script.said == [] and not script.it.hold("a", 1)
    script.it.advance(["a"])
    assert script.said == ["+a"] and script.it.place("a") is Place.COMING and not script.it.hold("a", 1)
    script.it.advance(["a"])
    assert script.said == ["+a"], "once is enough"
    script.bring()
    assert script.it.hold("a", 1) and script.it.inside == ("a",) and script.it.used == 1


def test_the_least_recently_used_one_leaves() -> None:
    script = Script(3, *things("abcde"))
    script.use("a", "b", "c")
    script.it.hold("a", 1), script.it.release("a", 1)
    script.it.advance(["d"]), script.bring()
    assert script.said == ["-b", "+d"] and script.it.inside == ("c", "a", "d")
    script.it.advance(["e"])
    assert script.said[2:] == ["-c", "+e"]


def test_bytes_count_and_not_items() -> None:
    script = Script(10, Thing("a", 2), Thing("b", 3), Thing("c", 4), Thing("big", 6))
    script.use("a", "b", "c")
    assert script.it.used == 9
    script.it.advance(["big"])
    assert script.said == ["-a", "-b", "+big"] and script.it.used == 10


def test_what_is_held_or_pinned_stays() -> None:
    script = Script(3, *things("abcd"))
    script.use("a", "b", "c")
    script.it.hold("a", 1), script.it.pin("b")
    script.it.advance(["d"])
    assert script.said == ["-c", "+d"]
    assert script.it.hold("a", 2) and script.it.place("b") is Place.IN


def test_a_pinned_one_comes_in_unasked_and_after_what_is_wanted() -> None:
    script = Script(4, *things("abcd"))
    script.it.pin("d")
    script.it.advance(["a"])
    assert script.said == ["+a", "+d"]
    script.it.failed("d"), script.it.arrived("a")
    script.it.advance([])
    assert script.said == ["+a", "+d"], "one that failed is tried again when somebody asks"
    script.it.advance(["d"])
    assert script.said == ["+a", "+d", "+d"]


def test_only_so_many_are_on_their_way_and_they_come_in_order() -> None:
    script = Script(10, *things("abcdef"))
    script.it.advance(list("cafebd"))
    assert script.said == ["+c", "+a"] and len(script.said) == AT_ONCE
    script.it.arrived("c")
    script.it.advance(list("afebd"))
    assert script.said[2:] == ["+f"]


def test_a_claim_is_met_although_what_is_there_is_asked_for_without_end() -> None:
    """Two users of `a` and of `b` at any time: without a claim `c` would never get in."""
    script = Script(2, *things("abc"))
    script.use("a", "b")
    users, waited = {1: "a", 2: "b"}, 0
    for user, key in users.items():
        assert script.it.hold(key, user)
    for turn in range(20):
        script.it.advance(["c"])
        if script.said:
            break
        oldest = min(users)
        gone = users.pop(oldest)
        if script.it.hold(gone, 100 + turn):  # somebody else comes before the one who had it ends
            users[100 + turn] = gone
        else:
            waited += 1
        script.it.release(gone, oldest)
    assert script.said == ["-a", "+c"] and waited == 1
    assert script.it.hold("b", 999), "nobody else was kept from what is there"


def test_a_claim_closes_no_more_than_it_needs_and_only_the_least_recently_used() -> None:
    script = Script(4, *things("abcd"), Thing("big", 2))
    script.use("a", "b", "c", "d")
    for user, key in enumerate("abcd"):
        script.it.hold(key, user)
    script.it.advance(["big"])
    assert [script.it.hold(key, 9) for key in "abcd"] == [False, False, True, True]


def test_nothing_smaller_passes_a_claim() -> None:
    script = Script(4, *things("abcd"), Thing("big", 3), Thing("small"))
    script.use("a", "b", "c")
    for user, key in enumerate("abc"):
        script.it.hold(key, user)
    script.it.advance(["big", "small"])
    assert script.said == [], "one byte is free, and it is big's"
    script.it.release("a", 0), script.it.release("b", 1)
    script.it.advance(["big", "small"])
    assert script.said == ["-a", "-b", "+big"]


def test_what_is_wanted_more_urgently_is_not_closed_and_opens_again() -> None:
    script = Script(2, *things("abc"))
    script.use("a", "b")
    script.it.hold("a", 1), script.it.hold("b", 2)
    script.it.advance(["c"])
    assert not script.it.hold("a", 3)
    script.it.advance(["a", "c"])  # whoever wants a is more urgent than who wants c
    assert script.it.hold("a", 3) and not script.it.hold("b", 4)


def test_a_claim_that_is_given_up_opens_what_it_closed() -> None:
    script = Script(1, *things("ab"))
    script.use("a")
    script.it.hold("a", 1)
    script.it.advance(["b"])
    assert not script.it.hold("a", 2)
    script.it.advance([])
    assert script.it.hold("a", 2)


def test_a_pin_opens_what_a_claim_had_closed() -> None:
    script = Script(2, *things("abc"))
    script.use("a", "b")
    script.it.hold("a", 1), script.it.hold("b", 2)
    script.it.advance(["c"])
    script.it.pin("a")
    assert script.it.hold("a", 3)
    script.it.advance(["c"])
    assert script.it.hold("a", 4) and not script.it.hold("b", 4)


def test_one_for_which_there_is_never_room_is_refused_and_delays_nobody() -> None:
    script = Script(3, *things("ab"), Thing("big", 3))
    script.use("a")
    script.it.pin("a")
    ((key, error),) = script.it.advance(["big", "b"])
    assert key == "big" and isinstance(error, OutOfMemory)
    assert "1 bytes more than adapters may have beside 1 that are pinned" in str(error)
    assert script.said == ["+b"]


def test_one_that_failed_can_be_tried_again_and_its_bytes_are_free() -> None:
    script = Script(1, *things("ab"))
    script.it.advance(["a"])
    script.it.failed("a")
    assert script.it.used == 0 and script.it.place("a") is Place.OUT
    script.it.advance(["b"])
    assert script.said == ["+a", "+b"]


def test_one_that_is_forgotten_on_its_way_has_its_bytes_until_it_arrives() -> None:
    script = Script(2, *things("ab"))
    script.it.advance(["a"])
    script.it.forget("a")
    assert script.it.used == 1 and "a" not in script.it
    script.under_way.clear()
    assert script.it.arrived("a") is False and script.it.used == 0
    script.use("b")
    script.it.forget("b")
    assert script.it.used == 0 and script.it.inside == ()


def test_nobody_forgets_what_is_held() -> None:
    script = Script(1, *things("a"))
    script.use("a")
    script.it.hold("a", 1)
    with pytest.raises(AssertionError, match="held"):
        script.it.forget("a")


def test_others_get_what_nobody_uses_all_they_need_or_nothing() -> None:
    script = Script(4, *things("abcd"))
    script.use("a", "b", "c", "d")
    script.it.hold("b", 1), script.it.pin("d")
    script.it.shed(3)
    assert script.said == [], "a and c are not enough"
    script.it.shed(1)
    assert script.said == ["-a"]
    script.it.shed(1)
    assert script.said == ["-a", "-c"]


def test_less_room_than_before_is_kept_to_by_and_by() -> None:
    script = Script(4, *things("abcde"))
    script.use("a", "b", "c", "d")
    script.room = 2
    script.it.advance(["e"])
    assert script.said == ["-a", "-b", "-c", "+e"] and script.it.used == 2


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_bytes_are_kept_to_and_everybody_is_served(seed: int) -> None:
    draws = random.Random(seed)
    costs = {f"t{i}": draws.randint(1, 4) for i in range(12)}
    script = Script(9, *(Thing(key, cost) for key, cost in costs.items()))
    script.it.pin("t0")
    waiting: dict[int, str] = {}  # in order
    running: dict[int, tuple[str, int]] = {}
    came: dict[int, int] = {}
    slowest = 0
    for turn in range(1200):
        if turn < 800 and draws.random() < 0.7:
            waiting[turn] = f"t{min(int(draws.paretovariate(0.8)), 12) - 1}"
            came[turn] = turn
        for user, (key, end) in list(running.items()):
            if end <= turn:
                script.it.release(key, user)
                del running[user]
        for key in list(script.under_way):
            if draws.random() < 0.5:
                script.under_way.remove(key)
                if draws.random() < 0.1:
                    script.it.failed(key)
                else:
                    script.it.arrived(key)
        for user, key in list(waiting.items()):
            if script.it.hold(key, user):
                del waiting[user]
                running[user] = key, turn + draws.randint(1, 8)
                slowest = max(slowest, turn - came[user])
        assert script.it.advance(list(waiting.values())) == []
        held = sum(costs[key] for key in (*script.it.inside, *script.under_way))
        assert held == script.it.used <= 9
        assert all(key in script.it.inside for key, _ in running.values())
    assert not waiting and not running and slowest < 300


def test_a_claim_keeps_to_what_it_closed_and_takes_those_first_that_came_into_use_first() -> None:
    script = Script(3, *things("abcd"))
    script.use("a", "b", "c")
    for user, key in enumerate("bca"):
        assert script.it.hold(key, user)
    for _ in range(3):
        script.it.advance(["d"])
        assert [script.it.hold(key, 9) for key in "abc"] == [True, False, True]


def test_what_is_wanted_more_urgently_does_not_leave_for_what_is_less_so() -> None:
    script = Script(1, *things("ab"))
    script.use("a")
    script.it.advance(["a", "b"])
    assert script.said == [] and script.it.hold("a", 1)
