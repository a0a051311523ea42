"""The interface of forms: the tensors of a file that belong to one weight, and the state that transformers'
loader is given in their place.

A weight of a quantized checkpoint is several tensors: packed numbers, scales, offsets. The loader gets one
lazy tensor under the weight's plain name instead, which reads and widens its parts when the loader comes to
it. So at most a few weights exist twice, and what transformers renames, merges or cuts over ranks, it does as
in a checkpoint that was never quantized.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from coserve.errors import ModelError


class Slice(Protocol):
    """A tensor in a file, read when it is indexed, as safetensors' slices are."""

    def __getitem__(self, index: Any, /) -> Tensor: ...

    def get_shape(self) -> list[int]: ...


class Form(Protocol):
    """The form in which the weights of one checkpoint were saved."""

    @property
    def name(self) -> str:
        """The name of the form in messages."""
        ...

    def weight_of(self, name: str) -> tuple[str, str] | None:
        """The plain name of the weight that a tensor of this name is a part of, and which part; the part is
        empty for one that the form has no use for. None for a tensor that is as it would be anyway."""
        ...

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """The weight's shape, without its numbers being read."""
        ...

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight in a floating-point type. Parts that do not fit raise an IndexError, KeyError,
        RuntimeError, TypeError or ValueError."""
        ...


class DenseWeight:
    """One weight of a quantized checkpoint, made of its parts whenever it is indexed."""

    def __init__(self, name: str, form: Form, parts: Mapping[str, Slice], dtype: torch.dtype) -> None:
        self._name, self._form, self._parts, self._dtype = name, form, parts, dtype

    def __getitem__(self, index: Any) -> Tensor:
        """The whole weight, or the part of it that a rank has."""
        try:
            weight = self._form.widen({part: own[...] for part, own in self._parts.items()}, self._dtype)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise self._damaged() from error
        return weight[index]

    def get_shape(self) -> list[int]:
        """The weight's shape, as safetensors' slices give theirs."""
        try:
            return self._form.shape_of(self._parts)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise self._damaged() from error

    def _damaged(self) -> ModelError:
        return ModelError(
            f"the tensors that {self._name} is made of do not fit each other as {self._form.name} has them: "
            + ", ".join(f"{part} {own.get_shape()}" for part, own in sorted(self._parts.items()))
        )


class Whole:
    """A tensor in memory that is read like a slice of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return [*self._tensor.shape]


def dense_state(form: Form, state: Mapping[str, Slice], dtype: torch.dtype) -> dict[str, Slice]:
    """Tensors under the names that they have in a checkpoint which is not quantized. Raises ModelError for
    a name that two would have."""
    dense: dict[str, Slice] = {}
    parts: dict[str, dict[str, Slice]] = {}
    for name, tensor in state.items():
        match form.weight_of(name):
            case None:
                dense[name] = tensor
            case (weight, part) if part:
                parts.setdefault(weight, {})[part] = tensor
    if both := dense.keys() & parts.keys():
        raise ModelError(f"{min(both)} is in the model's files twice: quantized, and as it is")
    return dense | {name: DenseWeight(name, form, own, dtype) for name, own in parts.items()}


def slices_of(files: Iterable[str | Path], closing: ExitStack) -> dict[str, Slice]:
    """The tensors of files of safetensors, which are open until `closing` ends."""
    return {
        name: opened.get_slice(name)
        for opened in (closing.enter_context(safe_open(file, "pt")) for file in files)
        for name in opened.keys()  # noqa: SIM118
    }


def split_suffix(name: str, suffixes: Mapping[str, str]) -> tuple[str, str] | None:
    """A name without the one of these suffixes that it ends with, and the part that the suffix stands
    for."""
    found = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
    return None if found is None else (name.removesuffix(found), suffixes[found])


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Whole numbers of `bits` bits out of int32 words, the lowest first, along one dimension: int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.ndim - 1 - dim))) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)
