"""Rows of evals, their runs and the outcomes of these."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from coserve.errors import QuotaExceeded
from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import EvalItemRecord, EvalRecord, EvalRunRecord, Page

EvalRow = TypeVar("EvalRow", EvalRecord, EvalRunRecord, EvalItemRecord)
UNFINISHED: Final = ("queued", "in_progress")
_MOST_RUNS: Final = 100  # of an eval
_MOST_UNFINISHED: Final = 16  # runs of a tenant
_AT_ONCE: Final = 500  # rows in one transaction: the writing thread is shared


class EvalStore:
    """Evals by tenant. A run's `tally` is changed with each outcome, in its transaction. What the server that
    makes a run writes about it is fenced by its lease."""

    def __init__(
        self, database: Database, clock: Callable[[], float], quotas: Quotas, leases: Leases
    ) -> None:
        self._database, self._clock, self._quotas, self._leases = database, clock, quotas, leases

    @writes
    def add(self, session: Session, row: EvalRecord) -> None:
        """Adds an eval. Raises QuotaExceeded."""
        session.add(row)
        self._quotas.check_kept(session, row.tenant)

    @writes
    def add_run(self, session: Session, row: EvalRunRecord) -> None:
        """Adds a run of an eval that is there. Raises QuotaExceeded."""
        for what, most, wanted in (
            ("runs of this eval", _MOST_RUNS, EvalRunRecord.eval == row.eval),
            ("runs that are not over", _MOST_UNFINISHED, EvalRunRecord.status.in_(UNFINISHED)),
        ):
            own = EvalRunRecord.tenant == row.tenant
            has = session.scalars(select(func.count()).where(own, wanted)).one()
            if has >= most:
                raise QuotaExceeded(f"You have {has} {what}, and may have {most}: delete or cancel some.")
        session.add(row)
        self._quotas.check_kept(session, row.tenant)

    @reads
    def get(self, session: Session, kind: type[EvalRow], tenant: str, id: str) -> EvalRow | None:
        """The tenant's row of a kind with this id."""
        return owned(session, kind, tenant, id)

    @reads
    def page(
        self,
        session: Session,
        kind: type[EvalRow],
        tenant: str,
        after: str | None,
        limit: int,
        ascending: bool,
        of: Sequence[ColumnElement[bool]] = (),
        wanted: Sequence[ColumnElement[bool]] = (),
    ) -> Page[EvalRow] | None:
        """The tenant's rows `of` an eval or a run that are `wanted`; None if none has the id `after`."""
        own = [kind.tenant == tenant, *of]
        return page_of(session, kind, own, after, limit, ascending, filters=wanted)

    @writes
    def change(self, session: Session, /, id: str, **values: Any) -> None:
        """Changes columns of an eval."""
        session.execute(update(EvalRecord).where(EvalRecord.id == id).values(**values))

    @writes
    def cancel(self, session: Session, run: str) -> bool:
        """Ends a run that is not over; False for others."""
        return _moved(session, run, "canceled", None)

    @writes
    def advance(
        self, session: Session, run: str, status: str, error: Mapping[str, Any] | None = None
    ) -> bool:
        """Changes the status of this server's run, if that is not over; False for others. Raises LeaseLost
        where another server has taken it."""
        self._leases.require(session, "eval", run)
        return _moved(session, run, status, error)

    @reads
    def next_runs(self, session: Session) -> tuple[EvalRunRecord, ...]:
        """The oldest unfinished run of each tenant."""
        oldest = (
            select(func.min(EvalRunRecord.number))
            .where(EvalRunRecord.status.in_(UNFINISHED))
            .group_by(EvalRunRecord.tenant)
        )
        return tuple(session.scalars(select(EvalRunRecord).where(EvalRunRecord.number.in_(oldest))))

    @reads
    def places(self, session: Session, run: str) -> set[int]:
        """Places of a run's data whose outcome is stored."""
        return set(session.scalars(select(EvalItemRecord.place).where(EvalItemRecord.run == run)))

    @writes
    def add_item(self, session: Session, row: EvalItemRecord, usage: Mapping[str, tuple[int, int]]) -> bool:
        """Adds an outcome, and counts it and the tokens that models have read and written for it in the run's
        tally; False where the run is not in progress, or has it. Raises QuotaExceeded, and LeaseLost where
        another server has taken the run."""
        self._leases.require(session, "eval", row.run)
        run = session.scalar(
            select(EvalRunRecord).where(EvalRunRecord.id == row.run, EvalRunRecord.status == "in_progress")
        )
        same = (EvalItemRecord.run == row.run) & (EvalItemRecord.place == row.place)
        if run is None or session.scalar(select(EvalItemRecord.id).where(same)) is not None:
            return False
        session.add(row)
        run.tally = _with(run.tally, row, usage)
        self._quotas.check_kept(session, row.tenant)
        return True

    async def remove_run(self, tenant: str, eval: str, run: str) -> bool:
        """Deletes a run with its outcomes; False if the tenant has no such run. It ends first, so that no
        further outcome comes."""
        own = (EvalRunRecord.tenant == tenant) & (EvalRunRecord.eval == eval) & (EvalRunRecord.id == run)
        if (
            await self._database.read(lambda session: session.scalar(select(EvalRunRecord.id).where(own)))
            is None
        ):
            return False
        await self.cancel(run)
        await self._delete(EvalItemRecord, EvalItemRecord.run == run)
        await self._delete(EvalRunRecord, own)
        return True

    async def remove(self, tenant: str, id: str) -> bool:
        """Deletes an eval with its runs; False if the tenant has no such eval."""
        if await self.get(EvalRecord, tenant, id) is None:
            return False
        runs = select(EvalRunRecord.id).where(EvalRunRecord.eval == id)
        while left := await self._database.read(lambda session: tuple(session.scalars(runs))):
            for run in left:
                await self.remove_run(tenant, id, run)
        await self._delete(EvalRecord, EvalRecord.id == id)
        return True

    async def _delete(self, kind: type[EvalRow], wanted: ColumnElement[bool]) -> None:
        def write(session: Session) -> int:
            numbers = session.scalars(select(kind.number).where(wanted).limit(_AT_ONCE)).all()
            session.execute(delete(kind).where(kind.number.in_(numbers)))
            return len(numbers)

        while await self._database.write(write) == _AT_ONCE:
            pass


def _moved(session: Session, run: str, status: str, error: Mapping[str, Any] | None) -> bool:
    found = session.scalar(
        select(EvalRunRecord).where(EvalRunRecord.id == run, EvalRunRecord.status.in_(UNFINISHED))
    )
    if found is not None:
        found.status, found.error = status, None if error is None else dict(error)
    return found is not None


def _with(
    tally: Mapping[str, Any], row: EvalItemRecord, usage: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """A tally with one more outcome: counts by status, (passed, failed) by criterion, and (answers, tokens
    read, tokens written) by model."""
    counts, criteria, models = dict(tally["counts"]), dict(tally["criteria"]), dict(tally["models"])
    counts[row.status] = counts.get(row.status, 0) + 1
    for result in row.results:
        passed, failed = criteria.get(result["name"], (0, 0))
        criteria[result["name"]] = (passed + result["passed"], failed + (not result["passed"]))
    for name, (read, written) in usage.items():
        answers, before, after = models.get(name, (0, 0, 0))
        models[name] = (answers + 1, before + read, after + written)
    return {"counts": counts, "criteria": criteria, "models": models}
