"""Figures of the last ten minutes, one sample a second, for those who watch.

Each second one sample is made, whoever watches, so that a page that is opened shows the past. Its common
figures are those of `/metrics`, which every key may read; what has names (models, jobs) is kept by tenant,
and only that tenant's viewers get it. A message is made once for all viewers of a tenant.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from coserve.errors import StateError
from coserve.serve.answering.fair import FairQueue
from coserve.serve.answering.timing import AnswerMeter, short
from coserve.serve.engine.link import SILENT_SECONDS, EngineLink, why_absent
from coserve.serve.store.records import Tenant
from coserve.serve.tasks import beside
from coserve.wire.messages import EngineStats, JobStep

SAMPLE_SECONDS: Final = 1.0
MOST_SAMPLES: Final = 600  # that are kept: ten minutes
MOST_VIEWERS: Final = 8  # of one tenant at once
MOST_TENANTS: Final = 64  # whose own figures one sample keeps, those with most tokens; some 300 bytes each
MOST_NAMES: Final = 16  # models, and as many jobs, of a tenant in one sample
_LONGEST_NAME: Final = 120
# The common figures of a sample, in their order. Rates are in a second, times in seconds, shares 0 to 1.
FIELDS: Final = (
    "time", "up", "steps", "fused_steps", "answered", "prompt", "trained", "running", "waiting", "pages_used",
    "swap_used", "met", "missed", "deferred", "slowdown", "gap", "slowest_gap", "first_token", "adapters",
)  # fmt: skip
_FLOWS: Final = (
    "steps",
    "fused_steps",
    "decode_tokens",
    "prefill_tokens",
    "trained_tokens",
    "slo_met",
    "slo_missed",
)
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Sample:
    """One second. Both are JSON: the common figures, and those of each tenant that had any."""

    row: bytes
    own: dict[str, bytes]


@dataclass(slots=True)
class _Counted:
    """The engine's counters when they last came, and the rates that follow from them."""

    stats: EngineStats | None = None
    at: float = 0.0
    rates: list[float] = field(default_factory=lambda: [0.0] * len(_FLOWS))
    deferred: float = 0.0

    def take(self, stats: EngineStats | None, now: float) -> None:
        """Takes the newest statistics. Those that came before are the same object; None: no engine."""
        if stats is self.stats:
            return
        before, seconds = self.stats, max(now - self.at, 1e-3)
        self.stats, self.at = stats, now
        if stats is None or before is None or stats.steps < before.steps:  # gone, or another engine's
            self.rates, self.deferred = [0.0] * len(_FLOWS), 0.0
            return
        self.rates = [(getattr(stats, name) - getattr(before, name)) / seconds for name in _FLOWS]
        whole = stats.answer_seconds - before.answer_seconds
        taken = stats.answer_deferred_seconds - before.answer_deferred_seconds
        self.deferred = min(max(taken / whole, 0.0), 1.0) if whole > 0 else 0.0


class Telemetry:
    """The samples, and those who watch. For one event loop."""

    def __init__(
        self,
        queue: FairQueue,
        link: EngineLink,
        is_draining: Callable[[], bool],
        clock: Callable[[], float] = time.time,
        own: Callable[[Tenant], Mapping[str, Any]] = lambda tenant: {},
        learn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`own` are figures of the present that a tenant's viewers alone get; `learn` is called before each
        sample that somebody watches."""
        self._own_now, self._learn = own, learn
        self._queue, self._link, self._is_draining, self._clock = queue, link, is_draining, clock
        self._meters: dict[tuple[str, str], AnswerMeter] = {}
        self._steps: dict[str, dict[str, JobStep]] = {}  # since the last sample, by tenant and job
        self._counted = _Counted()
        self._samples: deque[_Sample] = deque(maxlen=MOST_SAMPLES)
        self._number = 0  # of the newest sample
        self._now = b"{}"
        self._messages: dict[str, bytes] = {}  # of the newest sample alone, by tenant
        self._viewers: Counter[str] = Counter()
        self._sampled = asyncio.Event()
        self._is_over = False

    # What others note

    def meter(self, tenant: str, model: str) -> AnswerMeter:
        """The meter of a tenant's answers by a model, for one more answer; its user counts itself out."""
        found = self._meters.setdefault((tenant, model), AnswerMeter())
        found.users += 1
        return found

    def trained(self, tenant: str, step: JobStep) -> None:
        """Notes an optimizer step of a tenant's job."""
        self._steps.setdefault(tenant, {})[step.job] = step

    # Samples

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context in which a sample is made each second."""

        async def run() -> None:
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                if self._viewers and self._learn is not None:
                    with suppress(StateError):  # the database is away: what is known is shown
                        await self._learn()
                self.sample()

        try:
            async with beside(run(), "telemetry"):
                yield
        finally:
            self._is_over = True
            self._wake()

    def sample(self) -> None:
        """Makes a sample of what has been noted since the last one."""
        now, stats, link = self._clock(), self._link.stats, self._link
        self._counted.take(stats, now)
        whole, tenants = AnswerMeter(), dict[str, dict[str, AnswerMeter]]()
        for (tenant, model), meter in list(self._meters.items()):
            if meter.tokens:
                whole.add(meter)
                tenants.setdefault(tenant, {})[model] = meter
            elif not meter.users:
                del self._meters[tenant, model]
        self._number += 1
        self._samples.append(_Sample(_encode(self._row(now, stats, whole)), self._own(tenants)))
        for models in tenants.values():
            for meter in models.values():
                meter.clear()
        self._steps.clear()
        self._now = _encode(_state_of(link, stats))
        self._messages.clear()
        self._is_over = self._is_over or self._is_draining()
        self._wake()

    def _wake(self) -> None:
        self._sampled.set()
        self._sampled = asyncio.Event()

    def _row(self, now: float, stats: EngineStats | None, whole: AnswerMeter) -> list[float | None]:
        steps, fused, answered, prompt, trained, met, missed = map(short, self._counted.rates)
        used = swap = slowdown = adapters = 0.0
        if stats is not None:
            used = stats.used_pages / max(stats.pages, 1)
            swap = stats.swap_pages_used / max(stats.swap_pages, 1)
            slowdown, adapters = stats.slowdown, stats.adapters
        return [
            round(now, 1), int(self._link.silence <= SILENT_SECONDS), steps, fused, answered, prompt, trained,
            self._queue.inside, self._queue.waiting, short(used), short(swap), met, missed,
            short(self._counted.deferred), short(slowdown), *whole.latencies(), adapters,
        ]  # fmt: skip

    def _own(self, tenants: dict[str, dict[str, AnswerMeter]]) -> dict[str, bytes]:
        """Figures of the busiest tenants: tokens and latencies by model, losses and tokens by job."""
        tokens = Counter(
            {tenant: sum(m.tokens for m in models.values()) for tenant, models in tenants.items()}
        )
        for tenant, steps in self._steps.items():
            tokens[tenant] += sum(step.tokens for step in steps.values())
        found = {}
        for tenant, _ in tokens.most_common(MOST_TENANTS):
            models = sorted(tenants.get(tenant, {}).items(), key=lambda item: -item[1].tokens)[:MOST_NAMES]
            jobs = list(self._steps.get(tenant, {}).items())[:MOST_NAMES]
            found[tenant] = _encode({
                "models": {name[:_LONGEST_NAME]: [m.tokens, *m.latencies()] for name, m in models},
                "jobs": {job: [_finite(step.loss), step.tokens, step.step] for job, step in jobs},
            })  # fmt: skip
        return found

    # Viewers

    def is_full(self, tenant: Tenant) -> bool:
        """Tells whether as many watch for a tenant as may."""
        return self._viewers[tenant.id] >= MOST_VIEWERS

    async def follow(self, tenant: Tenant) -> AsyncGenerator[bytes, None]:
        """JSON messages with samples: first those that are kept, then each as it is made, until the server
        drains. A viewer that reads slowly gets several at once."""
        if self.is_full(tenant):
            return
        self._viewers[tenant.id] += 1
        seen, is_first = self._number - len(self._samples), True
        try:
            while not self._is_over:
                wait, newest = self._sampled, self._number
                if newest == seen + 1 and not is_first:
                    if tenant.id not in self._messages:
                        self._messages[tenant.id] = self._message(tenant, 1)
                    yield self._messages[tenant.id]
                elif newest > seen:
                    yield self._message(tenant, min(newest - seen, len(self._samples)), is_first)
                    is_first = False
                seen = newest
                if self._sampled is wait:  # none was made while the message was sent
                    await wait.wait()
        finally:
            self._viewers[tenant.id] -= 1
            if not self._viewers[tenant.id]:
                del self._viewers[tenant.id]

    def _message(self, tenant: Tenant, count: int, is_first: bool = False) -> bytes:
        """The newest samples as one message: the common figures, and the tenant's own. A viewer's first one
        names the fields."""
        samples = list(self._samples)[-count:]
        rows = b",".join(sample.row for sample in samples)
        own = b",".join(sample.own.get(tenant.id, b"null") for sample in samples)
        mine = _encode({
            "running": self._queue.running(tenant), "waiting": self._queue.place(tenant),
            **self._own_now(tenant),
        })  # fmt: skip
        fields = _encode(FIELDS) if is_first else b"null"
        parts = {
            "fields": fields,
            "rows": b"[%s]" % rows,
            "own": b"[%s]" % own,
            "now": self._now,
            "mine": mine,
        }
        return b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), part) for name, part in parts.items())


def _state_of(link: EngineLink, stats: EngineStats | None) -> dict[str, Any]:
    """The part that is shown of the present alone."""
    hello = link.hello
    waits = (
        why_absent(hello) if hello is None or not link.ready else f"all {hello.max_running} places are taken"
    )
    if stats is None:
        return {"waits": waits}
    return {
        "waits": waits,
        "unreadable": stats.unreadable,
        "places": 0 if hello is None else hello.max_running,
        "engine_waiting": stats.waiting,
        "pages": stats.pages,
        "free_pages": stats.free_pages,
        "cached_pages": stats.holdings.cached_pages,
        "states": [stats.holdings.states_used, stats.holdings.states],
        "kept_states": [stats.holdings.kept_states_used, stats.holdings.kept_states],
        "swap_pages": stats.swap_pages,
        "memory": stats.memory,
        "memory_budget": stats.memory_budget,
        "known": stats.paging.known,
        "pinned": len(stats.paging.pinned),
        "cost_error": short(stats.cost_error),
    }


def _finite(number: float) -> float | None:
    return short(number) if math.isfinite(number) else None
