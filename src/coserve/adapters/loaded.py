"""Adapter versions whose weights are on the device, by their keys."""

from collections.abc import Callable, Iterable

from coserve.adapters.adapter import AdapterVersion
from coserve.errors import AdapterNotFound


class LoadedAdapters:
    """Weights of adapter versions by key (`name@3`), until the host drops them (`AdapterCache`).

    Training sessions add the versions that they publish; a reading thread those that it has read.
    """

    def __init__(self, when_dropped: Callable[[AdapterVersion], object] = lambda version: None) -> None:
        """`when_dropped` is called with each version that leaves the device."""
        self._versions: dict[str, AdapterVersion] = {}
        self._when_dropped = when_dropped

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, key: str) -> bool:
        return key in self._versions

    @property
    def nbytes(self) -> int:
        # A list, as other threads add versions meanwhile.
        return sum(adapter.nbytes for adapter in list(self._versions.values()))

    def add(self, adapter: AdapterVersion) -> None:
        """Holds a version until it is dropped."""
        self._versions[adapter.key] = adapter

    def find(self, key: str) -> AdapterVersion:
        """The version with this key. Raises AdapterNotFound where its weights are not here."""
        found = self._versions.get(key)
        if found is None:
            raise AdapterNotFound(f"the weights of adapter {key!r} are not on the device")
        return found

    def drop(self, keys: Iterable[str]) -> None:
        """Frees versions; unknown keys are ignored."""
        for key in keys:
            if (found := self._versions.pop(key, None)) is not None:
                self._when_dropped(found)
