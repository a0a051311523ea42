"""The adapter cache against its rules, told plainly, through random operations."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from coserve.adapters.paging.cache import AT_ONCE, AdapterCache, AdapterTier
from coserve.adapters.paging.stored import Counts, KnownVersion, Outline, StoredVersion
from coserve.errors import AdapterError, OutOfMemory


class PlainCache:
    """The rules of `AdapterCache` over sets and lists, with nothing counted ahead. `said` is what it has
    moved: `load` and `drop`, in order."""

    def __init__(self, room: int, host_room: int) -> None:
        self.room, self.host_room = room, host_room
        self.all: dict[str, KnownVersion] = {}
        self.known: set[str] = set()
        self.retired: set[str] = set()
        self.failed: set[str] = set()
        self.holding: set[tuple[str, int]] = set()
        self.waiting: set[tuple[str, int]] = set()
        self.pinned: list[str] = []
        self.closed: list[str] = []
        self.device: set[str] = set()
        self.coming: set[str] = set()
        self.copies: set[str] = set()
        self.order: list[str] = []  # of use, the latest last
        self.said: list[tuple[str, ...]] = []
        self.hits = self.misses = self.loads = self.evictions = 0

    def is_stored(self, key: str) -> bool:
        return isinstance(self.all[key], StoredVersion)

    def cost(self, keys: Iterable[str]) -> int:
        return sum(self.all[key].cost for key in keys)

    def paged(self) -> set[str]:
        return {key for key in self.device | self.coming if self.is_stored(key)}

    def tier(self, key: str) -> AdapterTier:
        if key in self.device:
            return AdapterTier.DEVICE
        if key in self.coming:
            return AdapterTier.LOADING
        return AdapterTier.HOST if key in self.copies else AdapterTier.DISK

    def nbytes(self, slots: int) -> tuple[int, int]:
        promised = sum(self.all[key].cost - self.all[key].outline.nbytes for key in self.paged())
        others = self.cost(self.device - self.paged())
        return self.cost(self.paged()), others + max(slots - promised, 0)

    def used_now(self, key: str) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    def in_order(self, keys: Iterable[str]) -> list[str]:
        return sorted(keys, key=self.order.index)

    def add(self, version: KnownVersion) -> None:
        self.all[version.key] = version
        self.known.add(version.key)
        if not self.is_stored(version.key):
            self.device.add(version.key)
            self.used_now(version.key)

    def retire(self, key: str) -> None:
        self.retired.add(key)
        self.forget_unused()

    def pin(self, key: str, pinned: bool) -> None:
        if not self.is_stored(key):
            raise AdapterError("it stays")
        if pinned and self.cost({*self.pinned, key}) > self.room // 2:
            raise OutOfMemory("more than half")
        self.failed.discard(key)
        if not pinned:
            self.pinned = [each for each in self.pinned if each != key]
        elif key not in self.pinned:
            self.pinned.append(key)
            self.closed = [each for each in self.closed if each != key]

    def acquire(self, key: str, user: int) -> bool:
        if (key, user) in self.holding:
            return True
        is_there = key in self.device and key not in self.closed
        if (key, user) not in self.waiting and self.is_stored(key):
            self.hits, self.misses = self.hits + is_there, self.misses + (not is_there)
        if not is_there:
            self.waiting.add((key, user))
            return False
        self.waiting.discard((key, user))
        self.holding.add((key, user))
        self.used_now(key)
        return True

    def release(self, key: str, user: int) -> None:
        if (key, user) in self.holding:
            self.holding.remove((key, user))
            self.used_now(key)
        self.waiting.discard((key, user))
        self.forget_unused()

    def advance(self, wanted: Sequence[str]) -> list[str]:
        refused, ahead = [], set[str]()
        pins = [key for key in self.pinned if key not in wanted and key not in self.failed]
        for key in dict.fromkeys([*wanted, *pins]):
            if key not in self.device | self.coming:
                if len(self.coming) == AT_ONCE:
                    return refused
                if self.cost({*self.pinned} & (self.device | self.coming)) + self.cost([key]) > self.room:
                    if key in wanted:
                        refused.append(key)
                    continue
                if not self.make_room(key, ahead):
                    return refused
                self.load(key)
            self.closed = [each for each in self.closed if each != key]
            ahead.add(key)
        self.closed = []
        return refused

    def make_room(self, key: str, ahead: set[str]) -> bool:
        missing = self.cost(self.paged()) + self.cost([key]) - self.room
        movable = [k for k in self.in_order(self.device & self.paged()) if k not in (*self.pinned, *ahead)]
        idle = self.idle(movable)
        if missing > self.cost(idle):
            order = [*self.closed, *(k for k in movable if k not in self.closed)]
            counts = range(len(order) + 1)
            enough = [n for n in counts if self.cost(order[:n]) >= missing]
            self.closed = order[: enough[0]] if enough else order
            return False
        for other in [k for k in idle if k in self.closed] + [k for k in idle if k not in self.closed]:
            if self.cost(self.paged()) + self.cost([key]) > self.room:
                self.evict(other)
        return True

    def idle(self, keys: Iterable[str]) -> list[str]:
        held = {key for key, _ in self.holding}
        return [key for key in keys if key not in held]

    def load(self, key: str) -> None:
        self.coming.add(key)
        if key not in self.order:
            self.used_now(key)
        if self.host_room and key not in self.copies:
            self.copies.add(key)
            for other in self.in_order(self.copies - self.coming):
                if sum(self.all[k].outline.nbytes for k in self.copies) > self.host_room:
                    self.drop_copy(other)
        self.said.append(("load", key))

    def loaded(self, key: str, is_there: bool) -> None:
        self.coming.remove(key)
        if is_there:
            self.loads += 1
            self.device.add(key)
            self.failed.discard(key)
            self.used_now(key)
        else:
            self.drop_copy(key)
            self.failed.add(key)
        if key not in self.known:
            self.free(key)

    def shed(self, nbytes: int) -> None:
        idle = self.idle(k for k in self.in_order(self.device & self.paged()) if k not in self.pinned)
        least = self.cost(self.paged()) - nbytes
        if self.cost(idle) >= nbytes:
            for key in idle:
                if self.cost(self.paged()) > least:
                    self.evict(key)

    def evict(self, key: str) -> None:
        self.evictions += 1
        self.leave(key)

    def leave(self, key: str) -> None:
        self.device.remove(key)
        self.closed = [each for each in self.closed if each != key]
        self.said.append(("drop", key, "device"))

    def drop_copy(self, key: str) -> None:
        if key in self.copies:
            self.copies.remove(key)
            self.said.append(("drop", key, "host"))

    def free(self, key: str) -> None:
        if key in self.device:
            self.leave(key)
        self.drop_copy(key)

    def forget_unused(self) -> None:
        in_use = {key for key, _ in self.holding | self.waiting}
        for key in (self.known & self.retired) - in_use:
            self.known.remove(key)
            self.pinned = [each for each in self.pinned if each != key]
            if key not in self.coming:
                self.free(key)


class Pair:
    """Both caches, which are told the same; their moves are noted."""

    def __init__(self, room: int, host_room: int) -> None:
        self.plain = PlainCache(room, host_room)
        self.said: list[tuple[str, ...]] = []
        self.it = AdapterCache(self._load, self._drop, lambda: self.plain.room, host_room)

    def _load(self, stored: StoredVersion) -> None:
        self.said.append(("load", stored.key))

    def _drop(self, key: str, tier: AdapterTier) -> None:
        self.said.append(("drop", key, tier.value))

    def expect_equal(self) -> None:
        it, plain = self.it, self.plain
        assert self.said == plain.said
        assert {key for key in plain.all if it.find(key)} == plain.known
        assert {key: it.tier(key) for key in plain.known} == {key: plain.tier(key) for key in plain.known}
        assert all(it.nbytes(slots) == plain.nbytes(slots) for slots in (0, 7))
        stats = it.stats()
        there = plain.in_order(plain.device & plain.paged())
        assert list(stats.resident) == [plain.all[key].name for key in there]
        assert list(stats.pinned) == [plain.all[key].name for key in plain.pinned]
        assert stats.known == sum(map(plain.is_stored, plain.known))
        counted = stats.hits, stats.misses, stats.loaded, stats.loaded_bytes, stats.dropped
        assert counted == (plain.hits, plain.misses, plain.loads, 2 * plain.loads, plain.evictions)
        assert len(it) == len(plain.device)
        assert {key for key, _ in plain.holding} <= plain.device, "what is held is there"


def version(draws: random.Random, name: str, number: int) -> KnownVersion:
    slot, weights = draws.randint(0, 2), draws.randint(1, 4)
    if draws.random() < 0.25:
        return KnownVersion(name, number, Outline(Counts(0, 0, 0), weights, weights))
    return StoredVersion(name, number, Outline(Counts(0, 0, 0), weights, weights + slot), Path(), ())


@pytest.mark.parametrize("host_room", [0, 5, 12])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_done_the_rules_are_kept(seed: int, host_room: int) -> None:
    draws = random.Random(f"{seed}/{host_room}")
    pair = Pair(14, host_room)
    it, plain = pair.it, pair.plain
    numbers, users = {name: -1 for name in "abcdefgh"}, 0
    current: dict[str, str] = {}
    asking: list[tuple[str, int]] = []
    for _ in range(500):
        known = sorted(plain.known)
        match draws.choices(
            ["publish", "retire", "pin", "ask", "end", "advance", "arrive", "shed", "room"],
            [4, 1, 2, 10, 8, 10, 10, 1, 1],
        )[0]:
            case "publish":
                name = draws.choice(sorted(numbers))
                numbers[name] += 1
                found = version(draws, name, numbers[name])
                it.add(found), plain.add(found)
                if before := current.get(name):
                    it.retire(before), plain.retire(before)
                current[name] = found.key
            case "retire" if current:
                key = current.pop(draws.choice(sorted(current)))
                it.retire(key), plain.retire(key)
            case "pin" if known:
                key, pinned = draws.choice(known), draws.random() < 0.6
                ends = []
                for each in (it, plain):
                    try:
                        each.pin(key, pinned)
                        ends.append("")
                    except (AdapterError, OutOfMemory) as error:
                        ends.append(type(error).__name__)
                assert ends[0] == ends[1]
            case "ask" if current:
                key, users = current[draws.choice(sorted(current))], users + 1
                asking.append((key, users))
                assert it.acquire(key, users) == plain.acquire(key, users)
            case "end" if asking:
                key, user = asking.pop(draws.randrange(len(asking)))
                it.release(key, user), plain.release(key, user)
            case "advance":
                wanted = [key for key, user in asking if not plain.acquire(key, user)]
                assert wanted == [key for key, user in asking if not it.acquire(key, user)]
                assert [key for key, _ in it.advance(wanted)] == plain.advance(wanted)
            case "arrive" if plain.coming:
                key, is_there = draws.choice(sorted(plain.coming)), draws.random() < 0.7
                it.loaded(key, 2 if is_there else AdapterError("it cannot be read"))
                plain.loaded(key, is_there)
            case "shed":
                nbytes = draws.randint(1, 6)
                it.shed(nbytes), plain.shed(nbytes)
            case "room":
                plain.room = draws.choice([14, 10, 7])
        pair.expect_equal()
    for key, user in asking:
        it.release(key, user), plain.release(key, user)
    for key in current.values():
        it.retire(key), plain.retire(key)
    for key in sorted(plain.coming):
        it.loaded(key, 2), plain.loaded(key, True)
    pair.expect_equal()
    assert not plain.known and it.nbytes() == (0, 0), "nothing stays that nobody knows"
    assert not it._recent and not it._versions and not it._closed and not it._copied
    moves = {move[0] if move[0] == "load" else move[2] for move in pair.said}
    assert moves == ({"load", "device"} if not host_room else {"load", "device", "host"})
