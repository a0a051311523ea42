"""The current version of each adapter name, and version numbers."""

from typing import Final

from coserve.adapters.paging.cache import AdapterCache
from coserve.adapters.paging.stored import KnownVersion
from coserve.core.request import BASE
from coserve.errors import AdapterError, AdapterNotFound

_REMEMBERED: Final = 4096  # names that are gone, of which the newest version's number is remembered


class AdapterBank:
    """Current versions by name, of all bases of an engine: a name is of one base. `publish` replaces one
    atomically. The adapter cache manages weights and older versions."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._current: dict[str, KnownVersion] = {}
        self._newest: dict[str, int] = {}  # by name, those that are gone included, the latest published last
        self._floor = 0  # no name that is forgotten had a version of this number, or of a greater one

    def __contains__(self, name: str) -> bool:
        return name in self._current

    @property
    def names(self) -> list[str]:
        return sorted(self._current)

    def publish(self, version: KnownVersion) -> None:
        """Makes `version` the current version of its name."""
        name = version.name
        check_name(name)
        before = self._current.get(name)
        self._cache.add(version)
        self._current[name] = version
        self._newest[name] = max(version.version, self._newest.pop(name, -1))
        self._forget_names()
        if before is not None and before.key != version.key:
            self._cache.retire(before.key)

    def look(self, name: str) -> KnownVersion:
        """The current version of a name, or the version of a key (`name@3`) that is still in use."""
        found = self._current.get(name) or self._cache.find(name)
        if found is None:
            known = ", ".join(self.names) or "none are loaded"
            raise AdapterNotFound(f"there is no adapter {name!r} (known: {known})")
        return found

    def next_version(self, name: str, base: str = BASE) -> int:
        """A version number never used for this name: old versions may still be in use, and cached pages of
        removed ones must not match. Raises AdapterError for the name of another base's adapter."""
        check_base(self._current.get(name), base)
        return 1 + self._newest[name] if name in self._newest else self._floor

    def remove(self, name: str) -> None:
        """Removes a name; running requests keep their version until they end."""
        version = self.look(name)
        del self._current[version.name]
        self._forget_names()
        self._cache.retire(version.key)

    def _forget_names(self) -> None:
        """Drops the version numbers of the oldest removed names beyond a limit, as every job adds a name. New
        names then start above all their numbers."""
        while len(self._newest) > len(self._current) + _REMEMBERED:
            oldest = next(name for name in self._newest if name not in self._current)
            self._floor = max(self._floor, 1 + self._newest.pop(oldest))


def check_base(version: KnownVersion | None, base: str) -> None:
    """Raises AdapterError for an adapter of another base."""
    if version is not None and version.base != base:
        raise AdapterError(f"the adapter {version.name!r} is one of another base")


def check_name(name: str) -> None:
    """Raises AdapterError for an empty name or one that looks like a version's key."""
    if "@" in name or not name:
        raise AdapterError(f"an adapter's name must not be empty or contain '@': {name!r}")
