"""Has answers under way go on with another chain of their application, where load asks for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from coserve.adapters.paging.cache import AdapterCache
from coserve.adapters.paging.stored import KnownVersion
from coserve.core.request import BASE
from coserve.core.sequence import Sequence as Answer
from coserve.engine.approximations import Approximations, ChainOfBases, Version, for_version
from coserve.engine.completion import Completion
from coserve.schedule.scheduler import Scheduler


class ChainChanges:
    """Moves all answers of one version at once: as long as one stays, its modules are read and its bytes are
    held. An answer changes once at most, so none is computed again and again. One for each base; all methods
    run between two steps, under the engine's lock."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: AdapterCache,
        approximations: Approximations,
        completions: Mapping[int, Completion],
        base: str = BASE,
    ) -> None:
        """`completions` are those of open requests, by key."""
        self._scheduler, self._cache, self._base = scheduler, cache, base
        self._approximations, self._completions = approximations, completions
        self._versions: dict[int, Sequence[Version]] = {}  # of answers that may change, by key
        self._left: dict[int, str] = {}  # versions that changed answers had, while plans under way have rows

    def allow(self, key: int, versions: Sequence[Version]) -> None:
        """Lets an answer change to a less accurate one of `versions`; its request allowed all of them. Those
        of other bases are for whole answers: their keys and values are others."""
        if len(versions) > 1:
            self._versions[key] = versions

    def forget(self, key: int) -> None:
        """Notes the end of an answer."""
        self._versions.pop(key, None)
        self._release(key)

    def advance(self, now: float) -> None:
        """Changes the answers of one version if that is better for them or for who waits."""
        for key in [key for key in self._left if not self._completions[key].sequence.under_way]:
            self._release(key)
        if not self._versions or not self._approximations.is_pressed(now):
            return
        for group in self._groups():
            versions, at = self._versions[group[0].sequence.key], group[0].alternative
            chosen = self._approximations.turn([each.sequence for each in group], versions, at)
            if chosen != at:
                for completion in group:
                    self._change(completion, chosen)
                return

    def _groups(self) -> list[list[Completion]]:
        """Answers by version, where all of a version may change alike and have begun."""
        requests, groups = self._scheduler.requests, defaultdict[str | None, list[Answer]](list)
        for sequence in requests.queues:
            if sequence.request.base == self._base:
                groups[sequence.request.adapter].append(sequence)
        return [
            [self._completions[sequence.key] for sequence in group]
            for group in groups.values()
            if self._may_change(group)
        ]

    def _may_change(self, group: Sequence[Answer]) -> bool:
        versions = self._versions.get(group[0].key)
        known = [version for version in versions or () if isinstance(version, KnownVersion)]
        if versions is None or any(version.virtual.count for version in known):
            return False  # with virtual tokens its own would be at other positions
        if any(version.outline.invocation for version in known):
            return False  # pages before these tokens are the base's
        return all(
            self._versions.get(each.key) == versions and each.output and not each.offloaded for each in group
        )

    def _change(self, completion: Completion, chosen: int) -> None:
        sequence = completion.sequence
        versions = self._versions.pop(sequence.key)
        before, version = versions[completion.alternative], versions[chosen]
        assert not isinstance(version, ChainOfBases), "`turn` chooses a version of the answer's base"
        is_there = version is None or self._cache.acquire(version.key, sequence.key, reopens=True)
        assert is_there, "`turn` chooses what is on the device"
        completion.change(chosen)
        self._scheduler.requests.queues.change(sequence, for_version(sequence.request, version))
        if isinstance(before, KnownVersion):
            self._left[sequence.key] = before.key
            if not sequence.under_way:
                self._release(sequence.key)

    def _release(self, key: int) -> None:
        """Gives up the version that a changed answer had."""
        if (version := self._left.pop(key, None)) is not None:
            self._cache.release(version, key)
