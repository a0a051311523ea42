"""The caches of an engine's bases: pages of each base's shape of keys and values, what they hold, and
limits."""

from collections.abc import Iterator

from coserve.core.request import BASE
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.kept_states import KeptStates
from coserve.schedule.offloading import Offloading
from coserve.schedule.prefixes import Prefixes
from coserve.schedule.swapping import SwappedPrefixes, Swapping


class BaseCache:
    """A base's pool of pages, the prefixes in them, the second tier of pages, and what the scheduler knows of
    the base (`config`: positions, tokens that end an answer, row buckets). Pages of one base never hold
    another's keys and values, so that bases may have any width and depth."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        swapping: Swapping | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        """Without `swapping` preempted sequences of the base are computed again, and without `offloading`
        none may be longer than all pages."""
        self.config, self.pages = config, pages
        self.swapping = swapping or Swapping(CostModel())
        self.swapping.copies.pool = pages
        states = KeptStates(config.kept_states) if config.kept_states else None
        swapped = SwappedPrefixes(self.swapping, pages)
        self.prefixes = Prefixes(pages, config.prefix_sharing, swapped, states)
        self.offloading = offloading or Offloading(self.swapping.tier)


class BaseCaches:
    """The cache of each base by the base's id, the first base's first."""

    def __init__(self, first: BaseCache) -> None:
        self.first = first
        self._caches = {BASE: first}

    def __getitem__(self, base: str) -> BaseCache:
        return self._caches[base]

    def of(self, sequence: Sequence) -> BaseCache:
        """The cache of a sequence's base."""
        return self._caches[sequence.request.base]

    def __iter__(self) -> Iterator[str]:
        return iter(self._caches)

    def __len__(self) -> int:
        return len(self._caches)

    def add(self, base: str, cache: BaseCache) -> None:
        """Takes requests for one more base from now on."""
        self._caches[base] = cache

    @property
    def has_unfilled(self) -> bool:
        """Tells whether the next plan fills pages with virtual tokens."""
        return any(cache.prefixes.has_unfilled for cache in self._caches.values())
