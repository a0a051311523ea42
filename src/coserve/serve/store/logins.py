"""Logins of browsers: a cookie of 256 random bits stands for an API key, until its end or the key's.

Only the cookie's SHA-256 is stored, as of keys. The token that requests with the cookie need beside it is
made of the cookie: a page of another site can have a browser send the cookie, but reads neither.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import bindparam, delete, select
from sqlalchemy.orm import Session

from coserve.serve.store import keys
from coserve.serve.store.audit import note_action
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.records import KeyRecord, LoginRecord, Tenant

LOGIN_SECONDS: Final = 7 * 86_400
MOST_LOGINS: Final = 20  # of one key; a further one ends the one that would end first
_BYTES: Final = 32
_SHAPE: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_SWEPT: Final = 500  # rows that one login deletes at most: the writing thread is shared

# Run for each request of the page, as the one for keys.
_OWNER: Final = (
    select(Tenant)
    .join(KeyRecord, KeyRecord.tenant == Tenant.id)
    .join(LoginRecord, LoginRecord.key == KeyRecord.id)
    .where(
        LoginRecord.digest == bindparam("digest"),
        LoginRecord.ends > bindparam("now"),
        KeyRecord.revoked.is_(None),
    )
)


def is_cookie(secret: str | None) -> bool:
    """Tells whether `secret` has the format of a login's cookie."""
    return secret is not None and _SHAPE.fullmatch(secret) is not None


def token_of(cookie: str) -> str:
    """The token for requests that change something with this cookie."""
    return hashlib.sha256(f"coserve token {cookie}".encode()).hexdigest()


def is_token(given: str, cookie: str) -> bool:
    """Tells whether a token belongs to a cookie."""
    return hmac.compare_digest(given.encode(), token_of(cookie).encode())


class LoginStore:
    """Logins, by their cookies."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock

    @writes
    def begin(self, session: Session, key: str) -> str | None:
        """Logs in with a key; returns the cookie, None for a key that has been revoked meanwhile."""
        cookie, digest = secrets.token_urlsafe(_BYTES), keys.digest_of(key)
        now = int(self._clock())
        valid = KeyRecord.digest == digest, KeyRecord.revoked.is_(None)
        found = session.execute(select(KeyRecord.id, KeyRecord.tenant, KeyRecord.prefix).where(*valid))
        if (row := found.one_or_none()) is None:
            return None
        owner, tenant, prefix = row
        note_action(session, now, "login.begun", owner, tenant, prefix)
        over = select(LoginRecord.digest).where(LoginRecord.ends <= now).limit(_SWEPT)
        newest = select(LoginRecord.digest).where(LoginRecord.key == owner)
        beyond = newest.order_by(LoginRecord.ends.desc()).offset(MOST_LOGINS - 1)
        gone = [*session.scalars(over), *session.scalars(beyond)]
        session.execute(delete(LoginRecord).where(LoginRecord.digest.in_(gone)))
        session.add(LoginRecord(keys.digest_of(cookie), owner, now + LOGIN_SECONDS))
        return cookie

    async def owner(self, cookie: str) -> Tenant | None:
        """The tenant that a cookie is of; None for one that is unknown, or over."""
        if not is_cookie(cookie):
            return None
        asked = {"digest": keys.digest_of(cookie), "now": int(self._clock())}
        return await self._database.read(lambda session: session.scalar(_OWNER, asked))

    @reads
    def valid(self, session: Session, digests: Collection[bytes]) -> frozenset[bytes]:
        """The digests (`keys.digest_of`) among these of cookies whose logins have not ended."""
        found = select(LoginRecord.digest).join(KeyRecord, LoginRecord.key == KeyRecord.id)
        in_force = LoginRecord.ends > int(self._clock()), KeyRecord.revoked.is_(None)
        return frozenset(session.scalars(found.where(LoginRecord.digest.in_(digests), *in_force)))

    @writes
    def end(self, session: Session, cookie: str) -> None:
        """Ends a login, if there is one."""
        of_cookie = LoginRecord.digest == keys.digest_of(cookie)
        owner = select(KeyRecord).join(LoginRecord, LoginRecord.key == KeyRecord.id).where(of_cookie)
        if (key := session.scalar(owner)) is not None:
            session.execute(delete(LoginRecord).where(of_cookie))
            note_action(session, int(self._clock()), "login.ended", key.id, key.tenant, key.prefix)
