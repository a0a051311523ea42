"""Predicts the latency that versions would add to a request, or to answers under way, and has the rule choose
among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from coserve.adapters.activation import first_active
from coserve.adapters.paging.cache import AdapterCache, AdapterTier, ExpectedRead, expected_reads
from coserve.adapters.paging.reader import Reader
from coserve.adapters.paging.stored import KnownVersion
from coserve.core.request import BASE, Request, VersionTraits
from coserve.core.sequence import Sequence as Answer
from coserve.engine.memory import EngineMemory
from coserve.schedule.approximation import ApproximationRule, StepLoad, VersionOutlook
from coserve.schedule.cost import CostModel
from coserve.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ChainOfBases:
    """A chain of two bases (`model/stitched.py`) as an alternative: its id, the bytes of the weights that a
    row passes, and the most tokens of a sequence on it."""

    base: str
    nbytes: int
    most: int


Version = KnownVersion | ChainOfBases | None  # None is the base


def shares_pages(one: Version, other: Version) -> bool:
    """Tells whether two versions of one base have the same keys and values for the same tokens."""
    return all(
        each is None or (isinstance(each, KnownVersion) and each.outline.behind) for each in (one, other)
    )


def for_version(request: Request, version: Version) -> Request:
    """The request, answered by a version. Raises RequestError for a prompt without the tokens from which on
    it acts."""
    if not isinstance(version, KnownVersion):
        base = request.base if version is None else version.base
        return structs.replace(request, base=base, adapter=None, traits=VersionTraits())
    virtual, invocation = version.virtual, version.outline.invocation
    start = first_active(request.prompt, invocation, version.name) if invocation else 0
    traits = VersionTraits(virtual.count, virtual.prompt_count, version.outline.behind, start)
    return structs.replace(request, adapter=version.key, traits=traits)


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
        base: str = BASE,
    ) -> None:
        """`base_nbytes` and `cost` are those of the base with the id `base`. `bound` is that of
        `ApproximationRule`; without one every answer is exact, as in the deterministic mode, whose results
        depend on no load."""
        self._cache, self._scheduler, self._reader, self._memory = cache, scheduler, reader, memory
        self._base_nbytes, self._cost, self._base = max(base_nbytes, 1), cost, base
        self._rule = None if bound is None else ApproximationRule(bound)

    def choose(self, versions: Sequence[Version], prompt: int, tokens: int, now: float) -> int:
        """The index of the version that answers a request of `prompt` tokens for up to `tokens` more;
        `versions` are the one asked for and its alternatives, the most accurate first."""
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
        known = [version.key for version in versions if isinstance(version, KnownVersion)]
        room = self._memory.stored_room(asks=False)
        reads = iter(expected_reads(self._cache, known, wanted, room))
        added = [tokens * seconds for seconds in self._step_seconds(versions)]
        outlooks = []
        for version, seconds in zip(versions, added, strict=True):
            match version:
                case None:
                    outlooks.append(VersionOutlook(compute=seconds))
                case ChainOfBases():
                    fits = prompt + tokens <= version.most
                    outlooks.append(VersionOutlook(0.0 if fits else math.inf, seconds))
                case KnownVersion():
                    outlooks.append(self._outlook(next(reads), seconds))
        return self._rule.choose(outlooks, load)

    def is_pressed(self, now: float) -> bool:
        """Tells whether a request has waited for longer than the bound: for a place where all are taken, or
        for an adapter's bytes that answers hold."""
        if self._rule is None:
            return False
        requests = self._scheduler.requests
        is_full = len(requests.running) >= self._scheduler.config.max_running
        new = [one for one in requests.waiting if is_full and one.admitted_at is None]
        first = min((one.request.arrival for one in (*new, *requests.blocked_on_adapter)), default=now)
        return now - first > self._rule.bound

    def turn(self, answers: Sequence[Answer], versions: Sequence[Version], at: int) -> int:
        """The index of the version with which `answers` go on, all those of version number `at`: that one, or
        a less accurate one that is on the device.

        What the others do not share of the present one's keys and values is computed again. The present one
        takes as long as its last answer where somebody waits for its bytes.
        """
        assert self._rule is not None, "is_pressed"
        steps, computed = max(each.steps_left for each in answers), sum(each.computed for each in answers)
        row, passes = self._cost.weights["forward_rows"], self._cost.pass_seconds
        added = self._step_seconds(versions, answers)
        present, *others = versions[at:]
        frees = [self._is_there(one) and self._frees(present, one) for one in others]
        there = [is_free or self._is_there(one, True) for is_free, one in zip(frees, others, strict=True)]
        wait = steps * (passes + row * len(self._scheduler.requests.running)) if any(frees) else 0.0
        outlooks = [VersionOutlook(wait, steps * added[at])]
        for one, is_there, is_free, seconds in zip(others, there, frees, added[at + 1 :], strict=True):
            again = 0.0 if shares_pages(one, present) else passes + row * computed
            load = again + (0.0 if is_free else wait) if is_there else math.inf
            outlooks.append(VersionOutlook(load, steps * seconds))
        return at + self._rule.choose(outlooks, StepLoad(1, 1))

    def _is_there(self, version: Version, is_open: bool = False) -> bool:
        """Tells whether a version of the base is on the device, and if `is_open` does not leave for
        another."""
        if not isinstance(version, KnownVersion):
            return version is None
        if self._cache.find(version.key) is None or self._cache.tier(version.key) is not AdapterTier.DEVICE:
            return False
        return not is_open or expected_reads(self._cache, [version.key], (), 0) != [None]

    def _frees(self, present: Version, other: Version) -> bool:
        """Tells whether the first request that waits for an adapter would have room for it if all answers of
        one version went on with the other, and has none now."""
        blocked = self._scheduler.requests.blocked_on_adapter
        if not isinstance(present, KnownVersion) or not blocked:
            return False
        if (wanted := blocked[0].request.adapter) is None:
            return False
        room = self._memory.stored_room(asks=False)
        kept = (other.key,) if isinstance(other, KnownVersion) else ()
        (now,) = expected_reads(self._cache, [wanted], (), room)
        (then,) = expected_reads(self._cache, [wanted], (), room, (present.key,), kept)
        return now is None and then is not None

    def _outlook(self, read: ExpectedRead | None, compute: float) -> VersionOutlook:
        if read is None:
            return VersionOutlook(math.inf, compute, True)
        return VersionOutlook(self._reader.seconds(read.nbytes), compute, read.displaces)

    def _step_seconds(self, versions: Sequence[Version], without: Sequence[Answer] = ()) -> list[float]:
        """Seconds that a step with one more row of each version, or with rows of the answers `without` which
        the others are there, takes longer, beyond the least.

        Modules that no row of other answers passes are read once more, and take the share of a forward pass
        that their bytes are of the base's. Those of the base are a version's as far as it has none of its
        own. Those of a chain of two bases are read once more unless it has rows.
        All modules of a row cost it the share of a row's time that their bytes are of the base's.
        """
        under_way = self._scheduler.requests
        there = [
            sequence.request
            for sequence in (*under_way.running, *under_way.waiting)
            if sequence not in without
        ]
        bases = {request.base for request in there}
        keys = {request.adapter for request in there if request.base == self._base}
        others = [None if key is None else self._cache.find(key) for key in keys]
        shared = max((self._of_base(version) for version in others), default=0)
        read, passed = list[float](), list[float]()
        for version in versions:
            if isinstance(version, ChainOfBases):
                read.append(0 if version.base in bases else version.nbytes)
                passed.append(version.nbytes)
                continue
            own, rest = 0 if version is None else version.cost, self._of_base(version)
            is_there = version is not None and version.key in keys
            read.append((0 if is_there else own) + max(rest - shared, 0))
            passed.append(own + rest)
        least, rows_of = min(passed), max(len(without), 1)
        whole = self._cost.pass_seconds / self._base_nbytes
        row = rows_of * self._cost.weights["forward_rows"] / self._base_nbytes
        return [whole * nbytes + row * (rows - least) for nbytes, rows in zip(read, passed, strict=True)]

    def _of_base(self, version: KnownVersion | None) -> int:
        """Bytes of the base's own modules that rows of a version pass."""
        saved = 0 if version is None else version.outline.saved
        return max(self._base_nbytes - saved, 0)
