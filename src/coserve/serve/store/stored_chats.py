"""Rows of chat completions that their clients wanted to be kept."""

from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.labels import has_label
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import Page, StoredChat

MOST_OLD_CHATS: Final = 500  # that one turn deletes: the writing thread is shared


class ChatStore:
    """Chat completions of a tenant."""

    def __init__(self, database: Database, clock: Callable[[], float], quotas: Quotas) -> None:
        self._database, self._clock, self._quotas = database, clock, quotas

    @reads
    def check_room(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may keep nothing more."""
        self._quotas.check_kept(session, tenant, 1, 1)

    @writes
    def add(self, session: Session, row: StoredChat) -> None:
        """Adds a completion, which had room when it began."""
        session.add(row)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> StoredChat | None:
        """The tenant's completion with this id."""
        return owned(session, StoredChat, tenant, id)

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        after: str | None,
        limit: int,
        ascending: bool,
        model: str | None,
        labels: Mapping[str, str],
    ) -> Page[StoredChat] | None:
        """The tenant's completions of a model, with all these entries in their metadata; None if `after` is
        none of them. Names of entries are without quotes."""
        own, wanted = [StoredChat.tenant == tenant], list[ColumnElement[bool]]()
        if model is not None:
            wanted.append(StoredChat.model == model)
        for name, value in labels.items():
            wanted.append(has_label(StoredChat.labels, name, value))
        size = func.length(StoredChat.body) + func.length(StoredChat.messages)
        return page_of(session, StoredChat, own, after, limit, ascending, size, wanted)

    @writes
    def label(self, session: Session, tenant: str, id: str, labels: Mapping[str, str]) -> StoredChat | None:
        """Changes the metadata of a completion; None if there is none. Raises QuotaExceeded."""
        found = owned(session, StoredChat, tenant, id)
        if found is not None:
            found.labels = dict(labels)
            self._quotas.check_kept(session, tenant)
        return found

    @writes
    def remove(self, session: Session, tenant: str, id: str) -> bool:
        """Removes a completion; False if there is none."""
        found = owned(session, StoredChat, tenant, id)
        if found is not None:
            session.delete(found)
        return found is not None

    @writes
    def sweep(self, session: Session, before: float) -> bool:
        """Deletes some of what is older than this (Unix seconds); True where more may be left."""
        old = select(StoredChat.number).where(StoredChat.created <= int(before))
        numbers = session.scalars(old.order_by(StoredChat.created).limit(MOST_OLD_CHATS)).all()
        session.execute(delete(StoredChat).where(StoredChat.number.in_(numbers)))
        return len(numbers) == MOST_OLD_CHATS
