"""A chain of two bases: the first layers of one, a stitching block, and the last layers of the other
(BlockLLM, 4.4).

`StitchedBase` is one more base to the executor, with keys and values of its own, and shares all blocks, the
embedding and the tail with the two. It answers only: it has no sites, so no adapter rides on it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coserve.adapters.bypass import exact_type
from coserve.core.sequence import Direction
from coserve.errors import ConfigError
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows, LayerCalls, RowArguments, Rows
from coserve.model.block import Block, Call, ModelPart
from coserve.model.origin import Origin
from coserve.model.parameters import held_bytes

PLACE: Final = "stitching.json"
WEIGHTS: Final = "stitching.safetensors"
_ROWS: Final = (3, 5)  # numbers of rows that the layers' arguments are compared for


@dataclass(frozen=True, slots=True)
class Stitch:
    """A stitching block at its place: behind `layers` layers of the first base and in front of layer `enters`
    of the second, from 0. `weight` [second width, first width] and `bias` [second width]; the block's input
    of its position is part of the bias."""

    layers: int
    enters: int
    weight: Tensor
    bias: Tensor

    @staticmethod
    def read(folder: Path) -> "Stitch":
        """Reads what `zoo/views.py` writes: the place and, with the position as last input, the linear.
        Raises ConfigError with the folder."""
        try:
            place: dict[str, Any] = json.loads((folder / PLACE).read_text(encoding="utf-8"))
            layers, enters, position = place["layers"], place["enters"], float(place["position"])
            tensors = load_file(folder / WEIGHTS)
            weight, bias = tensors["weight"], tensors["bias"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{folder} has no stitching block that can be read: {error!r}") from error
        is_linear = weight.ndim == 2 and bias.shape == weight.shape[:1] and weight.shape[1] > 1
        if not (isinstance(layers, int) and isinstance(enters, int) and is_linear):
            raise ConfigError(
                f"{folder} has no stitching block: no linear has these shapes, or its place is none"
            )
        found = Stitch(layers, enters, weight[:, :-1].contiguous(), bias + position * weight[:, -1])
        if not all(bool(tensor.isfinite().all()) for tensor in (found.weight, found.bias)):
            raise ConfigError(f"{folder} has a stitching block with numbers that are not finite")
        return found

    def to(self, dtype: torch.dtype, device: torch.device) -> "Stitch":
        """The same in a type and on a device."""
        return Stitch(self.layers, self.enters, self.weight.to(device, dtype), self.bias.to(device, dtype))


class StitchedBase(Base):
    """Two bases as one, with a stitching block in between.

    Rows pass the embedding and the first layers of `first`, the block, the last layers of `second` and its
    tail. Each layer computes as in its own base, whose cell has the rows too; in the second one these find
    their pages under the chain's numbers of layers. `passed_nbytes` are the bytes of all weights that a row
    passes, `nbytes` those of the stitching block alone: the rest are counted where they belong.
    """

    def __init__(self, first: Base, second: Base, stitch: Stitch) -> None:
        """Raises ConfigError where the parts do not connect."""
        _check(first, second, stitch)
        stitch = stitch.to(exact_type(second.dtype), second.device)
        head = [*first.chain][: stitch.layers]
        entered, *rest = [*second.chain][stitch.enters :]
        blocks = [*head, _Entered(entered, stitch), *rest]
        shift = stitch.layers - stitch.enters
        cell = _BothCells(first.cell, second.cell, shift)
        parts = [*blocks, second.chain.ends]
        owned = [own for part in parts for own in part.parameters().values()]
        origin = Origin(
            sites={},
            parameters=sum(tensor.numel() for tensor in (stitch.weight, stitch.bias)),
            dtype=second.dtype,
            device=second.device,
            quantized=second.quantized,
            fingerprint=_fingerprint(first, second, stitch),
        )
        super().__init__(second.model, blocks, origin, cell, min(first.max_positions, second.max_positions))
        self.chain.shortcut = second.chain.shortcut
        self.caches = [*first.caches[: stitch.layers], *second.caches[stitch.enters :]]
        self.buffer_nbytes = sum(tensor.nbytes for tensor in (stitch.weight, stitch.bias))
        self.passed_nbytes = held_bytes(owned) + self.buffer_nbytes
        self.hidden_size, self.vocabulary = first.hidden_size, second.vocabulary
        self._first, self._second, self._stitch = first, second, stitch
        fewer, more = (torch.arange(rows, device=self.device) for rows in _ROWS)
        self._arguments = RowArguments(*(self.prologue(torch.zeros_like(n), n)[1] for n in (fewer, more)))

    @property
    def _parts(self) -> list[ModelPart]:
        return []  # all are counted as those of their own bases

    def tail(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Logits by the second base's tail; see `Base.tail`."""
        return self._second.tail(hidden, rows)

    def _begin(self, tokens: Tensor, positions: Tensor, rows: Rows | None) -> tuple[Tensor, LayerCalls]:
        """The first base's embeddings, and each layer's arguments as its own base has them."""
        hidden, own = self._first.prologue(tokens, positions, rows)
        _, others = self._second.prologue(tokens, positions)
        behind = tuple(len(own.calls) + call for call in others.index[self._stitch.enters :])
        return hidden, LayerCalls(own.calls + others.calls, own.index[: self._stitch.layers] + behind)


class _Entered(Block):
    """The second base's first block of the chain, with the stitching block in front of it. Only the latter is
    its own: the block stays the second base's, whose passes go on without the stitch."""

    def __init__(self, block: Block, stitch: Stitch) -> None:
        ModelPart.__init__(self)  # the module's forward is replaced already
        self.path, self.module, self.shortcut = block.path, block.module, None
        self._block, self._stitch = block, stitch

    @contextmanager
    def visit(self, direction: Direction) -> Iterator[None]:
        """The block's own visit."""
        with self._block.visit(direction):
            yield

    def own(self, hidden: Tensor, call: Call) -> Tensor:
        """The block behind the stitch, on hidden [1, rows, first width]; returns [1, rows, second width]."""
        weight, bias = self._stitch.weight, self._stitch.bias
        stitched = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
        return self._block.run(stitched.to(hidden.dtype), call)


class _BothCells(BatchCell):
    """The cell of a chain of two bases: rows in it are in both bases' cells, in the second one with pages
    `shift` layers behind."""

    def __init__(self, first: BatchCell, second: BatchCell, shift: int) -> None:
        super().__init__()
        self._first, self._second, self._shift = first, second, shift

    @contextmanager
    def set(self, rows: Rows) -> Iterator[None]:
        shifted = rows.shifted(self._shift) if isinstance(rows, FusedRows) else rows
        with super().set(rows), self._first.set(rows), self._second.set(shifted):
            yield


def _check(first: Base, second: Base, stitch: Stitch) -> None:
    """Raises ConfigError where two bases are no chain with this stitching block between them."""
    layers, enters = stitch.layers, stitch.enters
    if not (1 <= layers <= first.depth and 0 <= enters < second.depth):
        raise ConfigError(
            f"a chain cannot go from behind layer {layers} of {first.depth} on to layer {enters + 1} of "
            f"{second.depth}"
        )
    widths = second.hidden_size, first.hidden_size
    if tuple(stitch.weight.shape) != widths:
        found = " x ".join(map(str, stitch.weight.shape))
        raise ConfigError(
            f"the stitching block does not connect the bases: {found} is not {widths[0]} x {widths[1]}"
        )
    if first.vocabulary != second.vocabulary:
        raise ConfigError(f"vocabularies of {first.vocabulary} and {second.vocabulary} do not go together")
    if (first.dtype, first.device) != (second.dtype, second.device):
        raise ConfigError(
            f"the bases are {first.dtype} on {first.device} and {second.dtype} on {second.device}"
        )
    for base in (first, second):
        if base.makes_calls or base.reader is not None:
            raise ConfigError("a chain of two bases needs both in memory, and one is streamed or elsewhere")
        if base.hands_on:
            raise ConfigError(
                "layers of one base attend to keys and values of others, which a chain may lack"
            )


def _fingerprint(first: Base, second: Base, stitch: Stitch) -> str:
    parts = f"{first.fingerprint} {second.fingerprint} {stitch.layers} {stitch.enters}\n"
    whole = hashlib.sha256(parts.encode())
    for tensor in (stitch.weight, stitch.bias):
        whole.update(tensor.detach().float().cpu().numpy().tobytes())
    return whole.hexdigest()[:16]
