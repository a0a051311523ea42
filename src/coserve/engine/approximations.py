"""Predicts the latency that versions would add to a request now, and has the rule choose among them."""

import math
from collections.abc import Sequence

from coserve.adapters.paging.cache import AdapterCache, ExpectedRead, expected_reads
from coserve.adapters.paging.reader import Reader
from coserve.adapters.paging.stored import KnownVersion
from coserve.engine.memory import EngineMemory
from coserve.schedule.approximation import ApproximationRule, StepLoad, VersionOutlook
from coserve.schedule.cost import CostModel
from coserve.schedule.scheduler import Scheduler

Version = KnownVersion | None  # None is the base


class Approximations:
    """Chooses between an adapter and its alternatives in one engine. Runs under the engine's lock."""

    def __init__(
        self,
        cache: AdapterCache,
        scheduler: Scheduler,
        reader: Reader,
        memory: EngineMemory,
        base_nbytes: int,
        cost: CostModel,
        bound: float | None,
    ) -> None:
        """`base_nbytes` and `cost` are the base's. `bound` is that of `ApproximationRule`; without one every
        answer is exact, as in the deterministic mode, whose results depend on no load."""
        self._cache, self._scheduler, self._reader, self._memory = cache, scheduler, reader, memory
        self._base_nbytes, self._cost = max(base_nbytes, 1), cost
        self._rule = None if bound is None else ApproximationRule(bound)

    def choose(self, versions: Sequence[Version], tokens: int, now: float) -> int:
        """The index of the version that answers a request for up to `tokens` tokens; `versions` are the one
        asked for and its alternatives, the most accurate first."""
        if len(versions) == 1 or self._rule is None:
            return 0
        requests = self._scheduler.requests
        blocked, waiting = requests.blocked_on_adapter, requests.waiting
        first = min((sequence.request.arrival for sequence in waiting), default=now)
        load = StepLoad(
            len(requests.running) + len(waiting) + len(blocked),
            self._scheduler.config.max_running,
            now - first,
        )
        wanted = [key for sequence in blocked if (key := sequence.request.adapter) is not None]
        known = [version.key for version in versions if version is not None]
        room = self._memory.stored_room(asks=False)
        reads = iter(expected_reads(self._cache, known, wanted, room))
        return self._rule.choose(
            [
                VersionOutlook() if version is None else self._outlook(version, next(reads), tokens)
                for version in versions
            ],
            load,
        )

    def _outlook(self, version: KnownVersion, read: ExpectedRead | None, tokens: int) -> VersionOutlook:
        """A version's outlook. A step with its modules takes longer by the share of a forward pass that their
        bytes are of the base's, unless the steps have another answer of the same version anyway."""
        step = self._cost.pass_seconds * version.cost / self._base_nbytes
        running = {sequence.request.adapter for sequence in self._scheduler.requests.running}
        compute = 0.0 if version.key in running else tokens * step
        if read is None:
            return VersionOutlook(math.inf, compute, True)
        return VersionOutlook(self._reader.seconds(read.nbytes), compute, read.displaces)
