"""Assembles a server's parts, and closes them."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError, CoserveError, StateError
from coserve.serve.adapter_registry.catalog import ApproximateModel
from coserve.serve.adapter_registry.following import following
from coserve.serve.adapter_registry.imports import digest
from coserve.serve.artifacts.objects import objects_at
from coserve.serve.artifacts.shared import SharedArtifacts
from coserve.serve.engine.link import EngineLink
from coserve.serve.engine.probation import LASTING, Suspect, WorkItem
from coserve.serve.evals.runs import running_evals
from coserve.serve.otel import OtelSpans
from coserve.serve.reporting.observer import Reporting
from coserve.serve.settings import ServerSettings
from coserve.serve.state import State
from coserve.serve.store.backup import sweep_stage
from coserve.serve.store.durable import write_whole
from coserve.serve.store.ids import new_id
from coserve.serve.store.leases import SERVER
from coserve.serve.store.quarantine import Suspects
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import Adapter
from coserve.serve.store.store import Store
from coserve.serve.tasks import beside
from coserve.serve.training.controller import JobController
from coserve.serve.training.origins import sweep_origins
from coserve.serve.webhooks.alerts import Alerts
from coserve.text import Text
from coserve.text.generation import recommended
from coserve.wire.messages import Hello, JobEnded, JobStep, Numbered

log = logging.getLogger(__name__)
_SWEEP: Final = 300.0  # seconds between two looks for records that are too old
_NEXT_SWEEP: Final = 1.0  # where the last look left some


@asynccontextmanager
async def build_state(settings: ServerSettings, socket: Path) -> AsyncIterator[State]:
    """Context with a running server's state: its store is open, and its link connects to the engine at
    `socket`.

    A bug in the link or the job controller ends the block with an exception and so the process, which the
    supervisor restarts.
    """
    text = await asyncio.to_thread(_text, settings)
    quotas = _quotas(settings)
    owner = await asyncio.to_thread(_owner, settings.state)
    with (
        _artifacts(settings) as artifacts,
        Store(
            settings.state, quotas=quotas, artifacts=artifacts, database=settings.database, owner=owner
        ) as store,
    ):
        await _check_keys(settings, store)
        link = EngineLink(socket, settings.engine_wait_seconds)
        state = State(settings, store, link, text, JobController(settings, store, link))
        state.on_settings.append(lambda new: quotas.change(_quotas(new)))
        if settings.generation_config == "auto":
            state.sampling = await asyncio.to_thread(_recommended, settings)
        await _name_adapters(state)
        await store.usage.open()
        await store.adapters.sweep()
        await asyncio.to_thread(sweep_stage, settings.state)
        await store.tinker_checkpoints.sweep(store.folder / "tinker")
        await sweep_origins(store)
        for tenant in await store.tenants.list():
            state.queue.know(tenant)
        reporting = Reporting(settings, store)
        alerts = Alerts(settings)
        state.alert = alerts.tell
        state.otel = OtelSpans() if settings.otel else None
        await _wire(state, reporting, alerts)
        link.bring, link.on_load = store.artifacts.get, state.routers.lora_adapter_load_seconds.observe
        watching = asyncio.create_task(alerts.watch(state), name="alerts")
        try:
            beside = (
                _running(link),
                _leasing(store, bool(settings.database)),
                _sweeping(state),
                _adding_up(store),
            )
            async with AsyncExitStack() as stack:
                for one in (*beside, running_evals(state), state.telemetry.running()):
                    await stack.enter_async_context(one)
                if artifacts is not None:
                    await stack.enter_async_context(following(state, artifacts))
                yield state
        finally:
            watching.cancel()
            await reporting.close()
            await alerts.close()
            if state.otel is not None:
                await asyncio.to_thread(state.otel.close)


def _quotas(settings: ServerSettings) -> Quotas:
    return Quotas(
        settings.max_files_tenant,
        settings.max_bytes_tenant,
        settings.max_jobs_tenant,
        settings.max_records_tenant,
        settings.max_idempotency_keys,
        settings.idempotency_seconds,
    )


@contextlib.contextmanager
def _artifacts(settings: ServerSettings) -> Iterator[SharedArtifacts | None]:
    """Context with the artifacts that several servers share; None for a server alone. Raises ConfigError."""
    if not settings.artifacts:
        yield None
        return
    objects = objects_at(settings.artifacts)
    shared = SharedArtifacts(settings.state.resolve(), objects, settings.max_artifact_bytes)
    try:
        yield shared
    finally:
        shared.close()


def _recommended(settings: ServerSettings) -> dict[str, SamplingParams]:
    models = {settings.base_name: settings.model, **settings.bases}
    return {name: recommended(model) for name, model in models.items()}


def _text(settings: ServerSettings) -> Text:
    text = Text.load(settings.model, settings.engine.allow_special_tokens, settings.tool_format)
    text.prepare()
    return text


async def _check_keys(settings: ServerSettings, store: Store) -> None:
    """Raises ConfigError for a server that is reachable from other machines without a key, unless that is
    configured."""
    if not await store.tenants.any_keys() and not await store.tenants.is_open():
        log.warning(
            "every API key has been revoked, and the server answers nobody: `coserve keys create` makes one, "
            "`coserve keys forget` has it ask for none on loopback"
        )
    if settings.is_loopback or settings.allow_insecure or await store.tenants.any_keys():
        return
    raise ConfigError(
        f"others reach {settings.host}, and there is no API key: make one with `coserve keys create`, or "
        "serve everybody with --insecure-no-keys"
    )


async def _wire(state: State, reporting: Reporting, alerts: Alerts) -> None:
    """Registers all listeners of new engines and job events, except the job controller."""
    link, news = state.link, state.link.news
    write_down = news.on_news

    async def resize(hello: Hello) -> None:
        state.queue.resize(hello.max_running)

    async def forget_jobs(hello: Hello) -> None:
        state.watch.connected(hello.jobs)

    async def pin(_: Hello) -> None:
        for base in state.catalog.bases.values():
            for adapter in await state.store.adapters.pinned(base.name):
                try:
                    await link.pin(adapter.id, state.store.folder_of(adapter), True, base.base_id)
                except CoserveError as error:
                    log.warning("the adapter %s cannot be pinned: %s", adapter.name, error)

    async def take(numbered: Numbered) -> None:
        if write_down is not None:
            await write_down(numbered)
        await state.watch.take(numbered.news)
        await reporting.take(numbered.news)
        await alerts.take(numbered.news)
        if state.otel is not None and isinstance(numbered.news, JobStep):
            state.otel.step(numbered.news)
        if state.otel is not None and isinstance(numbered.news, JobEnded):
            job = await state.store.jobs.of_any(numbered.news.job)
            if job is not None and job.status.is_final:
                state.otel.job(job)

    async def note_suspects(_: Hello) -> None:
        found: Suspects = {
            (item.kind, item.id): (suspect.crashes, suspect.progress)
            for item, suspect in link.probation.suspects.items()
            if item.kind in LASTING
        }
        if found != await state.store.quarantine.suspects():
            await state.store.quarantine.suspect(found)

    async def barred(adapter: str) -> str | None:
        return await state.store.quarantine.reason("adapter", adapter)

    link.barred = barred
    known = await state.store.quarantine.suspects()
    for kind in LASTING:
        for (of_kind, id), found in known.items():
            if of_kind == kind:
                link.probation.suspects[WorkItem(kind, id)] = Suspect(*found)
    news.on_connect.insert(0, note_suspects)
    news.on_connect.insert(0, resize)
    news.on_connect.insert(0, forget_jobs)
    news.on_connect.append(pin)
    news.on_connect.append(alerts.connected)
    news.on_news = take


def _owner(state: Path) -> str:
    """This server's name in leases, which the state folder keeps. A name that comes twice, with a copy of the
    folder, does no harm: fencing numbers differ."""
    path = state / "server.id"
    if not (name := path.read_text(encoding="utf-8").strip() if path.is_file() else ""):
        name = new_id("server")
        write_whole(path, [f"{name}\n".encode()])
    return name


@asynccontextmanager
async def _leasing(store: Store, shared: bool) -> AsyncIterator[None]:
    """Context in which this server's leases are renewed, and what others change is followed. Where the
    database is `shared`, one of them tells the others that this server is there."""
    leases = store.leases
    if shared:
        await leases.claim(SERVER, leases.owner)
    try:
        async with beside(leases.keep(), "leases"):
            yield
    finally:
        if shared:
            with contextlib.suppress(StateError):  # the database is away: the lease ends by itself
                await leases.release(SERVER, leases.owner)


@asynccontextmanager
async def _sweeping(state: State) -> AsyncIterator[None]:
    """Context in which records are deleted that ended as many days ago as the settings say (0: none is),
    files that have expired, and idempotency keys that are too old."""

    store = state.store

    async def sweep() -> None:
        more = False
        while True:
            await asyncio.sleep(_NEXT_SWEEP if more else _SWEEP)
            settings = state.settings  # which may have changed
            try:
                more = await store.expire_files() | await store.creations.sweep()
                for sweep_old, days in (
                    (store.retention.sweep, settings.keep_days),
                    (store.usage.sweep, settings.keep_usage_days),
                    (store.audit.sweep, settings.keep_audit_days),
                    (store.responses.sweep, settings.keep_responses_days),
                    (store.chats.sweep, settings.keep_responses_days),
                ):
                    if days:
                        more |= await sweep_old(store.clock() - days * 86400)
            except CoserveError as error:  # such as a full disk: the next turn tries again
                log.warning("old records could not be deleted: %s", error)

    async with beside(sweep(), "retention"):
        yield


@asynccontextmanager
async def _adding_up(store: Store) -> AsyncIterator[None]:
    """Context in which the journal of usage is merged every few seconds, and once at its end."""
    try:
        async with beside(store.usage.run(), "usage"):
            yield
    finally:
        with contextlib.suppress(CoserveError):  # the next start merges it
            await store.usage.merge()


@asynccontextmanager
async def _running(link: EngineLink) -> AsyncIterator[None]:
    """Context in which the link's task runs; its failure ends the block."""
    body = asyncio.current_task()
    assert body is not None
    task = asyncio.create_task(link.run(), name="engine-link")
    failed = False

    def on_end(ended: asyncio.Task[None]) -> None:
        nonlocal failed
        if not ended.cancelled():
            failed = True
            body.cancel()

    task.add_done_callback(on_end)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            body.uncancel()
            task.result()
        raise
    finally:
        task.remove_done_callback(on_end)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


async def _name_adapters(state: State) -> None:
    """Shares the configured adapters with all tenants, and unshares those of earlier starts. Their chains get
    no names of their own.

    The keys are digests of their contents, so a changed folder is another version, as is one of another base.
    """
    catalog, shared = state.catalog, list[Adapter]()
    for name, path in state.settings.adapters.items():
        further = state.settings.adapter_bases.get(name)
        base = further or catalog.base.name
        key, folder = await _named(f"{further}/{name}" if further else name, path)
        kept = state.store.path_of(folder)
        shared.append(Adapter(key, name, kept, base, catalog.base.created))
        if chains := state.settings.chains.get(name):
            catalog.chains[key] = await _chains(chains, state.settings)
    for name in catalog.bases:
        if chains := state.settings.chains.get(name):
            catalog.chains[name] = await _chains(chains, state.settings)
    await state.store.adapters.share(shared)


async def _chains(chains: Mapping[str, str], settings: ServerSettings) -> tuple[ApproximateModel, ...]:
    """The approximate chains of a model, of their folders by name."""
    return tuple([
        ApproximateModel(name, *(await _named(name, own)))
        if own
        else ApproximateModel(name, name if name in settings.stitched else None)
        for name, own in chains.items()
    ])  # fmt: skip


async def _named(name: str, path: str) -> tuple[str, Path]:
    """The key of an adapter that the settings name, and its folder."""
    folder = Path(path).resolve()
    content = await asyncio.to_thread(digest, folder)
    return "adapter-" + hashlib.sha256(f"{name} {content}".encode()).hexdigest()[:24], folder
