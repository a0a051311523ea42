"""Rows of responses, and of their items."""

from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import ColumnElement, delete, func, literal, select, update
from sqlalchemy.orm import Session, aliased

from coserve.errors import PromptTooLong
from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import ConversationRecord, ItemRecord, Page, ResponseRecord

UNDER_WAY: Final = ("queued", "in_progress")
MOST_EARLIER: Final = 2048  # items that come before those of a request, and responses in a line
MOST_EARLIER_CHARACTERS: Final = 8 * 2**20  # of their JSON
MOST_OLD: Final = 500  # responses that one turn deletes: the writing thread is shared


class ResponseStore:
    """Responses of a tenant, with their items; `ConversationStore` has those of conversations.

    An item belongs to a response, to a conversation, or to both, and goes with the last of them. Those of a
    response under way are in its conversation once it has ended.
    """

    def __init__(self, database: Database, quotas: Quotas, leases: Leases) -> None:
        self._database, self._quotas, self._leases = database, quotas, leases

    @reads
    def check_room(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may keep nothing more."""
        self._quotas.check_kept(session, tenant, 1, 1)

    @writes
    def add(self, session: Session, row: ResponseRecord, items: Sequence[ItemRecord]) -> None:
        """Adds a response with its items. Raises QuotaExceeded for one that is under way; one that has ended
        had room when it began."""
        session.add(row)
        _join(session, row, items)
        session.add_all(items)
        if row.status in UNDER_WAY:
            self._quotas.check_kept(session, row.tenant)

    @writes
    def end(self, session: Session, row: ResponseRecord, output: Sequence[ItemRecord]) -> str | None:
        """Stores the end of a response that this server makes, unless it has ended. Returns its status then,
        None where it has been removed. Raises LeaseLost where another server has taken it."""
        self._leases.require(session, "response", row.id)
        found = session.scalar(select(ResponseRecord).where(ResponseRecord.id == row.id))
        if found is None or found.status not in UNDER_WAY:
            return None if found is None else found.status
        found.status, found.body, found.request = row.status, row.body, None
        of_input = session.scalars(select(ItemRecord).where(ItemRecord.response == row.id)).all()
        for item in of_input:
            item.conversation = row.conversation
        _join(session, row, [*of_input, *output])
        session.add_all(output)
        return row.status

    @reads
    def get(self, session: Session, tenant: str, id: str) -> ResponseRecord | None:
        """The tenant's response with this id."""
        return owned(session, ResponseRecord, tenant, id)

    @writes
    def remove(self, session: Session, tenant: str, id: str) -> bool:
        """Removes a response, and its items that are in no conversation; False if there is none."""
        own = ResponseRecord.tenant == tenant, ResponseRecord.id == id
        numbers = session.scalars(select(ResponseRecord.id).where(*own)).all()
        _drop(session, numbers)
        return bool(numbers)

    @reads
    def unfinished(self, session: Session) -> Sequence[ResponseRecord]:
        """Responses of all tenants that are under way, the oldest first."""
        found = select(ResponseRecord).where(ResponseRecord.status.in_(UNDER_WAY))
        ordered = found.order_by(ResponseRecord.number)
        return tuple(session.scalars(ordered))

    @reads
    def inputs(self, session: Session, response: str) -> Sequence[str]:
        """The items of a response's own request, as JSON."""
        found = select(ItemRecord.item).where(ItemRecord.response == response, ~ItemRecord.output)
        return tuple(session.scalars(found.order_by(ItemRecord.number)))

    @reads
    def context(
        self, session: Session, tenant: str, previous: str | None, conversation: str | None
    ) -> Sequence[str] | None:
        """The items of a conversation, or of a response and all before it, as JSON; None where one of these
        is missing or under way. Raises PromptTooLong for more than a request may have."""
        wanted: list[ColumnElement[bool]] = [ItemRecord.tenant == tenant]
        if conversation is not None:
            wanted.append(ItemRecord.conversation == conversation)
        else:
            line = self._line(session, tenant, previous)
            if line is None:
                return None
            wanted.append(ItemRecord.response.in_(line))
        size = func.coalesce(func.sum(func.length(ItemRecord.item)), 0)
        count, characters = session.execute(select(func.count(), size).where(*wanted)).one()
        _check(count, characters)
        return tuple(session.scalars(select(ItemRecord.item).where(*wanted).order_by(ItemRecord.number)))

    def _line(self, session: Session, tenant: str, id: str | None) -> Sequence[str] | None:
        """Ids of a response and of all before it; None where one is missing or under way."""
        columns = ResponseRecord.id, ResponseRecord.previous, ResponseRecord.status
        start = select(*columns, literal(1).label("place"))
        line = start.where(ResponseRecord.tenant == tenant, ResponseRecord.id == id).cte(recursive=True)
        earlier = aliased(ResponseRecord)
        step = select(earlier.id, earlier.previous, earlier.status, line.c.place + 1)
        is_before = (earlier.id == line.c.previous) & (earlier.tenant == tenant)
        line = line.union_all(step.join(line, is_before).where(line.c.place < MOST_EARLIER))
        found = session.execute(select(line).order_by(line.c.place)).all()
        if not found or found[0].status in UNDER_WAY or (len(found) < MOST_EARLIER and found[-1].previous):
            return None
        if found[-1].previous:
            raise PromptTooLong(f"{MOST_EARLIER} responses come before this one: begin anew, or compact it.")
        return [one.id for one in found]

    @reads
    def named(self, session: Session, tenant: str, ids: Sequence[str]) -> Mapping[str, str]:
        """The tenant's items with these ids, as JSON. Raises PromptTooLong where they, each as often as it is
        named, are more than a request may have."""
        own = ItemRecord.tenant == tenant, ItemRecord.id.in_(ids)
        sized = select(ItemRecord.id, func.length(ItemRecord.item)).where(*own)
        sizes: dict[str, int] = dict(session.execute(sized).tuples().all())
        _check(len(ids), sum(sizes.get(id, 0) for id in ids))
        return dict(session.execute(select(ItemRecord.id, ItemRecord.item).where(*own)).tuples().all())

    @reads
    def page(
        self, session: Session, tenant: str, response: str, after: str | None, limit: int, ascending: bool
    ) -> Page[ItemRecord] | None:
        """Items of the request of a response; None if `after` is none of them."""
        wanted = [ItemRecord.tenant == tenant, ItemRecord.response == response, ~ItemRecord.output]
        return page_of(session, ItemRecord, wanted, after, limit, ascending, func.length(ItemRecord.item))

    @writes
    def sweep(self, session: Session, before: float) -> bool:
        """Deletes some of the responses that are older than this (Unix seconds) and that none goes on with;
        True where more may be left."""
        later = aliased(ResponseRecord)
        is_continued = select(later.id).where(later.previous == ResponseRecord.id).exists()
        is_old = ResponseRecord.created <= int(before), ResponseRecord.status.not_in(UNDER_WAY)
        old = select(ResponseRecord.id).where(*is_old, ~is_continued)
        ids = session.scalars(old.order_by(ResponseRecord.created).limit(MOST_OLD)).all()
        _drop(session, ids)
        return bool(ids)  # what they went on with is the next turn's


def _join(session: Session, row: ResponseRecord, items: Sequence[ItemRecord]) -> None:
    """Takes items out of a conversation that has been deleted while their response was made."""
    if row.conversation is None:
        return
    if owned(session, ConversationRecord, row.tenant, row.conversation) is None:
        for item in items:
            item.conversation = None


def _check(count: int, characters: int) -> None:
    """Raises PromptTooLong for more items than a request may have."""
    if count > MOST_EARLIER or characters > MOST_EARLIER_CHARACTERS:
        raise PromptTooLong(
            f"What was said before has {count} items and {characters} characters; a request may have "
            f"{MOST_EARLIER} and {MOST_EARLIER_CHARACTERS}: begin anew, or compact it."
        )


def _drop(session: Session, ids: Sequence[str]) -> None:
    """Deletes responses, and their items that are in no conversation."""
    of_these = ItemRecord.response.in_(ids)
    session.execute(delete(ItemRecord).where(of_these, ItemRecord.conversation.is_(None)))
    session.execute(update(ItemRecord).where(of_these).values(response=None))
    session.execute(delete(ResponseRecord).where(ResponseRecord.id.in_(ids)))
