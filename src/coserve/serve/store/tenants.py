"""Tenants and their API keys."""

import math
import re
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import bindparam, delete, select
from sqlalchemy.orm import Session

from coserve.errors import ConfigError
from coserve.serve.store import keys
from coserve.serve.store.audit import note_action
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import Key, KeyRecord, LoginRecord, Tenant, TenantRows

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
LOCAL: Final = Tenant("local", "local")  # owner of everything made while no key exists

_IN_FORCE: Final = KeyRecord.revoked.is_(None)
# Run for each request: made once, as making a statement takes as long as running it.
_OWNER: Final = (
    select(KeyRecord.digest, Tenant)
    .join(Tenant, KeyRecord.tenant == Tenant.id)
    .where(KeyRecord.prefix == bindparam("prefix"), _IN_FORCE)
)
_ANY: Final = select(KeyRecord.number).limit(1)


class TenantStore:
    """Tenants and their keys, with their shares of the machine."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        self._had_keys = False  # in a server that runs this only ever becomes true

    async def of_key(self, secret: str) -> Tenant | None:
        """The tenant of a key; None for a wrong or revoked one."""
        return await self._of_key(secret) if keys.is_shaped(secret) else None

    @reads
    def _of_key(self, session: Session, secret: str) -> Tenant | None:
        found = session.execute(_OWNER, {"prefix": keys.prefix_of(secret)})
        return next((owner for digest, owner in found if keys.matches(secret, digest)), None)

    async def is_open(self) -> bool:
        """Tells whether no key has ever existed: only then requests from this machine need none.

        Revoking the last key does not open the server; `forget_keys` does.
        """
        if not self._had_keys:
            self._had_keys = await self._database.read(lambda session: session.scalar(_ANY)) is not None
        return not self._had_keys

    @writes
    def forget_keys(self, session: Session) -> bool:
        """Deletes all keys if all are revoked; otherwise False, with nothing changed."""
        if session.scalar(_ANY.where(_IN_FORCE)) is not None:
            return False
        session.execute(delete(LoginRecord))
        session.execute(delete(KeyRecord))
        note_action(session, int(self._clock()), "keys.forgotten", "keys", "")
        return True

    async def any_keys(self) -> bool:
        """Tells whether there is a valid key."""
        return await self._database.read(lambda session: session.scalar(_ANY.where(_IN_FORCE))) is not None

    @reads
    def get(self, session: Session, tenant: str) -> Tenant | None:
        """The tenant with this id."""
        return session.scalar(select(Tenant).where(Tenant.id == tenant))

    @reads
    def list(self, session: Session) -> tuple[Tenant, ...]:
        """All tenants, the oldest first."""
        return tuple(session.scalars(select(Tenant).order_by(Tenant.number)))

    async def create_key(self, tenant: str, weight: float | None = None) -> tuple[Key, str]:
        """Creates a key for the tenant of this name (created if missing); returns it and its secret.

        `weight` changes the tenant's share. The secret is not stored. Raises ConfigError for a name that is
        invalid as part of a model's, or an invalid weight.
        """
        if not _NAME.fullmatch(tenant):
            raise ConfigError(f"a tenant's name is 1 to 64 letters, digits, '.', '_' or '-', not {tenant!r}")
        if weight is not None and not 0.0 < weight < math.inf:
            raise ConfigError(f"a tenant's weight must be a number above 0, not {weight}")
        secret = keys.draw()

        def write(session: Session) -> Key:
            now = int(self._clock())
            owner = session.scalar(select(Tenant).where(Tenant.name == tenant))
            if owner is None:
                owner = Tenant(new_id("tenant"), tenant, created=now)
                session.add(owner)
                session.flush()  # before the key that names it
            owner.weight = owner.weight if weight is None else weight
            prefix, digest = keys.prefix_of(secret), keys.digest_of(secret)
            key = KeyRecord(new_id("key"), owner.id, prefix, digest, now)
            session.add(key)
            note_action(session, now, "key.created", key.id, owner.id, f"{prefix}, weight {owner.weight:g}")
            return Key(key.id, owner.name, prefix, now)

        return await self._database.write(write), secret

    @reads
    def keys(self, session: Session, tenant: str | None = None) -> tuple[Key, ...]:
        """All keys, or those of the tenant with this id, revoked ones too, the oldest first."""
        found = (
            select(KeyRecord.id, Tenant.name, KeyRecord.prefix, KeyRecord.created, KeyRecord.revoked)
            .join(Tenant, KeyRecord.tenant == Tenant.id)
            .order_by(KeyRecord.number)
        )
        if tenant is not None:
            found = found.where(KeyRecord.tenant == tenant)
        return tuple(Key(*row) for row in session.execute(found))

    @reads
    def kept(self, session: Session, tenant: str) -> tuple[TenantRows, ...]:
        """The rows and bytes that the server keeps of a tenant, by table."""
        found = select(TenantRows).where(TenantRows.tenant == tenant, TenantRows.rows > 0)
        return tuple(session.scalars(found.order_by(TenantRows.bytes.desc())))

    @writes
    def revoke_key(self, session: Session, key: str) -> bool:
        """Revokes a key at once, by its id or its prefix; False if there is no such valid key."""
        named = (KeyRecord.id == key) | (KeyRecord.prefix == key)
        found = session.scalars(select(KeyRecord).where(named, _IN_FORCE)).all()
        for one in found:
            one.revoked = int(self._clock())
            note_action(session, one.revoked, "key.revoked", one.id, one.tenant, one.prefix)
        return bool(found)

    @reads
    def revoked(self, session: Session, digests: Collection[bytes]) -> frozenset[bytes]:
        """The digests (`keys.digest_of`) among these whose keys are revoked."""
        found = select(KeyRecord.digest).where(KeyRecord.digest.in_(digests), KeyRecord.revoked.is_not(None))
        return frozenset(session.scalars(found))
