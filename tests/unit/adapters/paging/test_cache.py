"""Tiers of adapter versions: on a scripted device, with small numbers of bytes and no tensor."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from coserve.adapters.paging.cache import AT_ONCE, AdapterCache, AdapterTier
from coserve.adapters.paging.stored import Counts, KnownVersion, Outline, StoredVersion
from coserve.errors import AdapterError, OutOfMemory

DISK, HOST, LOADING, DEVICE = AdapterTier


def outline(cost: int, slot: int = 0) -> Outline:
    return Outline(Counts(0, 0, 0), cost - slot, cost)


def version(name: str, cost: int = 1, slot: int = 0) -> StoredVersion:
    """A stored version that takes so many bytes, `slot` of them for its slot."""
    return StoredVersion(name, 0, outline(cost, slot), Path(), ())


def trained(name: str, cost: int = 1) -> KnownVersion:
    return KnownVersion(name, 0, outline(cost))


def stored(names: str, cost: int = 1) -> list[StoredVersion]:
    return [version(name, cost) for name in names]


class Script:
    """A cache, and notes of what is to be moved; `bring` says when something has arrived. Versions go by
    their names."""

    def __init__(self, room: int, *versions: KnownVersion, host_room: int = 0) -> None:
        self.room = room
        self.said: list[str] = []
        self.under_way: list[str] = []
        self.it = AdapterCache(self._load, self._drop, lambda: self.room, host_room)
        for each in versions:
            self.it.add(each)

    def _load(self, stored: StoredVersion) -> None:
        self.said.append(f"+{stored.name}")
        self.under_way.append(stored.name)

    def _drop(self, key: str, tier: AdapterTier) -> None:
        name = key.removesuffix("@0")
        self.said.append(f"-{name} on host" if tier is HOST else f"-{name}")

    def bring(self) -> None:
        """Everything that is on its way arrives."""
        for name in self.under_way:
            self.loaded(name)
        self.under_way.clear()

    def use(self, *names: str) -> None:
        """All of these are wanted, and come, one after the other."""
        for name in names:
            assert self.advance([name]) == []
            self.bring()
            assert self.tier(name) is DEVICE
            self.acquire(name, 0), self.release(name, 0)
        self.said.clear()

    def tier(self, name: str) -> AdapterTier:
        return self.it.tier(f"{name}@0")

    def acquire(self, name: str, user: int) -> bool:
        return self.it.acquire(f"{name}@0", user)

    def release(self, name: str, user: int) -> None:
        self.it.release(f"{name}@0", user)

    def pin(self, name: str, pinned: bool = True) -> None:
        self.it.pin(f"{name}@0", pinned)

    def retire(self, name: str) -> None:
        self.it.retire(f"{name}@0")

    def advance(self, names: Iterable[str]) -> list[tuple[str, OutOfMemory]]:
        """Names of those that are refused, and why."""
        refused = self.it.advance([f"{name}@0" for name in names])
        return [(key.removesuffix("@0"), error) for key, error in refused]

    def loaded(self, name: str) -> None:
        self.it.loaded(f"{name}@0", 1)

    def failed(self, name: str) -> None:
        self.it.loaded(f"{name}@0", AdapterError("it cannot be read"))

    def shed(self, nbytes: int) -> None:
        self.it.shed(nbytes)

    @property
    def resident(self) -> tuple[str, ...]:
        """Stored ones on the device, the least recently used first."""
        return self.it.stats().resident

    @property
    def used(self) -> int:
        return self.it.nbytes().paged


def test_what_is_not_wanted_stays_on_disk_and_what_is_comes_in() -> None:
    script = Script(2, *stored("abc"))
    script.advance("")
    assert script.said == [] and not script.acquire("a", 1)
    script.advance("a")
    assert script.said == ["+a"] and script.tier("a") is LOADING and not script.acquire("a", 1)
    script.advance("a")
    assert script.said == ["+a"], "once is enough"
    script.bring()
    assert script.acquire("a", 1) and script.resident == ("a",) and script.used == 1


def test_the_least_recently_used_one_leaves() -> None:
    script = Script(3, *stored("abcde"))
    script.use("a", "b", "c")
    script.acquire("a", 1), script.release("a", 1)
    script.advance("d"), script.bring()
    assert script.said == ["-b", "+d"] and script.resident == ("c", "a", "d")
    script.advance("e")
    assert script.said[2:] == ["-c", "+e"]


def test_bytes_count_and_not_items() -> None:
    script = Script(10, version("a", 2), version("b", 3), version("c", 4), version("big", 6))
    script.use("a", "b", "c")
    assert script.used == 9
    script.advance(["big"])
    assert script.said == ["-a", "-b", "+big"] and script.used == 10


def test_what_is_held_or_pinned_stays() -> None:
    script = Script(3, *stored("abcd"))
    script.use("a", "b", "c")
    script.acquire("a", 1), script.pin("b")
    script.advance("d")
    assert script.said == ["-c", "+d"]
    assert script.acquire("a", 2) and script.tier("b") is DEVICE


def test_a_pinned_one_comes_in_unasked_and_after_what_is_wanted() -> None:
    script = Script(4, *stored("abcd"))
    script.pin("d")
    script.advance("a")
    assert script.said == ["+a", "+d"]
    script.failed("d"), script.loaded("a")
    script.advance("")
    assert script.said == ["+a", "+d"], "one that failed is tried again when somebody asks"
    script.advance("d")
    assert script.said == ["+a", "+d", "+d"]


def test_only_so_many_are_on_their_way_and_they_come_in_order() -> None:
    script = Script(10, *stored("abcdef"))
    script.advance("cafebd")
    assert script.said == ["+c", "+a"] and len(script.said) == AT_ONCE
    script.loaded("c")
    script.advance("afebd")
    assert script.said[2:] == ["+f"]


def test_a_claim_is_met_although_what_is_there_is_asked_for_without_end() -> None:
    """Two users of `a` and of `b` at any time: without a claim `c` would never get in."""
    script = Script(2, *stored("abc"))
    script.use("a", "b")
    users, waited = {1: "a", 2: "b"}, 0
    for user, key in users.items():
        assert script.acquire(key, user)
    for turn in range(20):
        script.advance("c")
        if script.said:
            break
        oldest = min(users)
        gone = users.pop(oldest)
        if script.acquire(gone, 100 + turn):  # somebody else comes before the one who had it ends
            users[100 + turn] = gone
        else:
            waited += 1
        script.release(gone, oldest)
    assert script.said == ["-a", "+c"] and waited == 1
    assert script.acquire("b", 999), "nobody else was kept from what is there"


def test_a_claim_closes_no_more_than_it_needs_and_only_the_least_recently_used() -> None:
    script = Script(4, *stored("abcd"), version("big", 2))
    script.use("a", "b", "c", "d")
    for user, key in enumerate("abcd"):
        script.acquire(key, user)
    script.advance(["big"])
    assert [script.acquire(key, 9) for key in "abcd"] == [False, False, True, True]


def test_nothing_smaller_passes_a_claim() -> None:
    script = Script(4, *stored("abcd"), version("big", 3), version("small"))
    script.use("a", "b", "c")
    for user, key in enumerate("abc"):
        script.acquire(key, user)
    script.advance(["big", "small"])
    assert script.said == [], "one byte is free, and it is big's"
    script.release("a", 0), script.release("b", 1)
    script.advance(["big", "small"])
    assert script.said == ["-a", "-b", "+big"]


def test_what_is_wanted_more_urgently_is_not_closed_and_opens_again() -> None:
    script = Script(2, *stored("abc"))
    script.use("a", "b")
    script.acquire("a", 1), script.acquire("b", 2)
    script.advance("c")
    assert not script.acquire("a", 3)
    script.advance(["a", "c"])  # whoever wants a is more urgent than who wants c
    assert script.acquire("a", 3) and not script.acquire("b", 4)


def test_a_claim_that_is_given_up_opens_what_it_closed() -> None:
    script = Script(1, *stored("ab"))
    script.use("a")
    script.acquire("a", 1)
    script.advance("b")
    assert not script.acquire("a", 2)
    script.advance("")
    assert script.acquire("a", 2)


def test_a_pin_opens_what_a_claim_had_closed() -> None:
    script = Script(2, *stored("abc"))
    script.use("a", "b")
    script.acquire("a", 1), script.acquire("b", 2)
    script.advance("c")
    script.pin("a")
    assert script.acquire("a", 3)
    script.advance("c")
    assert script.acquire("a", 4) and not script.acquire("b", 4)


def test_one_for_which_there_is_never_room_is_refused_and_delays_nobody() -> None:
    script = Script(3, *stored("ab"), version("big", 3))
    script.use("a")
    script.pin("a")
    ((key, error),) = script.advance(["big", "b"])
    assert key == "big" and isinstance(error, OutOfMemory)
    assert "1 bytes more than adapters may have beside 1 that are pinned" in str(error)
    assert script.said == ["+b"]


def test_one_that_failed_can_be_tried_again_and_its_bytes_are_free() -> None:
    script = Script(1, *stored("ab"))
    script.advance("a")
    script.failed("a")
    assert script.used == 0 and script.tier("a") is DISK
    script.advance("b")
    assert script.said == ["+a", "+b"]


def test_one_that_is_forgotten_on_its_way_has_its_bytes_until_it_arrives() -> None:
    script = Script(2, *stored("ab"))
    script.advance("a")
    script.retire("a")
    assert script.used == 1 and script.it.find("a@0") is None
    script.under_way.clear()
    script.loaded("a")
    assert script.used == 0 and script.said == ["+a", "-a"] and not script.it._recent
    script.use("b")
    script.retire("b")
    assert script.used == 0 and script.resident == ()


def test_what_no_name_means_stays_until_its_last_user_has_ended() -> None:
    """Users that hold it, and those that wait for it and hold it later."""
    script = Script(1, *stored("ab"))
    script.use("a")
    assert script.acquire("a", 1) and not script.acquire("b", 2)
    script.retire("a"), script.retire("b")
    assert script.tier("a") is DEVICE and script.tier("b") is DISK
    script.release("a", 1)
    assert script.said == ["-a"] and script.it.find("a@0") is None
    script.advance("b"), script.bring()
    assert script.acquire("b", 2)
    script.release("b", 2)
    assert script.said == ["-a", "+b", "-b"] and script.it.find("b@0") is None


def test_a_user_counts_once_however_often_it_asks() -> None:
    script = Script(1, *stored("a"))
    assert not script.acquire("a", 1) and not script.acquire("a", 1)
    script.advance("a"), script.bring()
    assert script.acquire("a", 1) and script.acquire("a", 1) and script.acquire("a", 2)
    script.release("a", 1), script.release("a", 1)
    script.shed(1)
    assert script.said == ["+a"], "the other one holds it"
    script.release("a", 2), script.shed(1)
    assert script.said == ["+a", "-a"]
    stats = script.it.stats()
    assert (stats.hits, stats.misses, stats.loaded, stats.dropped) == (1, 1, 1, 1)


def test_what_can_be_read_from_nowhere_stays_and_counts_by_itself() -> None:
    script = Script(1, *stored("a"), trained("t", 5))
    assert script.tier("t") is DEVICE and script.it.nbytes() == (0, 5)
    script.use("a")
    script.shed(6)
    assert script.said == [] and script.it.nbytes() == (1, 5) and script.resident == ("a",)
    with pytest.raises(AdapterError, match="no files to be read from again"):
        script.pin("t")
    script.retire("t")
    assert script.said == ["-t"] and script.it.nbytes() == (1, 0)


def test_slots_are_counted_with_whom_they_are_promised_to() -> None:
    """A stored version of 7 bytes, 3 of them for its slot."""
    script = Script(9, version("a", 7, slot=3), trained("t", 5))
    assert script.it.nbytes(slots=2) == (0, 7)
    script.use("a")
    assert script.it.nbytes(slots=2) == (7, 5) and script.it.nbytes(slots=4) == (7, 6)
    script.retire("a")
    assert script.it.nbytes(slots=4) == (0, 9)


# Copies on the host


def test_what_leaves_the_device_stays_on_the_host_while_there_is_room() -> None:
    script = Script(1, *stored("abc"), host_room=2)
    script.use("a", "b")
    assert script.tier("a") is HOST and script.tier("b") is DEVICE
    script.advance("c"), script.bring()
    assert script.said == ["-b", "-a on host", "+c"]
    assert [script.tier(name) for name in "abc"] == [
        DISK,
        HOST,
        DEVICE,
    ]
    script.said.clear()
    script.advance("b"), script.bring()
    assert script.said == ["-c", "+b"], "its copy is there already"


def test_a_copy_is_made_although_there_is_no_room_for_a_second_one() -> None:
    script = Script(8, version("a", 3), version("b", 4), host_room=2)
    script.use("a", "b")
    script.shed(7)
    assert script.said == ["-a", "-b"]
    assert script.tier("a") is DISK and script.tier("b") is HOST


def test_copies_leave_with_their_versions_and_where_loading_failed() -> None:
    script = Script(4, *stored("abc"), host_room=4)
    script.use("a", "b")
    script.retire("a")
    assert script.said == ["-a", "-a on host"]
    script.shed(1), script.retire("b")
    assert script.said[2:] == ["-b", "-b on host"]
    script.advance("c"), script.failed("c")
    assert script.said[4:] == ["+c", "-c on host"] and script.tier("c") is DISK
    assert not script.it._recent


def test_others_get_what_nobody_uses_all_they_need_or_nothing() -> None:
    script = Script(4, *stored("abcd"))
    script.use("a", "b", "c", "d")
    script.acquire("b", 1), script.pin("d")
    script.shed(3)
    assert script.said == [], "a and c are not enough"
    script.shed(1)
    assert script.said == ["-a"]
    script.shed(1)
    assert script.said == ["-a", "-c"]


def test_less_room_than_before_is_kept_to_by_and_by() -> None:
    script = Script(4, *stored("abcde"))
    script.use("a", "b", "c", "d")
    script.room = 2
    script.advance("e")
    assert script.said == ["-a", "-b", "-c", "+e"] and script.used == 2


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_bytes_are_kept_to_and_everybody_is_served(seed: int) -> None:
    draws = random.Random(seed)
    costs = {f"t{i}": draws.randint(1, 4) for i in range(12)}
    script = Script(9, *(version(key, cost) for key, cost in costs.items()))
    script.pin("t0")
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
                script.release(key, user)
                del running[user]
        for key in list(script.under_way):
            if draws.random() < 0.5:
                script.under_way.remove(key)
                if draws.random() < 0.1:
                    script.failed(key)
                else:
                    script.loaded(key)
        for user, key in list(waiting.items()):
            if script.acquire(key, user):
                del waiting[user]
                running[user] = key, turn + draws.randint(1, 8)
                slowest = max(slowest, turn - came[user])
        assert script.advance(list(waiting.values())) == []
        held = sum(costs[key] for key in (*script.resident, *script.under_way))
        assert held == script.used <= 9
        assert all(key in script.resident for key, _ in running.values())
    assert not waiting and not running and slowest < 300


def test_a_claim_keeps_to_what_it_closed_and_takes_those_first_that_came_into_use_first() -> None:
    script = Script(3, *stored("abcd"))
    script.use("a", "b", "c")
    for user, key in enumerate("bca"):
        assert script.acquire(key, user)
    for _ in range(3):
        script.advance("d")
        assert [script.acquire(key, 9) for key in "abc"] == [True, False, True]


def test_what_is_wanted_more_urgently_does_not_leave_for_what_is_less_so() -> None:
    script = Script(1, *stored("ab"))
    script.use("a")
    script.advance(["a", "b"])
    assert script.said == [] and script.acquire("a", 1)
