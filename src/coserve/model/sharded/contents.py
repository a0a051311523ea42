"""Content hashes of tensors that are cut over ranks: those of the whole tensors, of which no rank has more
than some rows at a time."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coserve.model.contents import Contents, ModelContents, contents_of
from coserve.parallel.ranks import Ranks

_PIECE: Final = 16 << 20  # bytes of a tensor's rows that ranks exchange at once


def contents_over_ranks(tensors: Mapping[str, Tensor], contents: ModelContents, ranks: Ranks) -> Contents:
    """Contents of tensors, cut ones as if they were whole: what one rank would find. The first rank's
    remembered ones count. All ranks call this together."""
    known = contents.of(tensors, compute=lambda _: {}) if not ranks.number else {}
    lacking = ranks.first(sorted(tensors.keys() - known.keys()))
    found = {name: _hash_over_ranks(tensors[name], ranks) for name in lacking if _is_cut(tensors[name])}
    if not ranks.number:
        found |= contents_of({name: tensors[name] for name in lacking if name not in found})
        known |= contents.of({name: tensors[name] for name in lacking}, compute=lambda _: found)
        contents.remember()
    everywhere: dict[str, bytes] = ranks.first(known)
    return everywhere


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor.data, DTensor)


def _hash_over_ranks(tensor: Tensor, ranks: Ranks) -> bytes:
    """As `contents.content_of` of the whole tensor; nothing but on the first rank."""
    whole: Any = tensor.data
    digest = hashlib.sha256()
    for rows in _rows(whole, ranks):
        if not ranks.number:
            values = rows.contiguous().flatten().view(torch.uint8).cpu()
            digest.update(values.numpy())  # type: ignore[arg-type]  # it is a buffer
    return f"{tuple(whole.shape)} {whole.dtype}\n".encode() + digest.digest()


def _rows(tensor: Any, ranks: Ranks) -> Iterator[Tensor]:
    """The whole tensor's rows in order, some at a time."""
    (placement,), own = tensor.placements, tensor.to_local()
    pieces = getattr(placement, "split_factor", 1)
    dim = placement.dim % own.ndim
    each = max(1, _PIECE // max(own[:1].nbytes * ranks.count, 1))
    if dim:
        for rows in own.split(each):
            parts = [ranks.whole(part, dim) for part in rows.chunk(pieces, dim)]
            yield torch.cat(parts, dim)
        return
    for piece in own.chunk(pieces):
        for rank in range(ranks.count):  # one after the other, as their rows lie
            for rows in piece.split(each):
                yield ranks.of(rank, rows)
