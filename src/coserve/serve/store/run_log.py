"""Requests that training runs of `tinker` clients have accepted, from which another server goes on.

A run's log is the requests that its owner has promised to carry out, as they were sent, since the oldest
state that is kept of it; and that state. Request 0 is the one that made the run: without it a log is not
whole, and nobody goes on from it. Every change compares the run's lease, so a server that has lost it changes
nothing. Requests and states count towards the tenant's quotas, as all that is kept of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coserve.errors import QuotaExceeded
from coserve.serve.artifacts.local import ArtifactStore
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas, bytes_in
from coserve.serve.store.records import TinkerRequest, TinkerState
from coserve.serve.store.tinker import LEASED, note_outcome

PART: Final = 256 * 1024  # bytes of one transaction: all tenants' writes wait for it


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a run by its number, as it was sent. `outcome` is what the client is told, of one that is
    not carried out again."""

    number: int
    kind: str
    encoding: str
    data: bytes
    outcome: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The request that made a run, those since its oldest state in their order, and its states, the oldest
    first."""

    first: LoggedRequest
    requests: Sequence[LoggedRequest]
    states: Sequence[TinkerState]


class RunLog:
    """The logs of all runs. Methods that write raise LeaseLost where another server has the run, and
    StateError while the database or the artifact store is away."""

    def __init__(
        self, database: Database, folder: Path, quotas: Quotas, artifacts: ArtifactStore, leases: Leases
    ) -> None:
        self._database, self._folder, self._quotas = database, folder, quotas
        self._artifacts, self._leases = artifacts, leases

    async def add(self, tenant: str, run: str, request: LoggedRequest) -> None:
        """Keeps a request of a tenant's run; one that is there stays. Raises QuotaExceeded for one with data,
        and keeps nothing of it. The row of a run has its own check, and what has no data only takes its
        turn."""
        number, data = request.number, request.data
        pieces = [data[start : start + PART] for start in range(0, len(data), PART)] or [b""]

        def write(session: Session, part: int) -> None:
            if session.get(TinkerRequest, (run, number, part)) is not None:
                return
            piece, left = pieces[part], sum(map(len, pieces[:part]))
            session.add(
                TinkerRequest(run, number, part, request.kind, request.encoding, piece, tenant, len(piece))
            )
            if number and data:
                self._quotas.check_kept(session, tenant, left, part)

        try:
            for part in reversed(range(len(pieces))):  # without part 0 there is no request
                await self._write(run, partial(write, part=part))
        except QuotaExceeded:  # others of the tenant have taken the room meanwhile
            own = TinkerRequest.run == run, TinkerRequest.number == number
            await self._write(run, lambda session: session.execute(delete(TinkerRequest).where(*own)))
            raise

    async def finish(self, run: str, number: int, outcome: dict[str, Any]) -> None:
        """Notes what a request's client is told: nobody carries it out again."""
        await self._write(run, lambda session: note_outcome(session, run, number, outcome))

    async def keep(self, tenant: str, run: str, number: int, folder: Path, optimizer: bool) -> None:
        """Keeps a state of a tenant's run after its request `number`, whose files are in `folder`. Raises
        QuotaExceeded."""
        nbytes = await asyncio.to_thread(bytes_in, folder)
        await self._artifacts.put(folder)
        row = TinkerState(run, number, folder.relative_to(self._folder), optimizer, tenant, nbytes)

        def write(session: Session) -> None:
            session.merge(row)
            self._quotas.check_kept(session, tenant)

        await self._write(run, write)

    @reads
    def check_room(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may keep nothing more."""
        self._quotas.check_kept(session, tenant, 1, 1)

    async def trim(self, run: str, number: int) -> None:
        """Forgets requests up to the kept state after the request `number`, and older states."""
        requests = TinkerRequest.number <= number, TinkerRequest.number > 0
        await self._forget(run, requests, (TinkerState.number < number,))

    async def drop(self, run: str) -> None:
        """Forgets a run: nobody goes on with it."""
        await self._forget(run, (), ())

    @reads
    def read(self, session: Session, run: str) -> LoggedRun | None:
        """The log of a run, None where there is none, or it is not whole."""
        rows = session.scalars(
            select(TinkerRequest)
            .where(TinkerRequest.run == run)
            .order_by(TinkerRequest.number, TinkerRequest.part)
        )
        parts: dict[int, list[TinkerRequest]] = {}
        for row in rows:
            parts.setdefault(row.number, []).append(row)
        whole = {
            number: LoggedRequest(
                number, own[0].kind, own[0].encoding, b"".join(one.data for one in own), own[0].outcome
            )
            for number, own in parts.items()
            if own[0].part == 0
        }
        states = select(TinkerState).where(TinkerState.run == run).order_by(TinkerState.number)
        first = whole.pop(0, None)
        kept = tuple(session.scalars(states))
        return None if first is None else LoggedRun(first, tuple(whole.values()), kept)

    async def _forget(self, run: str, requests: Sequence[Any], states: Sequence[Any]) -> None:
        def write(session: Session) -> Sequence[Path]:
            old = TinkerState.run == run, *states
            paths = session.scalars(select(TinkerState.path).where(*old)).all()
            session.execute(delete(TinkerState).where(*old))
            session.execute(delete(TinkerRequest).where(TinkerRequest.run == run, *requests))
            return paths

        for path in await self._write(run, write):
            await self._artifacts.discard(self._folder / path)

    @writes
    def _write(self, session: Session, run: str, work: Callable[[Session], Any]) -> Any:
        self._leases.require(session, LEASED, run)
        return work(session)
