"""Contents of the page's views Health and Keys, beside the API: the server's state, and a tenant's quotas."""

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from pydantic import BaseModel

from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.quotas import DISK_RESERVE
from coserve.serve.processes.claim import find_running
from coserve.serve.routes.health import Health, health_of, resident_of
from coserve.serve.state import Shared, State
from coserve.serve.store.records import Key
from coserve.serve.web.doctor import Findings

router = APIRouter(tags=["Page"])
HEALTH: Final = "/web/api/health"
DOCTOR: Final = "/web/api/doctor"
USAGE: Final = "/web/api/usage"


class EngineOverview(BaseModel):
    """The engine, as it introduced itself. `deaths` are those that this server's API process has seen and
    outlived; `crash` says how the engine before this one brought itself down."""

    device: str
    dtype: str
    quantize: str
    parameters: int
    positions: int
    cache_tokens: int
    max_running: int
    load_seconds: float
    deaths: int
    crash: str
    bases: list[str]


class Replica(BaseModel):
    """A server that shares the database, by its name: `work` is the number of its leases of each kind (job,
    batch, eval, response, tinker)."""

    name: str
    is_this: bool
    work: dict[str, int]


class ServerOverview(BaseModel):
    """The server. `replicas` are the servers that share its database, none where it is alone, and `workers`
    tells what those of a cluster do. `deaths` are those that the server has outlived, by process. Times are
    seconds; `uptime` is the server's, None where the system does not tell it, and
    `api_uptime` that of the process that answers, which is younger where it was restarted."""

    version: str
    health: Health
    uptime: float | None
    api_uptime: float
    engine: EngineOverview | None
    resident: dict[str, int]
    disk_total: int
    disk_free: int
    disk_reserve: int
    keys_required: bool
    deaths: dict[str, int]
    replicas: list[Replica]
    workers: list[str]


class KeptOfTenant(BaseModel):
    """Rows and bytes that the server keeps, of one kind."""

    kind: str
    rows: int
    bytes: int


class TenantUsage(BaseModel):
    """A tenant's own records, keys and limits. Limits that are 0 are none."""

    tenant: str
    weight: float
    kept: list[KeptOfTenant]
    keys: list[Key]
    unfinished_jobs: int
    running: int
    waiting: int
    limits: dict[str, int]


@router.get(HEALTH, responses=error_responses(), summary="The server's state, as the page shows it")
async def overview(request: Request, caller: Caller, state: Shared) -> ServerOverview:
    """Version, uptime, engine, processes and disk."""
    hello, stats = state.link.hello, state.link.stats
    running = await asyncio.to_thread(find_running, state.settings.state)
    disk = await asyncio.to_thread(shutil.disk_usage, state.settings.state)
    return ServerOverview(
        version=request.app.version,
        health=health_of(state),
        uptime=_age(os.getppid()),
        api_uptime=time.monotonic() - state.began,
        engine=None
        if hello is None
        else EngineOverview(
            device=hello.device,
            dtype=hello.dtype,
            quantize=hello.quantize,
            parameters=hello.parameters,
            positions=hello.positions,
            cache_tokens=hello.cache_tokens,
            max_running=hello.max_running,
            load_seconds=hello.load_seconds,
            deaths=max(state.link.connections - 1, 0),
            crash=hello.crash,
            bases=list(state.catalog.bases),
        ),
        resident=await asyncio.to_thread(resident_of, state),
        disk_total=disk.total,
        disk_free=disk.free,
        disk_reserve=DISK_RESERVE,
        keys_required=not await state.store.tenants.is_open(),
        deaths={} if running is None else running.deaths,
        replicas=await _replicas(state),
        workers=[] if stats is None else list(stats.workers),
    )


async def _replicas(state: State) -> list[Replica]:
    """The servers of a shared database."""
    if not state.settings.database:
        return []
    leases = state.store.leases
    found = await leases.servers()
    return [Replica(name=name, is_this=name == leases.owner, work=work) for name, work in found.items()]


@router.get(DOCTOR, responses=error_responses(503), summary="What `coserve doctor` finds on this machine")
async def findings(caller: Caller, state: Shared) -> Findings:
    """The checks of the server's machine, made at most every ten minutes, in a process beside the server."""
    return await state.doctor.findings()


@router.get(USAGE, responses=error_responses(), summary="The caller's records, keys and limits")
async def usage(caller: Caller, state: Shared) -> TenantUsage:
    """All that the server keeps of the caller's tenant, beside what it may keep."""
    store, settings = state.store, state.settings
    kept = await store.tenants.kept(caller.id)
    return TenantUsage(
        tenant=caller.name,
        weight=caller.weight,
        kept=[KeptOfTenant(kind=one.kind, rows=one.rows, bytes=one.bytes) for one in kept],
        keys=list(await store.tenants.keys(caller.id)),
        unfinished_jobs=await store.jobs.count_unfinished(caller.id),
        running=state.queue.running(caller),
        waiting=state.queue.place(caller),
        limits={
            "bytes": settings.max_bytes_tenant,
            "records": settings.max_records_tenant,
            "files": settings.max_files_tenant,
            "jobs": settings.max_jobs_tenant,
            "requests_minute": settings.max_requests_minute,
            "waiting": settings.max_queue_tenant,
        },
    )


def _age(pid: int) -> float | None:
    """Seconds since a process started; None where the system does not tell."""
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        now = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return now - started / os.sysconf("SC_CLK_TCK")
