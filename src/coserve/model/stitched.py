"""A chain of two bases: the first layers of one, a stitching block, and the last layers of the other
(BlockLLM, 4.4).

`StitchedBase` is one more base to the engine, with keys and values of its own, and shares all blocks, the
embedding and the tail with the two. Its rows have passes of their own
(`worker/stitched.py`). It answers only: it has no sites, so no adapter rides on it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coserve.adapters.bypass import exact_type
from coserve.errors import ConfigError
from coserve.model.base import Base
from coserve.model.batch import BatchCell, LayerCalls, RowArguments, Rows
from coserve.model.block import ModelPart
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

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes

    def to(self, dtype: torch.dtype, device: torch.device) -> "Stitch":
        """The same in a type and on a device."""
        return Stitch(self.layers, self.enters, self.weight.to(device, dtype), self.bias.to(device, dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, rows, second width] of hidden [1, rows, first width], in their type; computed in
        the block's own."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class Leg:
    """The layers of a chain that are one base's: `layers` by that base's numbers, which are `shift` less than
    the chain's; `own` are its calls among the chain's distinct ones. `nbytes` are those of all weights that
    a row passes there."""

    base: Base
    layers: range
    shift: int
    own: slice
    nbytes: int

    def calls(self, calls: LayerCalls) -> LayerCalls:
        """The arguments of the base's layers, of those of the chain's."""
        first = self.own.start
        index = (
            calls.index[layer + self.shift] - first if layer in self.layers else 0
            for layer in range(self.base.depth)
        )
        return LayerCalls(calls.calls[self.own], tuple(index))


class StitchedBase(Base):
    """Two bases as one, with a stitching block in between: `legs` are the layers of each.

    Rows begin with the first base's embedding and end with the second one's tail. `nbytes` are those of the
    stitching block alone: all others are counted where they belong.
    """

    def __init__(self, first: Base, second: Base, stitch: Stitch) -> None:
        """Raises ConfigError where the parts do not connect."""
        _check(first, second, stitch)
        self.stitch = stitch = stitch.to(exact_type(second.dtype), second.device)
        head, tail = first.chain.blocks[: stitch.layers], second.chain.blocks[stitch.enters :]
        origin = Origin(
            sites={},
            modules=second.modules,
            parameters=stitch.weight.numel() + stitch.bias.numel(),
            dtype=second.dtype,
            device=second.device,
            quantized=second.quantized,
            fingerprint=_fingerprint(first, second, stitch),
        )
        positions = min(first.max_positions, second.max_positions)
        super().__init__(second.model, [*head, *tail], origin, BatchCell(), positions)
        self.caches = [*first.caches[: stitch.layers], *second.caches[stitch.enters :]]
        self.buffer_nbytes = stitch.nbytes
        self.hidden_size, self.vocabulary = first.hidden_size, second.vocabulary
        self._first, self._second = first, second
        fewer, more = (torch.arange(rows, device=self.device) for rows in _ROWS)
        own = len(first.prologue(torch.zeros_like(fewer), fewer)[1].calls)
        self.legs = (
            Leg(first, range(stitch.layers), 0, slice(0, own), _nbytes(head)),
            Leg(
                second,
                range(stitch.enters, second.depth),
                stitch.layers - stitch.enters,
                slice(own, None),
                _nbytes([*tail, second.chain.ends]) + stitch.nbytes,
            ),
        )
        self._arguments = RowArguments(*(self.prologue(torch.zeros_like(n), n)[1] for n in (fewer, more)))

    @property
    def _parts(self) -> list[ModelPart]:
        return []  # all are counted as those of their own bases

    def tail(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Logits by the second base's tail; see `Base.tail`."""
        return self._second.tail(hidden, rows)

    def last_hidden(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """Hidden states after the second base's final norm; see `Base.last_hidden`."""
        return self._second.last_hidden(hidden, rows)

    def _begin(self, tokens: Tensor, positions: Tensor, rows: Rows | None) -> tuple[Tensor, LayerCalls]:
        """The first base's embeddings, and each layer's arguments as its own base has them."""
        hidden, own = self._first.prologue(tokens, positions, rows)
        _, others = self._second.prologue(tokens, positions)
        behind = tuple(len(own.calls) + call for call in others.index[self.stitch.enters :])
        return hidden, LayerCalls(own.calls + others.calls, own.index[: self.stitch.layers] + behind)


def _nbytes(parts: Sequence[ModelPart]) -> int:
    return held_bytes(own for part in parts for own in part.parameters().values())


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
        if isinstance(base, StitchedBase):
            raise ConfigError("a chain of two bases is no base of another chain")
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
