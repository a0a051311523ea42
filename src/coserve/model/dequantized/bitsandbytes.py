"""bitsandbytes' forms: NF4 and FP4 in blocks, their scales perhaps quantized too, and int8 rows.

The file has the sixteen values and the scales' own; so the library is not needed to read it.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from coserve.model.dequantized.form import Slice, split_suffix

_STATE: Final = ".weight.quant_state.bitsandbytes__"
_PARTS: Final = {
    ".weight.absmax": "scales", ".weight.quant_map": "values", ".weight.nested_absmax": "nested_scales",
    ".weight.nested_quant_map": "nested_values", f"{_STATE}nf4": "state", f"{_STATE}fp4": "state",
    ".SCB": "rows", ".weight_format": "",
}  # fmt: skip
_INT8: Final = 127
_MOST_STATE: Final = 1 << 16  # bytes of JSON


class BitsAndBytesForm:
    """A weight of four bits is bytes [n / 2, 1], the higher half first, row after row; its shape and the
    sizes of blocks are JSON in a tensor of bytes. One of eight bits is int8 [out, in] with the largest of
    each row. `names` are those of the files, which tell weights that are quantized from others."""

    name = "bitsandbytes"

    def __init__(self, names: Collection[str]) -> None:
        found = (split_suffix(name, _PARTS) for name in names)
        self._quantized = {f"{one[0]}.weight" for one in found if one is not None and one[1]}

    def weight_of(self, name: str) -> tuple[str, str] | None:
        """Linears alone are quantized."""
        if name in self._quantized:
            return name, "numbers"
        found = split_suffix(name, _PARTS)
        return None if found is None else (f"{found[0]}.weight", found[1])

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """That of eight bits' numbers, or as the state says."""
        if "rows" in parts:
            return parts["numbers"].get_shape()
        return [*map(int, _state_of(parts["state"][...])["shape"])]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """As bitsandbytes' own functions do, in float32."""
        numbers = parts["numbers"]
        if "rows" in parts:
            return (numbers.float() * (parts["rows"].float() / _INT8)[:, None]).to(dtype)
        state = _state_of(parts["state"])
        shape = [*map(int, state["shape"])]
        if math.prod(shape) != 2 * numbers.numel() or numbers.dtype != torch.uint8:
            raise ValueError("two numbers are a byte")
        packed = numbers.flatten()
        both = torch.stack([packed >> 4, packed & 0x0F], dim=-1).flatten()
        values, scales = parts["values"].float(), parts["scales"]
        if "nested_scales" in parts:
            inner = parts["nested_values"].float()[scales.int()]
            scales = _scaled(inner, parts["nested_scales"].float(), int(state["nested_blocksize"]))
            scales = scales + float(state["nested_offset"])
        return _scaled(values[both.int()], scales.float(), int(state["blocksize"])).view(shape).to(dtype)


def _scaled(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Flat numbers times the scale of their block, of which the last may be shorter."""
    if block < 1 or -(-len(numbers) // block) != scales.numel():
        raise ValueError("there is a scale for each block")
    whole = len(numbers) // block * block
    scales = scales.flatten()
    begins = (numbers[:whole].view(-1, block) * scales[: whole // block, None]).flatten()
    return torch.cat([begins, numbers[whole:] * scales[-1]])


def _state_of(stored: Tensor) -> dict[str, Any]:
    if stored.numel() > _MOST_STATE or stored.dtype != torch.uint8:
        raise ValueError("the state of a quantized weight is a short text")
    state = json.loads(bytes(stored.flatten().tolist()))
    if not isinstance(state, dict):
        raise ValueError("the state of a quantized weight is an object")
    return state
