"""Which adapter versions are on the device, and who still needs the old ones."""

from collections import Counter
from collections.abc import Callable

from coserve.adapters.adapter import AdapterVersion
from coserve.errors import AdapterError, AdapterNotFound


class AdapterBank:
    """Adapters by name; `publish` makes a version the current one in a single move.

    A version that is pinned (by a running request, or by training rows that travelled through it) stays
    until its last pin is gone, however many versions have been published since.
    """

    def __init__(self) -> None:
        self._current: dict[str, AdapterVersion] = {}
        self._versions: dict[str, AdapterVersion] = {}
        self._pins: Counter[str] = Counter()
        self._newest: dict[str, int] = {}  # of every name there ever was
        self._watchers: list[Callable[[AdapterVersion], None]] = []

    def __len__(self) -> int:
        """Versions on the device."""
        return len(self._versions)

    @property
    def names(self) -> list[str]:
        return sorted(self._current)

    def publish(self, adapter: AdapterVersion) -> None:
        """Makes `adapter` what its name means from now on."""
        if "@" in adapter.name or not adapter.name:
            raise AdapterError(f"an adapter's name must not be empty or contain '@': {adapter.name!r}")
        before = self._current.get(adapter.name)
        self._versions[adapter.key] = adapter
        self._current[adapter.name] = adapter
        self._newest[adapter.name] = max(adapter.version, self._newest.get(adapter.name, -1))
        if before is not None and before.key != adapter.key:
            self._drop_if_unused(before)

    def find(self, name: str) -> AdapterVersion:
        """The current version of a name, or the version a key (`name@3`) names while it is still held."""
        found = self._current.get(name) or self._versions.get(name)
        if found is None:
            known = ", ".join(self.names) or "none are loaded"
            raise AdapterNotFound(f"there is no adapter {name!r} (known: {known})")
        return found

    def next_version(self, name: str) -> int:
        """A version number that no version of this name ever had: old ones may still be answering, and what
        was cached of those that are gone must not be taken for another's."""
        return 1 + self._newest.get(name, -1)

    def remove(self, name: str) -> None:
        """Forgets a name; running requests keep their version until they end."""
        adapter = self.find(name)
        del self._current[adapter.name]
        self._drop_if_unused(adapter)

    def pin(self, key: str) -> AdapterVersion:
        adapter = self._versions[key]
        self._pins[key] += 1
        return adapter

    def unpin(self, key: str) -> None:
        self._pins[key] -= 1
        assert self._pins[key] >= 0, f"{key} was unpinned more often than pinned"
        if not self._pins[key]:
            del self._pins[key]
            if key in self._versions:
                self._drop_if_unused(self._versions[key])

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self._versions.values())

    def when_dropped(self, tell: Callable[[AdapterVersion], None]) -> None:
        """`tell` is called with each version that leaves the device."""
        self._watchers.append(tell)

    def _drop_if_unused(self, adapter: AdapterVersion) -> None:
        if not self._pins[adapter.key] and self._current.get(adapter.name) is not adapter:
            self._versions.pop(adapter.key, None)
            for tell in self._watchers:
                tell(adapter)
