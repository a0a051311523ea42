"""Counts what autograd keeps for the backward pass."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor


class _Saved:
    """A tensor in a graph; it lives as long as the node that saved it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its history, an output saved by its own node would never die


class SavedBytes:
    """Bytes of the unique storages that live graphs hold, weights excluded.

    `weights` are never counted, however often a graph saves them. Storages of which some saved tensor's
    last dimension is `vocabulary` are logits and make a line of their own.
    """

    def __init__(self, weights: Iterable[Tensor], vocabulary: int) -> None:
        self._weights = {_storage(weight) for weight in weights}
        self._vocabulary = vocabulary
        self._saved: WeakSet[_Saved] = WeakSet()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts tensors that graphs built in the block save, for as long as they keep them."""

        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor)
            self._saved.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield

    @property
    def activations(self) -> int:
        """Bytes held now, logits excluded."""
        return sum(size for size, is_logits in self._storages().values() if not is_logits)

    @property
    def logits(self) -> int:
        """Bytes of logits held now, in whatever precision each copy has."""
        return sum(size for size, is_logits in self._storages().values() if is_logits)

    def _storages(self) -> dict[int, tuple[int, bool]]:
        found: dict[int, tuple[int, bool]] = {}
        for saved in self._saved:
            tensor = saved.tensor
            key = _storage(tensor)
            if key not in self._weights:
                is_logits = tensor.dim() > 0 and tensor.shape[-1] == self._vocabulary
                seen = found.get(key, (0, False))[1]
                found[key] = tensor.untyped_storage().nbytes(), seen or is_logits
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
