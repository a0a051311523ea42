"""Verdicts: work quarantined for crashing engines, as known to this process."""

import logging
from collections import Counter
from dataclasses import dataclass, replace

from coserve.core.request import Request
from coserve.errors import Quarantined
from coserve.serve.engine.probation import WorkItem

log = logging.getLogger(__name__)
_MOST_REQUESTS = 2  # guilty requests of one adapter, beyond which the adapter is guilty


@dataclass(frozen=True, slots=True)
class QuarantineVerdict:
    """Quarantined work and its reason; with the request, if it is one."""

    item: WorkItem
    reason: str
    request: Request | None = None


class Verdicts:
    """Refuses guilty work: requests equal to a guilty one except for id and seed, and passes equal to one
    except for their session. Other work is refused once, after which the database has the verdict."""

    def __init__(self) -> None:
        self._requests: dict[int, str] = {}
        self._passes: dict[int, str] = {}
        self._others: dict[WorkItem, str] = {}
        self._blamed: Counter[str] = Counter()  # adapters, by their requests that are guilty

    def find(
        self, item: WorkItem, request: Request | None, crash: str, pass_key: int | None = None
    ) -> list[QuarantineVerdict]:
        """Records an item as guilty of `crash`, in some cases with its adapter; `pass_key` is that of a
        session's pass under way."""
        why = f"the engine crashed again while it worked on this {item.kind}"
        found = [self._find(item, request, why, crash)]
        if pass_key is not None:
            self._passes[pass_key] = found[0].reason
        adapter = None if request is None else request.adapter
        if adapter is not None:
            self._blamed[adapter] += 1
            if self._blamed[adapter] >= _MOST_REQUESTS:
                why = "requests for this adapter crash the engine again and again"
                found.append(self._find(WorkItem("adapter", adapter), None, why, crash))
        return found

    def check_request(self, request: Request) -> None:
        """Raises Quarantined for a request equal to a guilty one but for id and seed."""
        if (reason := self._requests.get(_asked(request))) is not None:
            raise Quarantined(reason)

    @property
    def has_passes(self) -> bool:
        """Tells whether any pass is guilty, so that the key of others counts."""
        return bool(self._passes)

    def check_pass(self, key: int) -> None:
        """Raises Quarantined for a pass equal to a guilty one but for its session."""
        if (reason := self._passes.get(key)) is not None:
            raise Quarantined(reason)

    def check(self, item: WorkItem) -> None:
        """Raises Quarantined for work that was found guilty."""
        if (reason := self._others.pop(item, None)) is not None:
            raise Quarantined(reason)

    def _find(self, item: WorkItem, request: Request | None, why: str, crash: str) -> QuarantineVerdict:
        reason = f"{why} ({crash}): it is quarantined and not tried again; `coserve quarantine` lists it"
        log.error("quarantined: %s %s (%s)", item.kind, item.id, crash)
        if request is not None:
            self._requests[_asked(request)] = reason
        elif item.kind not in ("job", "session"):
            self._others[item] = reason
        return QuarantineVerdict(item, reason, request)


def _asked(request: Request) -> int:
    """A key equal for requests that differ in id and seed only."""
    sampling = repr(replace(request.sampling, seed=None))
    return hash((request.prompt, request.base, request.adapter, sampling))
