"""Tenants and their API keys."""

import math
import re
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import Connection, delete, insert, select, update

from coserve.errors import ConfigError
from coserve.serve.store import keys as secret_keys
from coserve.serve.store.database import Database
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import Key, Tenant
from coserve.serve.store.tables import keys, tenants

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
LOCAL: Final = Tenant("local", "local")  # owns what is made while no key exists


class TenantStore:
    """Tenants and their keys, with their shares of the machine."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        self._had_keys = False  # in a server that runs this only ever becomes true

    async def of_key(self, secret: str) -> Tenant | None:
        """The tenant whose key this is; None for one that is wrong or revoked."""
        if not secret.isascii():
            return None
        return await self._database.read(lambda connection: _of_key(connection, secret))

    async def is_open(self) -> bool:
        """Tells whether there never was a key: only then may this machine ask without one.

        Revoking the last key opens nothing; `forget_keys` is the way back.
        """
        if not self._had_keys:
            found = select(keys.c.number).limit(1)
            self._had_keys = await self._database.read(
                lambda connection: connection.execute(found).first() is not None
            )
        return not self._had_keys

    async def forget_keys(self) -> bool:
        """Makes it as if there had never been a key; False, and nothing happens, while one is in force."""

        def write(connection: Connection) -> bool:
            if connection.execute(select(keys.c.number).where(keys.c.revoked.is_(None))).first() is not None:
                return False
            connection.execute(delete(keys))
            return True

        return await self._database.write(write)

    async def any_keys(self) -> bool:
        """Tells whether any key is in force."""
        found = select(keys.c.number).where(keys.c.revoked.is_(None)).limit(1)
        return await self._database.read(lambda connection: connection.execute(found).first() is not None)

    async def get(self, tenant: str) -> Tenant | None:
        """The tenant with this id."""
        return await self._database.read(lambda connection: _tenant(connection, id=tenant))

    async def list(self) -> tuple[Tenant, ...]:
        """All tenants, the oldest first."""
        found = select(tenants.c.id, tenants.c.name, tenants.c.weight).order_by(tenants.c.number)
        return await self._database.read(
            lambda connection: tuple(Tenant(**row) for row in connection.execute(found).mappings())
        )

    async def create_key(self, tenant: str, weight: float | None = None) -> tuple[Key, str]:
        """A new key for the tenant of this name, who is created at need, and its secret.

        `weight` changes the tenant's share. The secret is kept nowhere: this is the only time it is seen.
        Raises ConfigError for a name that would not do as a part of a model's, or a weight that is no share.
        """
        if not _NAME.fullmatch(tenant):
            raise ConfigError(f"a tenant's name is 1 to 64 letters, digits, '.', '_' or '-', not {tenant!r}")
        if weight is not None and not 0.0 < weight < math.inf:
            raise ConfigError(f"a tenant's weight must be a number above 0, not {weight}")
        secret = secret_keys.draw()

        def write(connection: Connection) -> Key:
            owner = _tenant(connection, name=tenant) or self._add(connection, tenant)
            if weight is not None:
                connection.execute(update(tenants).where(tenants.c.id == owner.id).values(weight=weight))
            key = Key(new_id("key"), owner.name, secret_keys.prefix_of(secret), int(self._clock()))
            connection.execute(
                insert(keys).values(
                    id=key.id,
                    tenant=owner.id,
                    prefix=key.prefix,
                    digest=secret_keys.digest_of(secret),
                    created=key.created,
                )
            )
            return key

        return await self._database.write(write), secret

    async def keys(self) -> tuple[Key, ...]:
        """All keys, revoked ones too, the oldest first."""
        found = (
            select(keys.c.id, tenants.c.name.label("tenant"), keys.c.prefix, keys.c.created, keys.c.revoked)
            .join(tenants, keys.c.tenant == tenants.c.id)
            .order_by(keys.c.number)
        )
        return await self._database.read(
            lambda connection: tuple(Key(**row) for row in connection.execute(found).mappings())
        )

    async def revoke_key(self, key: str) -> bool:
        """Takes a key out of force at once, by its id or its prefix; False if no such key is in force."""
        named = (keys.c.id == key) | (keys.c.prefix == key)
        change = update(keys).where(named, keys.c.revoked.is_(None)).values(revoked=int(self._clock()))
        return await self._database.write(lambda connection: connection.execute(change).rowcount > 0)

    async def revoked(self, digests: Collection[bytes]) -> frozenset[bytes]:
        """Subset of these digests (`keys.digest_of`) whose keys have been revoked."""
        found = select(keys.c.digest).where(keys.c.digest.in_(digests), keys.c.revoked.is_not(None))
        return await self._database.read(lambda c: frozenset(c.execute(found).scalars()))

    def _add(self, connection: Connection, name: str) -> Tenant:
        tenant = Tenant(new_id("tenant"), name)
        connection.execute(
            insert(tenants).values(id=tenant.id, name=name, weight=tenant.weight, created=int(self._clock()))
        )
        return tenant


def _tenant(connection: Connection, **where: str) -> Tenant | None:
    found = select(tenants.c.id, tenants.c.name, tenants.c.weight).filter_by(**where)
    row = connection.execute(found).mappings().first()
    return None if row is None else Tenant(**row)


def _of_key(connection: Connection, secret: str) -> Tenant | None:
    found = (
        select(keys.c.digest, tenants.c.id, tenants.c.name, tenants.c.weight)
        .join(tenants, keys.c.tenant == tenants.c.id)
        .where(keys.c.prefix == secret_keys.prefix_of(secret), keys.c.revoked.is_(None))
    )
    for row in connection.execute(found):
        if secret_keys.matches(secret, row.digest):
            return Tenant(row.id, row.name, row.weight)
    return None
