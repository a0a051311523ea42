"""Rows of conversations, and of their items."""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import ConversationRecord, ItemRecord, Page


class ConversationStore:
    """Conversations of a tenant: lists of items, of which some belong to responses, too."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database, self._quotas = database, quotas

    @writes
    def add(self, session: Session, row: ConversationRecord, items: Sequence[ItemRecord]) -> None:
        """Adds a conversation. Raises QuotaExceeded."""
        session.add(row)
        session.add_all(items)
        self._quotas.check_kept(session, row.tenant)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> ConversationRecord | None:
        """The tenant's conversation with this id."""
        return owned(session, ConversationRecord, tenant, id)

    @writes
    def label(
        self, session: Session, tenant: str, id: str, labels: Mapping[str, str]
    ) -> ConversationRecord | None:
        """Changes the metadata of a conversation; None if there is none. Raises QuotaExceeded."""
        found = owned(session, ConversationRecord, tenant, id)
        if found is not None:
            found.labels = dict(labels)
            self._quotas.check_kept(session, tenant)
        return found

    @writes
    def extend(self, session: Session, tenant: str, id: str, items: Sequence[ItemRecord]) -> bool:
        """Adds items to a conversation; False if there is none. Raises QuotaExceeded."""
        if owned(session, ConversationRecord, tenant, id) is None:
            return False
        session.add_all(items)
        self._quotas.check_kept(session, tenant)
        return True

    @reads
    def page(
        self, session: Session, tenant: str, conversation: str, after: str | None, limit: int, ascending: bool
    ) -> Page[ItemRecord] | None:
        """Items of a conversation; None if `after` is none of them."""
        wanted = _in(tenant, conversation)
        return page_of(session, ItemRecord, wanted, after, limit, ascending, func.length(ItemRecord.item))

    @reads
    def item(self, session: Session, tenant: str, conversation: str, id: str) -> str | None:
        """An item of a conversation, as JSON."""
        return session.scalar(select(ItemRecord.item).where(*_in(tenant, conversation), ItemRecord.id == id))

    @writes
    def remove_item(self, session: Session, tenant: str, conversation: str, id: str) -> bool:
        """Removes an item from a conversation; False if there is none."""
        wanted = (*_in(tenant, conversation), ItemRecord.id == id)
        is_there = session.scalar(select(ItemRecord.id).where(*wanted)) is not None
        _leave(session, wanted)
        return is_there

    @writes
    def remove(self, session: Session, tenant: str, id: str) -> bool:
        """Removes a conversation, and its items that belong to no response; False if there is none."""
        found = owned(session, ConversationRecord, tenant, id)
        if found is None:
            return False
        session.delete(found)
        _leave(session, _in(tenant, id))
        return True


def _in(tenant: str, conversation: str) -> tuple[ColumnElement[bool], ...]:
    return ItemRecord.tenant == tenant, ItemRecord.conversation == conversation


def _leave(session: Session, wanted: Sequence[ColumnElement[bool]]) -> None:
    """Takes items out of their conversation."""
    session.execute(delete(ItemRecord).where(*wanted, ItemRecord.response.is_(None)))
    session.execute(update(ItemRecord).where(*wanted).values(conversation=None))
