"""Runs batches: one of each tenant at a time, line by line, through deaths of engines and servers."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from coserve.errors import CoserveError, LeaseLost
from coserve.serve.batches.asked import OwnRoutes, Reply
from coserve.serve.batches.lines import MOST_LINES, BatchLine, BatchReader, count_lines
from coserve.serve.batches.results import ResultFile, line_of
from coserve.serve.errors import ApiError
from coserve.serve.offload import Offload, TenantTurns
from coserve.serve.state import State
from coserve.serve.store.batches import INPUT, UNENDED
from coserve.serve.store.durable import link_files, write_whole
from coserve.serve.store.ids import of_attempt
from coserve.serve.store.leases import LeaseKey
from coserve.serve.store.records import BatchRecord, File, JsonObject, Tenant
from coserve.serve.tasks import cancel

log = logging.getLogger(__name__)
_AT_ONCE: Final = 32  # lines of all batches under way, where the engine runs so many
_TRIES: Final = 8  # of a line that the server could not answer for reasons of its own
_PAUSE: Final = 1.0  # seconds before the second try, then twice as long each time
_NOTE_SECONDS: Final = 2.0  # between two looks at a tenant's room and a batch's end
_OVER: Final = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, as the batch was cancelled.",
    "failed": "This request was not executed, as its results would have had no room.",
}
_LATER: Final = (429, 503)  # statuses of what may be tried again


@dataclass
class _RunningBatch:
    """A batch that runs. `ends` is why it ends before its last line."""

    output: ResultFile
    errors: ResultFile
    work: asyncio.Task[None] | None = None
    ends: str = ""


class Batches:
    """Stored in `app.state.batches`. For one event loop."""

    def __init__(self, state: State, routes: OwnRoutes) -> None:
        self.state, self._routes = state, routes
        self._threads = Offload(2, "batches")
        self._turns = TenantTurns()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._under_way: dict[str, _RunningBatch] = {}
        self._nowhere = set[str]()  # batches whose input is in another server's folder alone
        self._places = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context in which batches run, first those that an earlier server has left."""
        unended = await self.state.store.batches.unended()
        await asyncio.to_thread(_sweep, self.state.store.folder / "batches", {one.id for one in unended})
        leases = self.state.store.leases
        await self._follow_others(frozenset())
        leases.on_renewed.append(self._follow_others)
        try:
            yield
        finally:
            leases.on_renewed.remove(self._follow_others)
            await self.stop()

    async def stop(self) -> None:
        """Leaves all batches as they are, for the next server."""
        await cancel(*self._tasks.values())

    async def add(self, batch: BatchRecord, source: Path) -> None:
        """Makes a batch of an input file, which may be deleted from then on. Raises QuotaExceeded, and
        StateError where the artifact store is away."""
        folder = self.state.store.batch_folder(batch.id)
        await asyncio.to_thread(link_files, source.parent, folder, [source.name])
        await asyncio.to_thread((folder / source.name).rename, folder / INPUT)
        await self._begin(batch, folder)

    async def add_lines(self, batch: BatchRecord, lines: Iterable[bytes]) -> None:
        """Makes a batch of the lines of its input. Raises as `add` does."""
        folder = self.state.store.batch_folder(batch.id)
        await self._threads.run(batch.tenant, _write_input, folder, lines)
        await self._begin(batch, folder)

    async def _begin(self, batch: BatchRecord, folder: Path) -> None:
        """Starts a batch whose input is in its folder."""
        try:
            await self.state.store.artifacts.put(folder / INPUT)
            await self.state.store.batches.add(batch)
        except CoserveError:
            await self._clear(batch.id)
            raise
        if await self.state.store.leases.claim("batch", batch.id):
            self._start(batch)

    async def cancel(self, batch: BatchRecord) -> BatchRecord | None:
        """Ends a batch, with the results that it has so far. Returns its row, None if it ends already."""
        found = await self.state.store.batches.cancel(batch.id, self._now())
        if found is None:
            return None
        if (running := self._under_way.get(batch.id)) is not None:
            self._end_work(running, "cancelled")
        elif (waiting := self._tasks.get(batch.id)) is not None:  # for its turn, which it needs no more
            waiting.cancel()
            self._start(found, in_turn=False)
        return found

    def counts(self, batch: BatchRecord) -> tuple[int, int]:
        """Requests of a batch that are completed, and that failed."""
        running = self._under_way.get(batch.id)
        if running is None:
            return batch.completed, batch.failed
        return len(running.output.done), len(running.errors.done)

    # Inside

    async def _follow_others(self, lost: Set[LeaseKey]) -> None:
        """Leaves batches that other servers have taken, ends those that they have cancelled, and takes those
        that nobody has, where their input is here or in a store that servers share."""
        leases = self.state.store.leases
        for _, id in (key for key in lost if key[0] == "batch"):
            if (task := self._tasks.get(id)) is not None:
                task.cancel()
        unended = await self.state.store.batches.unended()
        others = await leases.of_others("batch") if unended else ()
        for batch in unended:
            if (running := self._under_way.get(batch.id)) is not None and batch.status == "cancelling":
                self._end_work(running, "cancelled")
            is_free = batch.id not in self._tasks and batch.id not in others
            can_run = is_free and await asyncio.to_thread(self._can_have_input, batch.id)
            if can_run and await leases.claim("batch", batch.id) and batch.id not in self._tasks:
                self._start(batch)
        await leases.release_but("batch", self._tasks)

    def _can_have_input(self, batch: str) -> bool:
        input = self.state.store.batch_folder(batch) / INPUT
        return input.exists() or not (batch in self._nowhere or self.state.store.artifacts.is_here(input))

    def _start(self, batch: BatchRecord, in_turn: bool = True) -> None:
        task = asyncio.create_task(self._run(batch, in_turn), name=batch.id)
        self._tasks[batch.id] = task

        def ended(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(batch.id) is ended:
                del self._tasks[batch.id]

        task.add_done_callback(ended)

    async def _run(self, batch: BatchRecord, in_turn: bool) -> None:
        """Runs a batch in its tenant's turn, or once its time is over. Errors of the disk and the database
        pass: it is tried again, unless another server has taken it."""
        turn = self._turns.of(batch.tenant)
        if in_turn:
            try:
                await asyncio.wait_for(turn.acquire(), max(batch.expires - self.state.store.clock(), 0.0))
            except TimeoutError:
                in_turn = False
        try:
            while True:
                try:
                    return await self._process(batch.id, batch.tenant)
                except LeaseLost as error:
                    log.warning("%s", error)
                    return
                except (OSError, CoserveError) as error:
                    log.warning("the batch %s cannot go on now: %s", batch.id, error)
                    await asyncio.sleep(_NOTE_SECONDS)
        finally:
            if in_turn:
                turn.release()

    async def _process(self, id: str, tenant: str) -> None:
        store, folder = self.state.store, self.state.store.batch_folder(id)
        batch = await store.batches.get(tenant, id)
        owner = await store.tenants.get(tenant)
        if batch is None or batch.status not in UNENDED:
            return await self._clear(id)
        if owner is None:
            return
        input = await store.artifacts.get(folder / INPUT)
        if not await asyncio.to_thread(input.exists):
            log.warning("the batch %s waits for its server, which alone has its input", id)
            self._nowhere.add(id)
            return
        if not batch.total:
            total = await self._threads.run(tenant, count_lines, input)
            if not 0 < total <= MOST_LINES:
                await self._refuse(batch, total)
                return
            await store.batches.advance(id, UNENDED, total=total)
            await store.batches.advance(id, ("validating",), status="in_progress", began=self._now())
            batch = await store.batches.get(tenant, id) or batch
        opened = await self._threads.run(tenant, self._open, batch, folder)
        self._under_way[id] = opened
        if batch.cancelling is not None:
            opened.ends = "cancelled"
        elif self.state.store.clock() >= batch.expires:
            opened.ends = "expired"
        try:
            await self._advance(batch, owner, opened, input)
            await self._finish(batch, opened)
        finally:
            del self._under_way[id]
            for file in (opened.output, opened.errors):
                file.close()

    def _open(self, batch: BatchRecord, folder: Path) -> _RunningBatch:
        for left in (self.state.store.folder / "files").glob(f"file-{batch.id.rpartition('_')[2]}*"):
            left.unlink()  # this server ended before it had told of it
        return _RunningBatch(ResultFile(folder / "output.jsonl"), ResultFile(folder / "errors.jsonl"))

    async def _advance(self, batch: BatchRecord, owner: Tenant, running: _RunningBatch, input: Path) -> None:
        """Has all lines answered, as far as time, room and the tenant let them, and notes the others."""
        done = running.output.done | running.errors.done
        if not running.ends and len(done) < batch.total:
            running.work = asyncio.create_task(self._work(batch, owner, running, input, done))
            try:
                while not running.work.done():
                    await asyncio.wait({running.work}, timeout=_NOTE_SECONDS)
                    if not running.work.done():
                        await self._look(batch, running)
                if not running.work.cancelled():
                    running.work.result()
            finally:
                await cancel(running.work)
        if running.ends:
            await self._threads.run(batch.tenant, self._note_rest, batch, running, input)

    async def _look(self, batch: BatchRecord, running: _RunningBatch) -> None:
        """Ends a batch whose time is over, or whose results exceed its tenant's room."""
        if self.state.store.clock() >= batch.expires:
            self._end_work(running, "expired")
        try:
            size = running.output.size + running.errors.size
            await self.state.store.files.check_room(batch.tenant, size, 0)
        except CoserveError as error:
            if ApiError.of(error).code == "quota_exceeded":
                self._end_work(running, "failed")

    @staticmethod
    def _end_work(running: _RunningBatch, reason: str) -> None:
        running.ends = running.ends or reason
        if running.work is not None:
            running.work.cancel()

    async def _work(
        self, batch: BatchRecord, owner: Tenant, running: _RunningBatch, input: Path, done: set[int]
    ) -> None:
        """Has every line answered that has no result yet."""
        reader = await self._threads.run(batch.tenant, BatchReader, input, batch.endpoint, done)
        places = min(_AT_ONCE, max(self._running() // 2, 1))  # a batch's own, of those of all
        own = asyncio.Semaphore(places)
        try:
            async with asyncio.TaskGroup() as lines:
                while some := await self._threads.run(batch.tenant, reader.take):
                    for line in some:
                        await own.acquire()
                        await self._places.acquire()
                        task = lines.create_task(self._one(batch, owner, running, line))
                        task.add_done_callback(lambda _: own.release())
                        task.add_done_callback(lambda _: self._places.release())
        except* (OSError, CoserveError) as errors:
            raise errors.exceptions[0] from None
        finally:
            reader.close()

    def _now(self) -> int:
        return int(self.state.store.clock())

    def _running(self) -> int:
        return _AT_ONCE if self.state.link.hello is None else self.state.link.hello.max_running

    async def _one(self, batch: BatchRecord, owner: Tenant, running: _RunningBatch, line: BatchLine) -> None:
        """Has one line answered, and writes its result."""
        if line.fault is not None:
            error = {"code": line.fault.code, "message": line.fault.message, "param": line.fault.param}
            error["line"] = str(line.number)
            await self._add(batch, running.errors, line, None, error)
            return
        reply = await self._answered(batch, owner, line)
        file = running.output if reply[0] == 200 else running.errors
        await self._add(batch, file, line, reply, None)

    async def _add(
        self,
        batch: BatchRecord,
        file: ResultFile,
        line: BatchLine,
        reply: Reply | None,
        error: Mapping[str, str | None] | None,
    ) -> None:
        """Writes a result. One that is being written is written to its end, whoever cancels."""
        writing = asyncio.ensure_future(
            self._threads.run(
                batch.tenant, lambda: file.add(line.number, line_of(batch.id, line, reply, error))
            )
        )
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            with suppress(OSError):
                await writing
            raise

    async def _answered(self, batch: BatchRecord, owner: Tenant, line: BatchLine) -> Reply:
        """The reply to a line, tried again while the server has no engine or no room."""
        if refused := _goes_alone(line.body):
            message = f"A request of a batch has no '{refused}'."
            told = ApiError(400, message, param=refused, code="invalid_value")
            return 400, "", self._routes.written(batch.endpoint, told)
        for attempt in range(_TRIES):
            reply = await self._routes.ask(owner, batch.endpoint, line.body)
            if reply[0] not in _LATER:
                break
            await asyncio.sleep(_PAUSE * 2**attempt)
        return reply

    def _note_rest(self, batch: BatchRecord, running: _RunningBatch, input: Path) -> None:
        """Writes why the lines that have no result have none."""
        error = {"code": f"batch_{running.ends}", "message": _OVER[running.ends]}
        reader = BatchReader(input, batch.endpoint, running.output.done | running.errors.done)
        try:
            while lines := reader.take():
                for line in lines:
                    running.errors.add(line.number, line_of(batch.id, line, None, error))
        finally:
            reader.close()

    async def _finish(self, batch: BatchRecord, running: _RunningBatch) -> None:
        """Makes files of the results, and ends the batch."""
        batches, status, now = (
            self.state.store.batches,
            running.ends or "completed",
            self._now(),
        )
        if not running.ends:
            await batches.advance(batch.id, UNENDED, status="finalizing", finalizing=now)
        files, results = list[File](), (running.output, running.errors)
        names: list[str | None] = []
        for letter, result in zip("oe", results, strict=True):
            names.append(None)
            if result.size:
                files.append(self._file(batch, letter, result.size))
                await self._threads.run(batch.tenant, result.settle, self.state.store.file_path(files[-1]))
                names[-1] = files[-1].id
        values = {"status": status, "ended": now, "output_file": names[0], "error_file": names[1]}
        if status == "failed":
            values["errors"] = _said("quota_exceeded", _OVER["failed"])
        counts = {"completed": len(running.output.done), "failed": len(running.errors.done)}
        try:
            over = await batches.advance(batch.id, UNENDED, files, **values, **counts)
        except LeaseLost:
            for file in files:
                await self.state.store.artifacts.discard(self.state.store.file_path(file))
            raise
        if over is not None:
            self.state.alert(f"batch.{status}", id=batch.id)
        await self._clear(batch.id)

    async def _clear(self, batch: str) -> None:
        """Deletes what a batch has on the disk and in the artifact store, but for files of results."""
        folder = self.state.store.batch_folder(batch)
        await self.state.store.artifacts.discard(folder / INPUT)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _refuse(self, batch: BatchRecord, total: int) -> None:
        """Ends a batch whose file holds nothing, or too much."""
        code, message = "empty_file", "The input file holds no requests."
        if total:
            code, message = "too_many_requests", f"The input file holds more than {MOST_LINES} requests."
        now, said = self._now(), _said(code, message)
        advance = self.state.store.batches.advance
        if await advance(batch.id, UNENDED, status="failed", ended=now, errors=said) is not None:
            self.state.alert("batch.failed", id=batch.id)
        await self._clear(batch.id)

    def _file(self, batch: BatchRecord, letter: str, size: int) -> File:
        """A file of results. Its id follows from the batch's and the lease, so that another attempt of this
        server has the same, and one of another server has not."""
        fence = self.state.store.leases.fence("batch", batch.id)
        now, id = self._now(), of_attempt(batch.id.rpartition("_")[2] + letter, fence)
        name = f"{batch.id}_{'output' if letter == 'o' else 'error'}.jsonl"
        expires = None if batch.life is None else now + batch.life
        return File(f"file-{id}", batch.tenant, name, "batch_output", size, now, ".jsonl", expires=expires)


def _sweep(folder: Path, known: Container[str]) -> None:
    """Removes folders of batches that were never made, or are over."""
    for entry in folder.iterdir():
        if entry.name not in known:
            shutil.rmtree(entry, ignore_errors=True)


def _write_input(folder: Path, lines: Iterable[bytes]) -> None:
    folder.mkdir(parents=True)
    write_whole(folder / INPUT, lines)


def _goes_alone(body: bytes) -> str:
    """The parameter by which a body asks for a reply that no batch can write; empty if none. A body that
    cannot be read is refused by its route."""
    try:
        asked = msgspec.json.decode(body, type=_Alone)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return "stream" if asked.stream is True else "background" if asked.background is True else ""


class _Alone(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


def _said(code: str, message: str) -> JsonObject:
    error = {"code": code, "message": message, "param": None, "line": None}
    return {"object": "list", "data": [error]}
