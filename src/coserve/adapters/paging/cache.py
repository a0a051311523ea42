"""The adapter cache: every known version, its tier and its users.

Weights of a stored version move between the tiers (disk, copies in host memory, the device) by bytes, the
least recently used ones out first. *Users* acquire a version, which then stays on the device until they
release it; pinned versions stay, too. All others may be evicted. Wanted versions are loaded in order of
urgency. Where all bytes are held, the first of them has a *claim*: the least recently used versions are
closed to new users until it has its bytes, so that requests for loaded versions cannot starve it.

The cache only counts: the executor holds the weights, and is told what to load and to drop.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Final, NamedTuple

from coserve.adapters.paging.stored import KnownVersion, StoredVersion
from coserve.core.size import show_size
from coserve.errors import AdapterError, CoserveError, OutOfMemory
from coserve.wire.messages import Paging

AT_ONCE: Final = 2  # that are on their way: one is read, the next one's bytes are there already
_MOST_PINNED: Final = 0.5  # of the room: everybody else needs some


class AdapterTier(Enum):
    """The fastest tier that has a version's weights. `LOADING` is on the way to the device."""

    DISK = "disk"
    HOST = "host"
    LOADING = "loading"
    DEVICE = "device"


class AdapterBytes(NamedTuple):
    """Bytes of adapters in the device's memory: `paged` of stored versions, with their slots; `resident` of
    all others."""

    paged: int
    resident: int


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """A version and its tier. `users` maps each user to whether it holds the weights (else it waits)."""

    version: KnownVersion
    tier: AdapterTier = AdapterTier.DISK
    is_current: bool = True  # its name means it
    has_copy: bool = False  # in host memory
    failed: bool = False  # the last time; it is not brought in for its pin alone
    users: dict[Hashable, bool] = field(default_factory=dict)


class ExpectedRead(NamedTuple):
    """All that is read until a version is on the device: `nbytes` with those that come before it, and with
    those of the versions that it `displaces`, which are read again some time."""

    nbytes: int = 0
    displaces: bool = False


class AdapterCache:
    """Keeps stored versions within `room()` bytes on the device. Not thread-safe.

    A version is known while it is current or in use. A version that is not stored, such as a trained one, has
    its weights on the device until then.
    """

    def __init__(
        self,
        load: Callable[[StoredVersion], object],
        drop: Callable[[str, AdapterTier], object],
        room: Callable[[], int],
        host_room: int = 0,
    ) -> None:
        """`load` starts loading weights to the device, which ends with a call of `loaded`, and leaves a
        copy in host memory if there is `host_room` (bytes). `drop` frees a version's weights on device and
        host."""
        self._load, self._drop, self._room, self._host_room = load, drop, room, host_room
        self._versions: dict[str, CachedAdapter] = {}
        self._recent: OrderedDict[str, CachedAdapter] = OrderedDict()  # off the disk; the latest used last
        self._pinned: dict[str, None] = {}  # by operators, in the order in which they were
        self._closed: list[str] = []  # to new users: they leave for whoever has the claim
        self._coming = 0  # versions on their way
        self._used = self._slots = 0  # bytes of stored ones on the device or on their way; those for slots
        self._resident = 0  # bytes of those that are not stored
        self._copied = 0  # bytes of copies on the host
        self._hits = self._misses = self._loads = self._loaded_bytes = self._evictions = 0

    def __len__(self) -> int:
        """Versions on the device."""
        return sum(each.tier is AdapterTier.DEVICE for each in self._recent.values())

    def find(self, key: str) -> KnownVersion | None:
        """The version with this key, None if unknown."""
        found = self._versions.get(key)
        return None if found is None else found.version

    def tier(self, key: str) -> AdapterTier:
        """The tier of a known version."""
        return self._versions[key].tier

    # What there is

    def add(self, version: KnownVersion) -> None:
        """Adds a current version: a stored one on disk, any other on the device."""
        entry = self._versions.setdefault(version.key, CachedAdapter(version))
        if entry.tier is AdapterTier.DISK and not isinstance(version, StoredVersion):
            self._count(entry, 1)
            entry.tier = AdapterTier.DEVICE
            self._recent[version.key] = entry
        entry.version, entry.is_current = version, True

    def retire(self, key: str) -> None:
        """Marks a version as no longer current. It is dropped once unused; while it is loading it keeps its
        bytes."""
        entry = self._versions[key]
        entry.is_current = False
        self._forget_if_unused(entry)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Pins a version, to be loaded when there is room and kept, or unpins it. Raises AdapterError for a
        version that is not stored, OutOfMemory where pinned ones would take more than half of the room."""
        entry = self._versions[key]
        name = entry.version.name
        if not isinstance(entry.version, StoredVersion):
            raise AdapterError(f"the adapter {name!r} has no files to be read from again: it stays")
        most = int(_MOST_PINNED * self._room())
        if pinned and (missing := _cost(self._versions[k] for k in {*self._pinned, key}) - most) > 0:
            raise OutOfMemory(
                f"pinned adapters may have {show_size(most)}, half of what adapters may have in memory: "
                f"{show_size(missing)} less than with {name!r}"
            )
        entry.failed = False
        if not pinned:
            self._pinned.pop(key, None)
            return
        self._pinned[key] = None
        if key in self._closed:
            self._closed.remove(key)

    # Users

    def acquire(self, key: str, user: Hashable, reopens: bool = False) -> bool:
        """Adds a user, which keeps the version known. True if its weights are on the device, where they then
        stay until `release`; otherwise the user waits and has to call again. A user that `reopens` the
        version leaves another one, with more bytes, to whoever has the claim."""
        entry = self._versions[key]
        if entry.users.get(user):
            return True
        if reopens and key in self._closed:
            self._closed.remove(key)
        is_there = entry.tier is AdapterTier.DEVICE and key not in self._closed
        if user not in entry.users and isinstance(entry.version, StoredVersion):
            self._hits, self._misses = self._hits + is_there, self._misses + (not is_there)
        entry.users[user] = is_there
        if is_there:
            self._recent.move_to_end(key)
        return is_there

    def release(self, key: str, user: Hashable) -> None:
        """Removes a user that held the version or waited for it; ignored for others."""
        entry = self._versions.get(key)
        if entry is not None and user in entry.users:
            if entry.users.pop(user):
                self._recent.move_to_end(key)
            self._forget_if_unused(entry)

    # Movement

    def advance(self, wanted: Iterable[str]) -> list[tuple[str, OutOfMemory]]:
        """Loads wanted versions, the most urgent first, as far as bytes allow; then pinned ones.

        Returns those that can never fit, each with its error.
        """
        refused: list[tuple[str, OutOfMemory]] = []
        ahead: set[str] = set()
        wants = dict.fromkeys(wanted)
        pins = [key for key in self._pinned if key not in wants and not self._versions[key].failed]
        for key in chain(wants, pins):
            entry = self._versions[key]
            if not _has_bytes(entry):
                if self._coming >= AT_ONCE:
                    return refused
                if missing := self._never(entry):
                    if key in wants:
                        refused.append((key, self._refusal(entry, missing)))
                    continue
                if not self._make_room(entry, ahead):
                    return refused
                self._enter(entry)
            elif key in self._closed:  # asked for more urgently than what it was to leave for
                self._closed.remove(key)
            ahead.add(key)
        self._closed.clear()
        return refused

    def loaded(self, key: str, outcome: int | CoserveError) -> None:
        """Notes a load's outcome: the bytes on the device, or an error, after which it may be tried again.
        Weights of a version dropped meanwhile are freed at once."""
        entry = self._recent[key]
        self._coming -= 1
        if isinstance(outcome, int):
            self._loads, self._loaded_bytes = self._loads + 1, self._loaded_bytes + outcome
            entry.tier, entry.failed = AdapterTier.DEVICE, False
            self._recent.move_to_end(key)
        else:
            self._leave(entry)
            self._drop_copy(entry)
            entry.failed = True
        if self._versions.get(key) is not entry:
            self._free(entry)

    def shed(self, nbytes: int) -> None:
        """Evicts unused versions until `nbytes` are freed, if they suffice."""
        idle, least = self._idle(()), self._used - nbytes
        if _cost(idle) < nbytes:
            return
        for entry in idle:
            if self._used <= least:
                return
            self._evict(entry)

    # What it takes

    def nbytes(self, slots: int = 0) -> AdapterBytes:
        """Bytes of all adapters on the device or loading; `slots` are the bytes of slots there. A stored
        version counts with its slot even before it has one."""
        return AdapterBytes(self._used, self._resident + max(slots - self._slots, 0))

    def stats(self) -> Paging:
        """Counters of stored versions since the start, and their number by tier."""
        there = (e.version for e in self._recent.values() if e.tier is AdapterTier.DEVICE)
        return Paging(
            known=sum(isinstance(each.version, StoredVersion) for each in self._versions.values()),
            resident=tuple(version.name for version in there if isinstance(version, StoredVersion)),
            pinned=tuple(self._versions[key].version.name for key in self._pinned),
            hits=self._hits,
            misses=self._misses,
            loaded=self._loads,
            loaded_bytes=self._loaded_bytes,
            dropped=self._evictions,
            used_bytes=self._used,
        )

    def bytes_by_name(self) -> dict[str, int]:
        """Bytes of the stored versions in memory."""
        there = (each.version for each in self._recent.values() if each.tier is AdapterTier.DEVICE)
        return {version.name: version.cost for version in there if isinstance(version, StoredVersion)}

    # Inside

    def _never(self, entry: CachedAdapter) -> int:
        """Bytes missing for a version even if all evictable ones left."""
        held = _cost(each for key in self._pinned if _has_bytes(each := self._versions[key]))
        return max(held + entry.version.cost - self._room(), 0)

    def _refusal(self, entry: CachedAdapter, missing: int) -> OutOfMemory:
        return OutOfMemory(
            f"the adapter needs {show_size(entry.version.cost)} of memory, {show_size(missing)} more than "
            f"adapters may have beside {len(self._pinned)} that are pinned: unpin some, let jobs end, or "
            "raise engine.adapter_memory"
        )

    def _make_room(self, entry: CachedAdapter, ahead: Collection[str]) -> bool:
        """Tells whether there are bytes for a version after evicting unused ones. If not, the version gets
        the claim; those `ahead` are wanted more urgently."""
        missing = self._used + entry.version.cost - self._room()
        idle = self._idle(ahead)
        if _cost(idle) < missing:
            self._claim(missing, ahead)
            return False
        for other in sorted(idle, key=lambda e: e.version.key not in self._closed):  # else in their order
            if self._used + entry.version.cost <= self._room():
                break
            self._evict(other)
        return True

    def _claim(self, missing: int, ahead: Collection[str]) -> None:
        """Closes versions with at least the `missing` bytes, those already closed first."""
        order, self._closed = [*self._closed], []
        order += [each.version.key for each in self._movable({*order, *ahead})]
        for key in order:
            if missing <= 0:
                return
            self._closed.append(key)
            missing -= self._versions[key].version.cost

    def _idle(self, ahead: Collection[str]) -> list[CachedAdapter]:
        """Versions that can be evicted now, least recently used first."""
        return [entry for entry in self._movable(ahead) if True not in entry.users.values()]

    def _movable(self, but: Collection[str]) -> list[CachedAdapter]:
        """Versions that can be evicted once their users have ended, least recently used first."""
        return [
            entry
            for key, entry in self._recent.items()
            if entry.tier is AdapterTier.DEVICE
            and isinstance(entry.version, StoredVersion)
            and key not in self._pinned
            and key not in but
        ]

    def _enter(self, entry: CachedAdapter) -> None:
        assert isinstance(entry.version, StoredVersion), "other versions never leave"
        self._count(entry, 1)
        self._coming += 1
        entry.tier = AdapterTier.LOADING
        self._recent[entry.version.key] = entry
        self._keep_copy(entry)
        self._load(entry.version)

    def _evict(self, entry: CachedAdapter) -> None:
        self._evictions += 1
        self._leave(entry)
        self._drop(entry.version.key, AdapterTier.DEVICE)

    def _leave(self, entry: CachedAdapter) -> None:
        """Notes that a version's weights are neither on the device nor loading."""
        key = entry.version.key
        self._count(entry, -1)
        if key in self._closed:
            self._closed.remove(key)
        entry.tier = AdapterTier.HOST if entry.has_copy else AdapterTier.DISK
        if not entry.has_copy:
            del self._recent[key]

    def _keep_copy(self, entry: CachedAdapter) -> None:
        """Counts the host copy made by loading, evicting the least recently used copies."""
        if entry.has_copy or not self._host_room:
            return
        entry.has_copy = True
        self._copied += entry.version.outline.nbytes
        for other in [e for e in self._recent.values() if e.tier is not AdapterTier.LOADING]:
            if self._copied <= self._host_room:
                return
            self._drop_copy(other)

    def _drop_copy(self, entry: CachedAdapter) -> None:
        if not entry.has_copy:
            return
        entry.has_copy = False
        self._copied -= entry.version.outline.nbytes
        if entry.tier is AdapterTier.HOST:
            entry.tier = AdapterTier.DISK
            del self._recent[entry.version.key]
        self._drop(entry.version.key, AdapterTier.HOST)

    def _forget_if_unused(self, entry: CachedAdapter) -> None:
        if not entry.is_current and not entry.users:
            del self._versions[entry.version.key]
            self._pinned.pop(entry.version.key, None)
            if entry.tier is not AdapterTier.LOADING:
                self._free(entry)

    def _free(self, entry: CachedAdapter) -> None:
        """Frees a version's weights on device and host."""
        if entry.tier is AdapterTier.DEVICE:
            self._leave(entry)
            self._drop(entry.version.key, AdapterTier.DEVICE)
        self._drop_copy(entry)

    def _count(self, entry: CachedAdapter, sign: int) -> None:
        """Adds or subtracts a version's bytes on the device."""
        if isinstance(entry.version, StoredVersion):
            self._used += sign * entry.version.cost
            self._slots += sign * (entry.version.cost - entry.version.outline.nbytes)
        else:
            self._resident += sign * entry.version.cost


def expected_reads(
    cache: AdapterCache,
    keys: Sequence[str],
    wanted: Iterable[str],
    room: int,
    released: Collection[str] = (),
    kept: Collection[str] = (),
) -> list[ExpectedRead | None]:
    """The reads until each of some known versions would be on the device, if it were asked for after the
    `wanted` ones and stored versions had `room` bytes. None where users of others would have to release these
    first: of all but the `released` ones, and of the `kept` ones in any case."""
    versions, found = cache._versions, list[ExpectedRead | None]()
    ahead = [key for key in dict.fromkeys(wanted) if not _has_bytes(versions[key])]
    coming = _cost(each for each in versions.values() if each.tier is AdapterTier.LOADING)
    for key in keys:
        entry = versions[key]
        if entry.tier is AdapterTier.LOADING:
            found.append(ExpectedRead(coming))
        elif _has_bytes(entry):
            found.append(None if key in cache._closed else ExpectedRead())
        else:
            before = [versions[other] for other in ahead if other != key]
            asked = entry.version.cost + _cost(before)
            missing = max(cache._used + asked - room, 0)
            is_late = bool(before or coming or missing)
            leaving = {id(each): each for each in cache._idle(kept)}
            leaving |= {id(each): each for each in cache._movable(kept) if each.version.key in released}
            fits = missing <= _cost(leaving.values())
            found.append(ExpectedRead(coming + asked + missing, is_late) if fits else None)
    return found


def _has_bytes(entry: CachedAdapter) -> bool:
    """Tells whether a version is on the device or loading."""
    return entry.tier in (AdapterTier.LOADING, AdapterTier.DEVICE)


def _cost(entries: Iterable[CachedAdapter]) -> int:
    return sum(entry.version.cost for entry in entries)
