"""What windows owe to earlier rows' keys and values until those rows come back themselves (FlexLLM 6.1,
figure 10): sums in at least float32, over the rows of one example, for as long as they are waited for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.memory.arena import Arena
from coserve.train.window import Pair


@dataclass(frozen=True, slots=True)
class _Account:
    """Of rows [first, first + n): keys [groups, n, dk] and values [groups, n, dv]."""

    first: int
    keys: Tensor
    values: Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[1]


class KVGradAccumulator:
    """Accounts by layer. Windows come from the right, so an account is opened with its most rows; several may
    be owed to the same rows where other layers read a layer's keys and values."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._accounts: dict[int, list[_Account]] = {}

    def add(self, layer: int, rows: slice, owed: Pair) -> None:
        """Adds [1, groups, n, width] to what the keys, and the values, of n rows are owed."""
        first, end = rows.start or 0, rows.stop
        account = self._covering(layer, first, end)
        if account is None:
            account = _Account(first, *(self._zeros(given) for given in owed))
            self._accounts.setdefault(layer, []).append(account)
        span = slice(first - account.first, end - account.first)
        account.keys[:, span] += owed[0][0]
        account.values[:, span] += owed[1][0]

    def collect(self, layer: int, rows: slice, dtype: torch.dtype) -> Pair | None:
        """What the rows of a window are owed, [1, groups, rows, width] for keys and values; None if nothing.
        Accounts of which no row is left of the window are closed."""
        due = [a for a in self._accounts.get(layer, ()) if a.first < rows.stop and rows.start < a.end]
        if not due:
            return None
        found = self._over(due, rows, dtype)
        for account in due:
            if account.first >= rows.start:
                self._accounts[layer].remove(account)
                self._arena.give_back((account.keys, account.values))
        return found

    def tensors(self) -> Iterator[Tensor]:
        """All that is held."""
        for accounts in self._accounts.values():
            for account in accounts:
                yield account.keys
                yield account.values

    def clear(self) -> None:
        """Forgets everything; who calls gives the memory back."""
        self._accounts.clear()

    def _covering(self, layer: int, first: int, end: int) -> _Account | None:
        accounts = self._accounts.get(layer, ())
        return next((a for a in accounts if a.first <= first and end <= a.end), None)

    def _zeros(self, like: Tensor) -> Tensor:
        exact = torch.promote_types(like.dtype, torch.float32)
        return self._arena.take(like.shape[1:], exact, like.device).zero_()

    def _over(self, due: list[_Account], rows: slice, dtype: torch.dtype) -> Pair:
        """The accounts' sums over exactly these rows, zero where there is none."""
        count = rows.stop - rows.start
        sums = []
        for stores in ([a.keys for a in due], [a.values for a in due]):
            groups, _, width = stores[0].shape
            total = stores[0].new_zeros(1, groups, count, width, dtype=dtype)
            for account, store in zip(due, stores, strict=True):
                first, end = max(account.first, rows.start), min(account.end, rows.stop)
                total[0, :, first - rows.start : end - rows.start] += store[
                    :, first - account.first : end - account.first
                ]
            sums.append(total)
        return sums[0], sums[1]
