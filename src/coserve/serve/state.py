"""Shared state of the routes: one object per server."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from coserve.core.request import SamplingParams
from coserve.metrics import Metrics
from coserve.serve.adapter_registry.catalog import Catalog
from coserve.serve.answering.fair import FairQueue
from coserve.serve.answering.logprobs import LogprobWriter
from coserve.serve.answering.waits import AnswerWaits
from coserve.serve.holdings import TenantHoldings
from coserve.serve.offload import Offload, TenantTurns
from coserve.serve.router_metrics import RouterMetrics
from coserve.serve.telemetry import Telemetry
from coserve.serve.training.watch import TrainingWatch
from coserve.serve.web.doctor import Doctor

if TYPE_CHECKING:
    from coserve.serve.engine.link import EngineLink
    from coserve.serve.otel import OtelSpans
    from coserve.serve.settings import ServerSettings
    from coserve.serve.store.store import Store
    from coserve.serve.training.controller import JobController
    from coserve.text import Text


@dataclass
class State:
    """The parts of a running server, stored in `app.state.coserve`."""

    settings: "ServerSettings"
    store: "Store"
    link: "EngineLink"
    text: "Text"
    job_controller: "JobController"
    sampling: Mapping[str, SamplingParams] = field(default_factory=dict)  # defaults of bases, by name
    supervisor_silence: Callable[[], float] = lambda: 0.0  # seconds since the supervisor was heard
    metrics: Metrics = field(default_factory=Metrics)
    routers: RouterMetrics = field(init=False)  # the same, by the names that routers read
    # Work that holds the interpreter: bodies that are parsed, and replies that are written.
    bodies: Offload = field(default_factory=lambda: Offload(1, "bodies"))
    prompts: Offload = field(default_factory=lambda: Offload(2, "prompts"))  # work that mostly does not
    chats: Offload = field(default_factory=lambda: Offload(4, "chats"))  # short ones: a millisecond each
    # Checks of uploaded training data, each of which is in a process of its own.
    data: Offload = field(default_factory=lambda: Offload(8, "data"))
    graders: Offload = field(default_factory=lambda: Offload(4, "graders"))  # but those of jobs
    adapters: Offload = field(default_factory=lambda: Offload(4, "adapters"))  # whose files are copied
    checks: TenantTurns = field(default_factory=TenantTurns)  # of jobs, by the engine
    evals_changed: asyncio.Event = field(default_factory=asyncio.Event)  # runs are there, or have ended
    began: float = field(default_factory=monotonic)  # on `time.monotonic`
    logprobs: LogprobWriter = field(init=False)
    queue: FairQueue = field(init=False)
    catalog: Catalog = field(init=False)
    waits: AnswerWaits = field(init=False)
    telemetry: Telemetry = field(init=False)
    watch: TrainingWatch = field(init=False)
    doctor: Doctor = field(init=False)
    otel: "OtelSpans | None" = None  # where traces are asked for
    alert: Callable[..., None] = lambda type, **data: None  # tells the operator's webhooks of an event
    draining: bool = field(default=False, init=False)  # new work is refused
    on_settings: list[Callable[["ServerSettings"], object]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.routers = RouterMetrics(self.metrics.registry)
        self.logprobs = LogprobWriter(self.text)
        self.queue = FairQueue(self.settings.max_queue, self.settings.max_queue_tenant)
        self.catalog = Catalog(self.settings.base_name, int(time()), self.store, self.settings.bases)
        self.catalog.aliases = self.settings.model_aliases
        self.waits = AnswerWaits(self.queue, self.link)
        held = TenantHoldings(self.store, self.link)
        self.telemetry = Telemetry(
            self.queue,
            self.link,
            lambda: self.draining,
            own=lambda tenant: {"waits": self.waits.rows(tenant), "holds": held.of(tenant)},
            learn=held.learn,
        )
        self.doctor = Doctor(self.settings)
        self.watch = TrainingWatch(self.metrics, self.queue, self.store, self.telemetry)
        self.on_settings.append(lambda new: self.queue.limit(new.max_queue, new.max_queue_tenant))

    def change(self, settings: "ServerSettings") -> None:
        """Takes over new values of settings that are hot; others must be as they were."""
        self.settings = settings
        for take in self.on_settings:
            take(settings)


def state_of(request: Request) -> State:
    """The server's state."""
    found: State = request.app.state.coserve
    return found


async def _shared(request: Request) -> State:
    """FastAPI's dependency for `State`; a coroutine, as FastAPI runs others in threads."""
    return state_of(request)


Shared = Annotated[State, Depends(_shared)]
