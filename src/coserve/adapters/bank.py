"""Which adapter versions there are, which of them are on the device, and who still needs the old ones."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.stored import StoredVersion
from coserve.errors import AdapterError, AdapterNotFound

Known = AdapterVersion | StoredVersion
_REMEMBERED: Final = 4096  # names that are gone, of which the newest version's number is remembered


class AdapterBank:
    """Adapters by name; `publish` makes a version the current one in a single move.

    A version that is pinned (by a running request, or by training rows that travelled through it) stays
    until its last pin is gone, however many versions have been published since. A stored version may be known
    without its weights: they are brought in and sent out again by whoever looks after the bytes.
    """

    def __init__(self) -> None:
        self._current: dict[str, Known] = {}
        self._stored: dict[str, StoredVersion] = {}
        self._versions: dict[str, AdapterVersion] = {}  # whose weights are here
        self._pins: Counter[str] = Counter()
        self._newest: dict[str, int] = {}  # by name, those that are gone included, the latest published last
        self._floor = 0  # no name that is forgotten had a version of this number, or of a greater one
        self._watchers: list[Callable[[AdapterVersion], None]] = []
        self._forgetters: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        """Versions on the device."""
        return len(self._versions)

    def __contains__(self, name: str) -> bool:
        return name in self._current

    @property
    def names(self) -> list[str]:
        return sorted(self._current)

    def publish(self, adapter: Known) -> None:
        """Makes `adapter` what its name means from now on."""
        if "@" in adapter.name or not adapter.name:
            raise AdapterError(f"an adapter's name must not be empty or contain '@': {adapter.name!r}")
        before = self._current.get(adapter.name)
        if isinstance(adapter, StoredVersion):
            self._stored[adapter.key] = adapter
        else:
            self._versions[adapter.key] = adapter
        self._current[adapter.name] = adapter
        newest = self._newest.pop(adapter.name, -1)
        self._newest[adapter.name] = max(adapter.version, newest)
        self._forget_names()
        if before is not None and before.key != adapter.key:
            self._drop_if_unused(before)

    def look(self, name: str) -> Known:
        """The current version of a name, or the version a key (`name@3`) names while it is still held; maybe
        without its weights."""
        found = self._current.get(name) or self._versions.get(name) or self._stored.get(name)
        if found is None:
            known = ", ".join(self.names) or "none are loaded"
            raise AdapterNotFound(f"there is no adapter {name!r} (known: {known})")
        return found

    def find(self, name: str) -> AdapterVersion:
        """As `look`, with its weights. Raises AdapterNotFound also for one whose weights are not here."""
        found = self.look(name)
        if isinstance(found, StoredVersion):
            if found.key not in self._versions:
                raise AdapterNotFound(f"the adapter {name!r} is on disk, and not in memory")
            found = self._versions[found.key]
        return found

    def has_weights(self, key: str) -> bool:
        """Tells whether the weights of a version are here."""
        return key in self._versions

    def bring_in(self, adapter: AdapterVersion) -> None:
        """The weights of a stored version are here."""
        assert adapter.key in self._stored, f"{adapter.key} is no stored version"
        self._versions[adapter.key] = adapter

    def send_out(self, key: str) -> None:
        """The weights of a stored version are not here any more."""
        assert key in self._stored, f"{key} is no stored version"
        self._leave(key)

    def next_version(self, name: str) -> int:
        """A version number that no version of this name ever had: old ones may still be answering, and what
        was cached of those that are gone must not be taken for another's."""
        return 1 + self._newest[name] if name in self._newest else self._floor

    def remove(self, name: str) -> None:
        """Forgets a name; running requests keep their version until they end."""
        adapter = self.look(name)
        del self._current[adapter.name]
        self._forget_names()
        self._drop_if_unused(adapter)

    def pin(self, key: str) -> Known:
        """Keeps a version; whether its weights stay is decided elsewhere, if they are stored."""
        adapter = self._versions.get(key) or self._stored[key]
        self._pins[key] += 1
        return adapter

    def unpin(self, key: str) -> None:
        self._pins[key] -= 1
        assert self._pins[key] >= 0, f"{key} was unpinned more often than pinned"
        if not self._pins[key]:
            del self._pins[key]
            if (known := self._stored.get(key) or self._versions.get(key)) is not None:
                self._drop_if_unused(known)

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self._versions.values())

    @property
    def stored_nbytes(self) -> int:
        """Of `nbytes`, those of stored versions."""
        return sum(self._versions[key].nbytes for key in self._stored.keys() & self._versions.keys())

    def when_dropped(self, tell: Callable[[AdapterVersion], None]) -> None:
        """`tell` is called with each version that leaves the device."""
        self._watchers.append(tell)

    def when_forgotten(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with the key of each stored version that nobody will ask for again."""
        self._forgetters.append(tell)

    def _forget_names(self) -> None:
        """Forgets the oldest of the names that are gone, where there are too many: every job brings one. New
        names then begin above all their numbers."""
        while len(self._newest) > len(self._current) + _REMEMBERED:
            oldest = next(name for name in self._newest if name not in self._current)
            self._floor = max(self._floor, 1 + self._newest.pop(oldest))

    def _drop_if_unused(self, adapter: Known) -> None:
        key, current = adapter.key, self._current.get(adapter.name)
        if self._pins[key] or (current is not None and current.key == key):
            return
        self._leave(key)
        if self._stored.pop(key, None) is not None:
            for forget in self._forgetters:
                forget(key)

    def _leave(self, key: str) -> None:
        adapter = self._versions.pop(key, None)
        if adapter is not None:
            for tell in self._watchers:
                tell(adapter)
