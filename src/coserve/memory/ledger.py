"""The ledger: one budget of bytes, by owner and account.

An owner (the base, the pages, a job, an adapter version) *reserves* the most it may hold before it allocates:
either all of it is free, or nothing changes and the error says how many bytes are missing. The bytes it
really holds are *charged*. An entry counts with the larger of the two, so an owner that holds more than it
reserved leaves less for later ones.

The ledger only counts; `memory.measured` measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from coserve.core.size import show_size
from coserve.errors import OutOfMemory


class Account(StrEnum):
    """Accounts: the purposes of bytes."""

    BASE = "base"  # the frozen weights, in whatever layouts they are held
    PAGES = "pages"  # keys and values of all sequences
    ACTIVATIONS = "activations"  # tensors that forward passes keep for backward ones
    ADAPTERS = "adapters"  # versions that answers and training read
    OPTIMIZERS = "optimizers"  # master weights, their gradients, and AdamW's moments
    WORKSPACES = "workspaces"  # temporary tensors of a step
    LIBRARIES = "libraries"  # code that libraries load with a model, and build for its shapes


Bytes = Mapping[Account, int]


@dataclass(slots=True)
class _LedgerEntry:
    reserved: int = 0
    charged: int = 0

    @property
    def counted(self) -> int:
        return max(self.reserved, self.charged)


class Ledger:
    """The budget of one device, in bytes, and all entries in it, by owner and account."""

    def __init__(self, budget: int) -> None:
        assert budget >= 0, "a budget is a number of bytes"
        self.budget = budget
        self._entries: dict[str, dict[Account, _LedgerEntry]] = {}

    @property
    def used(self) -> int:
        """Bytes that are reserved or held."""
        return sum(entry.counted for entries in self._entries.values() for entry in entries.values())

    @property
    def free(self) -> int:
        """Bytes neither reserved nor held; negative where more is held than the budget allows."""
        return self.budget - self.used

    def accounts(self) -> dict[Account, int]:
        """Bytes by account over all owners."""
        return {account: sum(self.of(owner, account) for owner in self._entries) for account in Account}

    def owners(self, prefix: str = "") -> list[str]:
        """Owners whose names begin with `prefix`."""
        return [owner for owner in self._entries if owner.startswith(prefix)]

    def of(self, owner: str, account: Account | None = None) -> int:
        """Bytes that an owner has in one account, or in all."""
        entries = self._entries.get(owner, {})
        return sum(e.counted for a, e in entries.items() if account is None or a is account)

    def missing(self, reservations: Mapping[str, Bytes]) -> int:
        """Bytes missing to reserve that much for these owners; 0 where there are enough."""
        more = sum(
            max(nbytes - self.of(owner, account), 0)
            for owner, accounts in reservations.items()
            for account, nbytes in accounts.items()
        )
        return max(more - self.free, 0) if more else 0

    def reserve(self, reservations: Mapping[str, Bytes]) -> None:
        """Sets the reservations of these owners in these accounts.

        Raises OutOfMemory, with nothing changed, where bytes are missing.
        """
        if missing := self.missing(reservations):
            needed = sum(sum(accounts.values()) for accounts in reservations.values())
            raise OutOfMemory(
                f"{', '.join(reservations)}: {show_size(needed)} are needed, and {show_size(missing)} "
                f"of that are missing: {show_size(max(self.free, 0))} of {show_size(self.budget)} are free"
            )
        for owner, accounts in reservations.items():
            entries = self._entries.setdefault(owner, {})
            for account, nbytes in accounts.items():
                entries.setdefault(account, _LedgerEntry()).reserved = nbytes

    def charge(self, owner: str, account: Account, nbytes: int) -> None:
        """Sets the bytes that an owner really holds. Never refused: they are allocated already."""
        self._entries.setdefault(owner, {}).setdefault(account, _LedgerEntry()).charged = nbytes

    def release(self, owner: str) -> int:
        """Removes an owner; returns the bytes freed."""
        freed = self.of(owner)
        self._entries.pop(owner, None)
        return freed
