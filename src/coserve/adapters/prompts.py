"""Shared by the methods with virtual tokens: prompts of embeddings, and PEFT's fields about them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame
from coserve.adapters.virtual import Prompt, embedding_of
from coserve.errors import AdapterError, AdapterMismatch

EMBEDDINGS: Final = "prompt_embeddings"  # the only tensor that PEFT saves of these methods
# Weights of an encoder by PEFT's names: shapes, and bounds of the uniform distribution torch draws them from.
Shapes = dict[str, tuple[tuple[int, ...], float]]
ENCODER: Final = "encoder."  # how the names of tensors begin that only coserve's own checkpoints have
LOST: Final = "the file does not hold the encoder that its virtual tokens came out of: they train as they are"


@dataclass(frozen=True, slots=True, eq=False)
class PlainPrompt(Prompt):
    """Embeddings [count, width], trained directly."""

    embeddings: Tensor
    note: str = ""

    @property
    def count(self) -> int:
        return len(self.embeddings)

    def parameters(self) -> Mapping[str, Tensor]:
        return {EMBEDDINGS: self.embeddings}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "PlainPrompt":
        return replace(self, embeddings=parameters[EMBEDDINGS])

    def rows(self) -> Tensor:
        return self.embeddings


def read_prompt(saved: Saved, frame: Frame) -> PlainPrompt:
    """Reads embeddings as PEFT saves them, without any encoder."""
    count = take_count(saved, frame)
    return PlainPrompt(take_rows(saved, count, embedding_of(frame).outputs))


def take_rows(saved: Saved, count: int, width: int) -> Tensor:
    """Embeddings [count, width]; `count` 0 (not in the file) accepts any number."""
    rows = saved.tensor(EMBEDDINGS)
    expect_shape(saved, EMBEDDINGS, rows, count or (len(rows) if rows.ndim else 1), width)
    return rows


def has_encoder(saved: Saved) -> bool:
    """Tells whether the file is one of coserve's with the embeddings' encoder."""
    return any(name.startswith(ENCODER) for name in saved.tensors)


def draw_encoder(count: int, width: int, shapes: Shapes, generator: torch.Generator) -> dict[str, Tensor]:
    """An encoder's weights by PEFT's names, drawn as torch draws an embedding, an LSTM and linears."""
    weights = {"embedding.weight": torch.randn(count, width, generator=generator, dtype=torch.float32)}
    for name, (shape, bound) in shapes.items():
        weights[name] = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    return weights


def read_encoder(saved: Saved, count: int, width: int, shapes: Shapes) -> dict[str, Tensor]:
    """An encoder's weights by PEFT's names. Raises AdapterMismatch where one is missing or does not fit."""
    wanted = {"embedding.weight": (count, width), **{name: shape for name, (shape, _) in shapes.items()}}
    found = {name: saved.tensor(f"{ENCODER}{name}") for name in wanted}
    for name, tensor in found.items():
        expect_shape(saved, f"{ENCODER}{name}", tensor, *wanted[name])
    return found


def expect_shape(saved: Saved, name: str, tensor: Tensor, *shape: int) -> None:
    """Raises AdapterMismatch where a tensor of the file does not fit the base or its own configuration."""
    found = tuple(tensor.shape)
    if found != shape:
        raise AdapterMismatch(f"{saved.folder}: {name} is {found}, and would have to be {shape}")


def take_count(saved: Saved, frame: Frame) -> int:
    """`num_virtual_tokens`, 0 where the file lacks it. Raises AdapterError where other fields are for another
    kind of base; those that shapes imply are not checked."""
    if saved.take("num_transformer_submodules", 1) != 1:
        raise AdapterError(f"{saved.folder}: an adapter of an encoder and a decoder is not supported")
    if (layers := saved.take("num_layers", frame.depth)) != frame.depth:
        raise AdapterError(f"{saved.folder}: num_layers={layers}, and the base has {frame.depth}")
    saved.ignore("token_dim", "num_attention_heads")
    count: int = saved.take("num_virtual_tokens", 0)
    return count


def count_fields(count: int) -> dict[str, Any]:
    """PEFT's fields for `count` virtual tokens; PEFT reads the rest from the model."""
    return {"num_virtual_tokens": count, "num_transformer_submodules": 1}


def prompt_fields(rows: Tensor) -> dict[str, Any]:
    """PEFT's fields for prompt rows [count, width]; PEFT takes their width for that of the layers."""
    return {**count_fields(len(rows)), "token_dim": rows.shape[1]}


def expect_count(method: str, tokens: object) -> None:
    """Raises AdapterError unless `tokens` is a valid number of virtual tokens."""
    if type(tokens) is not int or tokens < 1:
        raise AdapterError(f"{method} needs a whole number of at least 1 virtual token, not {shown(tokens)}")


def linear_shapes(name: str, numbers: tuple[int, ...], widths: tuple[int, ...]) -> Shapes:
    """Shapes of weights and biases of consecutive linears named `name.number`."""
    found: Shapes = {}
    for number, ins, outs in zip(numbers, widths[:-1], widths[1:], strict=True):
        found[f"{name}.{number}.weight"] = (outs, ins), ins**-0.5
        found[f"{name}.{number}.bias"] = (outs,), ins**-0.5
    return found
