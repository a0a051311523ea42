"""Rows of chat completions that their clients wanted to be kept."""

from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, page_of
from coserve.serve.store.labels import has_label
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import Page, StoredChat

MOST_OLD_CHATS: Final = 500  # that one turn deletes: the writing thread is shared


class ChatStore:
    """Chat completions of a tenant."""

    def __init__(self, database: Database, clock: Callable[[], float], quotas: Quotas) -> None:
        self._database, self._clock, self._quotas = database, clock, quotas

    async def check_room(self, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may keep nothing more."""
        await self._database.read(lambda session: self._quotas.check_kept(session, tenant, 1, 1))

    async def add(self, row: StoredChat) -> None:
        """Adds a completion, which had room when it began."""
        await self._database.write(lambda session: session.add(row))

    async def get(self, tenant: str, id: str) -> StoredChat | None:
        """The tenant's completion with this id."""
        found = select(StoredChat).where(StoredChat.tenant == tenant, StoredChat.id == id)
        return await self._database.read(lambda session: session.scalar(found))

    async def page(
        self,
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
        return await self._database.read(
            lambda session: page_of(session, StoredChat, own, after, limit, ascending, size, wanted)
        )

    async def label(self, tenant: str, id: str, labels: Mapping[str, str]) -> StoredChat | None:
        """Changes the metadata of a completion; None if there is none. Raises QuotaExceeded."""

        def write(session: Session) -> StoredChat | None:
            found = session.scalar(select(StoredChat).where(StoredChat.tenant == tenant, StoredChat.id == id))
            if found is not None:
                found.labels = dict(labels)
                self._quotas.check_kept(session, tenant)
            return found

        return await self._database.write(write)

    async def remove(self, tenant: str, id: str) -> bool:
        """Removes a completion; False if there is none."""

        def write(session: Session) -> bool:
            found = session.scalar(select(StoredChat).where(StoredChat.tenant == tenant, StoredChat.id == id))
            if found is not None:
                session.delete(found)
            return found is not None

        return await self._database.write(write)

    async def sweep(self, before: float) -> bool:
        """Deletes some of what is older than this (Unix seconds); True where more may be left."""

        def write(session: Session) -> bool:
            old = select(StoredChat.number).where(StoredChat.created <= int(before))
            numbers = session.scalars(old.order_by(StoredChat.created).limit(MOST_OLD_CHATS)).all()
            session.execute(delete(StoredChat).where(StoredChat.number.in_(numbers)))
            return len(numbers) == MOST_OLD_CHATS

        return await self._database.write(write)
