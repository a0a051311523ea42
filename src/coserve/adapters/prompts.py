"""Shared by the methods with virtual tokens: prompts of embeddings, and PEFT's fields about them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.saved import Saved, shown
from coserve.adapters.sites import Frame
from coserve.adapters.virtual import Prompt, prompt_site
from coserve.errors import AdapterError, AdapterMismatch

EMBEDDINGS: Final = "prompt_embeddings"  # the only tensor that PEFT saves of these methods
# Weights of an encoder by PEFT's names: shapes, and bounds of the uniform distribution torch draws them from.
Shapes = dict[str, tuple[tuple[int, ...], float]]
ENCODER: Final = "encoder."  # how the names of tensors begin that only coserve's own checkpoints have
MOST_TOKENS: Final = 65_536  # virtual tokens
MOST_HIDDEN: Final = 65_536  # features within a prompt's encoder or a prefix's projection
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
    width = prompt_site(frame).outputs
    count = take_count(saved, frame, width)
    return PlainPrompt(take_rows(saved, count, width))


def take_rows(saved: Saved, count: int, width: int) -> Tensor:
    """Embeddings [count, width]."""
    rows = saved.tensor(EMBEDDINGS)
    expect_shape(saved, EMBEDDINGS, rows, count, width)
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


def take_count(saved: Saved, frame: Frame, width: int, heads: int | None = None) -> int:
    """`num_virtual_tokens`. Raises AdapterError where other fields are for another base than one with tokens
    of this `width`, divided among so many `heads`; null fields PEFT reads off the base."""
    if _given(saved, "num_transformer_submodules", 1) != 1:
        raise AdapterError(f"{saved.folder}: an adapter of an encoder and a decoder is not supported")
    wanted = {"num_layers": frame.depth, "token_dim": width}
    if heads is None:
        saved.ignore("num_attention_heads")
    else:
        wanted["num_attention_heads"] = heads
        if (saved.fields.get("token_dim") is None) != (saved.fields.get("num_attention_heads") is None):
            raise AdapterError(f"{saved.folder}: token_dim and num_attention_heads belong together")
    for name, own in wanted.items():
        if (value := _given(saved, name, own)) != own:
            raise AdapterError(f"{saved.folder}: {name}={value}, and the base has {own}")
    count: int = saved.take("num_virtual_tokens", 0)
    if not 1 <= count <= MOST_TOKENS:
        raise AdapterError(f"{saved.folder}: num_virtual_tokens must be 1 to {MOST_TOKENS}, not {count}")
    return count


def _given(saved: Saved, name: str, default: int) -> int:
    """A field's value, the default where it is missing or null."""
    if saved.fields.get(name) is None:
        saved.ignore(name)
    value: int = saved.take(name, default)
    return value


def count_fields(count: int) -> dict[str, Any]:
    """PEFT's fields for `count` virtual tokens; PEFT reads the rest from the model."""
    return {"num_virtual_tokens": count, "num_transformer_submodules": 1}


def prompt_fields(rows: Tensor) -> dict[str, Any]:
    """PEFT's fields for prompt rows [count, width]; PEFT takes their width for that of the layers."""
    return {**count_fields(len(rows)), "token_dim": rows.shape[1]}


def expect_count(method: str, tokens: object) -> None:
    """Raises AdapterError unless `tokens` is a valid number of virtual tokens."""
    if type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
        raise AdapterError(
            f"{method} needs a whole number of 1 to {MOST_TOKENS} virtual tokens, not {shown(tokens)}"
        )


def linear_shapes(name: str, numbers: tuple[int, ...], widths: tuple[int, ...]) -> Shapes:
    """Shapes of weights and biases of consecutive linears named `name.number`."""
    found: Shapes = {}
    for number, ins, outs in zip(numbers, widths[:-1], widths[1:], strict=True):
        found[f"{name}.{number}.weight"] = (outs, ins), ins**-0.5
        found[f"{name}.{number}.bias"] = (outs,), ins**-0.5
    return found
