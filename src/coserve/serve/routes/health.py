"""`/health`, `/health/ready` and `/metrics`, for monitoring. Only the last one needs a key."""

import os
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from coserve.errors import EngineLost
from coserve.memory.malloc import resident_bytes
from coserve.metrics import CONTENT_TYPE
from coserve.serve.engine.link import SILENT_SECONDS, why_absent
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.processes.claim import Running, find_running
from coserve.serve.state import Shared, State
from coserve.wire.child import SILENT_SECONDS as SUPERVISOR_SILENT_SECONDS

router = APIRouter(tags=["Health"])


class Health(BaseModel):
    """Health of the server. `engine` is `starting` until one has loaded the model, `away` from its death to
    its successor's start, and `silent` where it hangs or is in a very long step; it is then soon killed and
    replaced. It is `waiting` while weights of a
    streamed base cannot be read: all requests and jobs go on once they can. While the `supervisor` is
    `silent` (it hangs, or a signal has stopped it) the server works, but dead processes are not restarted."""

    status: Literal["ok", "draining"]
    engine: Literal["starting", "ready", "waiting", "silent", "away"]
    supervisor: Literal["ready", "silent"]
    model: str


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Whether the server answers at all")
async def health(state: Shared) -> Health:
    """Always 200: requests wait while an engine is restarted."""
    return health_of(state)


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", responses=error_responses(), summary="Whether to send requests here")
async def ready(state: Shared) -> Health:
    """503 while there is no engine, while it hangs or waits for weights that cannot be read, or while the
    server drains. 200 while the supervisor is
    silent, as requests are still answered."""
    if state.draining:
        raise ApiError(503, "The server is shutting down.", code="draining")
    if not state.link.ready:
        raise EngineLost(why_absent(state.link.hello))
    if state.link.silence > SILENT_SECONDS:
        raise EngineLost(
            f"the engine has given no sign of life for {state.link.silence:.0f} s: it hangs, or a step of it "
            "takes very long; if it hangs it is replaced, and requests go on then"
        )
    if reason := _unreadable(state):
        raise EngineLost(f"all work waits, and goes on once the model's weights are there again: {reason}")
    return health_of(state)


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response,
            responses={200: {"content": {"text/plain": {}}}})  # fmt: skip
async def metrics(state: Shared) -> Response:
    """vLLM's names and units under `coserve_`; `finetune_` and `slo_` for metrics that vLLM lacks. Those that
    routers read are here once more under `vllm:`."""
    _gauge(state)
    state.routers.show(state.catalog, state.link, state.queue, state.settings.engine.page_size)
    await state.watch.count_jobs()
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


def health_of(state: State) -> Health:
    return Health(
        status="draining" if state.draining else "ok",
        engine=_engine(state),
        supervisor="silent" if _is_unsupervised(state) else "ready",
        model=state.catalog.base.name,
    )


def _engine(state: State) -> Literal["starting", "ready", "waiting", "silent", "away"]:
    if not state.link.ready:
        return "starting" if state.link.hello is None else "away"
    if state.link.silence > SILENT_SECONDS:
        return "silent"
    return "waiting" if _unreadable(state) else "ready"


def _unreadable(state: State) -> str:
    """The reason for which the engine cannot read weights of its base, as of its last statistics."""
    stats = state.link.stats
    return "" if stats is None else stats.unreadable


def _is_unsupervised(state: State) -> bool:
    return state.supervisor_silence() > SUPERVISOR_SILENT_SECONDS


def resident_of(state: State) -> dict[str, int]:
    """Bytes in memory of each of the server's processes; 0 for one that is not ready."""
    found = find_running(state.settings.state) or Running(0)
    pids = {"supervisor": found.pid, "api": os.getpid(), "engine": found.engine, "standby": found.standby}
    return {process: resident_bytes(pid) if pid else 0 for process, pid in pids.items()}


def _gauge(state: State) -> None:
    """Sets gauges to the present state; counters are updated at their events."""
    metrics, stats = state.metrics, state.link.stats
    metrics.num_requests_running.set(state.queue.inside)
    metrics.num_requests_waiting.set(state.queue.waiting)
    metrics.finetune_jobs_starved.set(state.job_controller.starved)
    metrics.engine_up.set(state.link.silence <= SILENT_SECONDS)
    metrics.weights_unreadable.set(bool(_unreadable(state)))
    metrics.supervisor_up.set(not _is_unsupervised(state))
    metrics.engine_connections.set(state.link.connections)
    if state.link.hello is not None:
        metrics.engine_load_seconds.set(state.link.hello.load_seconds)
    for process, nbytes in resident_of(state).items():
        metrics.process_resident.labels(process).set(nbytes)
    if stats is not None:
        metrics.show(stats)
