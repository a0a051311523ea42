"""Which adapter versions there are, which of them are on the device, and who still needs the old ones."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.stored import KnownVersion, Outline, StoredVersion
from coserve.errors import AdapterError, AdapterNotFound

_REMEMBERED: Final = 4096  # names that are gone, of which the newest version's number is remembered


@dataclass(frozen=True, slots=True)
class LoadedVersion(KnownVersion):
    """A version whose weights are on the device and can be read from nowhere else: a trained one, or one that
    was loaded for good."""

    @classmethod
    def of(cls, adapter: AdapterVersion) -> "LoadedVersion":
        """Describes a version by its weights, or by their shapes alone."""
        return cls(adapter.name, adapter.version, Outline.of(adapter))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights on the device."""
        return self.outline.nbytes


class AdapterBank:
    """Adapters by name; `publish` makes a version the current one in a single move. No weights are here.

    A version that is pinned (by a running request, or by training rows that travelled through it) stays
    until its last pin is gone, however many versions have been published since. A stored version may be known
    without its weights: they are brought in and sent out again by whoever looks after the bytes.
    """

    def __init__(self, when_dropped: Callable[[str], object] = lambda key: None) -> None:
        """`when_dropped` is called with the key of each version that leaves the device."""
        self._current: dict[str, KnownVersion] = {}
        self._known: dict[str, KnownVersion] = {}  # by key, whether the weights are on the device or not
        self._resident: dict[str, int] = {}  # bytes, by key, of those whose weights are on the device
        self._pins: Counter[str] = Counter()
        self._newest: dict[str, int] = {}  # by name, those that are gone included, the latest published last
        self._floor = 0  # no name that is forgotten had a version of this number, or of a greater one
        self._when_dropped = when_dropped
        self._forgetters: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        """Versions on the device."""
        return len(self._resident)

    def __contains__(self, name: str) -> bool:
        return name in self._current

    @property
    def names(self) -> list[str]:
        return sorted(self._current)

    def publish(self, adapter: KnownVersion) -> None:
        """Makes `adapter` what its name means from now on; the weights of a loaded one are on the device."""
        check_name(adapter.name)
        before = self._current.get(adapter.name)
        if isinstance(adapter, LoadedVersion):
            self._resident[adapter.key] = adapter.nbytes
        self._current[adapter.name] = self._known[adapter.key] = adapter
        newest = self._newest.pop(adapter.name, -1)
        self._newest[adapter.name] = max(adapter.version, newest)
        self._forget_names()
        if before is not None and before.key != adapter.key:
            self._drop_if_unused(before)

    def look(self, name: str) -> KnownVersion:
        """The current version of a name, or the version a key (`name@3`) names while it is still held; maybe
        without its weights."""
        found = self._current.get(name) or self._known.get(name)
        if found is None:
            known = ", ".join(self.names) or "none are loaded"
            raise AdapterNotFound(f"there is no adapter {name!r} (known: {known})")
        return found

    def is_resident(self, key: str) -> bool:
        """Tells whether the weights of a version are on the device."""
        return key in self._resident

    def bring_in(self, key: str, nbytes: int) -> None:
        """The weights of a stored version are on the device, and take so many bytes there. One that has been
        forgotten meanwhile leaves again."""
        self._resident[key] = nbytes
        if key not in self._known:
            self._leave(key)

    def send_out(self, key: str) -> None:
        """The weights of a stored version are wanted on the device no more."""
        assert isinstance(self._known.get(key), StoredVersion), f"{key} is no stored version"
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

    def pin(self, key: str) -> KnownVersion:
        """Keeps a version; whether its weights stay is decided elsewhere, if they are stored."""
        adapter = self._known[key]
        self._pins[key] += 1
        return adapter

    def unpin(self, key: str) -> None:
        self._pins[key] -= 1
        assert self._pins[key] >= 0, f"{key} was unpinned more often than pinned"
        if not self._pins[key]:
            del self._pins[key]
            if (known := self._known.get(key)) is not None:
                self._drop_if_unused(known)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(self._resident.values())

    @property
    def stored_nbytes(self) -> int:
        """Of `nbytes`, those of stored versions."""
        stored = (key for key in self._resident if isinstance(self._known[key], StoredVersion))
        return sum(self._resident[key] for key in stored)

    def when_forgotten(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with the key of each stored version that nobody will ask for again."""
        self._forgetters.append(tell)

    def _forget_names(self) -> None:
        """Forgets the oldest of the names that are gone, where there are too many: every job brings one. New
        names then begin above all their numbers."""
        while len(self._newest) > len(self._current) + _REMEMBERED:
            oldest = next(name for name in self._newest if name not in self._current)
            self._floor = max(self._floor, 1 + self._newest.pop(oldest))

    def _drop_if_unused(self, adapter: KnownVersion) -> None:
        key, current = adapter.key, self._current.get(adapter.name)
        if self._pins[key] or (current is not None and current.key == key):
            return
        self._leave(key)
        if isinstance(self._known.pop(key, None), StoredVersion):
            for forget in self._forgetters:
                forget(key)

    def _leave(self, key: str) -> None:
        if self._resident.pop(key, None) is not None:
            self._when_dropped(key)


def check_name(name: str) -> None:
    """Raises AdapterError for a name that would look like a version's key, or like none."""
    if "@" in name or not name:
        raise AdapterError(f"an adapter's name must not be empty or contain '@': {name!r}")
