"""Architectures that GGUF and transformers both have: their names there, and what differs between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Final

from torch import Tensor

from coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """`name` of an architecture of GGUF. Where `turns`, rows of the projections of queries and keys are in
    another order there, as llama.cpp rotates neighbours and transformers halves. Where `centred`, norms of
    transformers hold the difference from 1. `whole` models are written where another program reads the file
    and gives the same logits."""

    name: str
    turns: bool = False
    centred: bool = False
    whole: bool = False


# By transformers' type of models: those whose linears have one tensor each in both.
ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = MappingProxyType({
    "llama": GgufArchitecture("LLAMA", turns=True, whole=True),
    "mistral": GgufArchitecture("LLAMA", turns=True, whole=True),
    "smollm3": GgufArchitecture("SMOLLM3", turns=True),
    "granite": GgufArchitecture("GRANITE", turns=True),
    "qwen2": GgufArchitecture("QWEN2", whole=True),
    "qwen3": GgufArchitecture("QWEN3", whole=True),
    "olmo2": GgufArchitecture("OLMO2"),
    "gemma2": GgufArchitecture("GEMMA2", centred=True, whole=True),
    "gemma3_text": GgufArchitecture("GEMMA3", centred=True, whole=True),
})  # fmt: skip


def turned(rows: Tensor, path: str, config: Any) -> Tensor:
    """Rows [out, ...] of the linear at `path` in the order of an architecture that turns them."""
    heads = 0
    if path.endswith("q_proj"):
        heads = int(config.num_attention_heads)
    elif path.endswith("k_proj"):
        heads = int(config.num_key_value_heads)
    return neighbours(rows, heads) if heads else rows


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows [out, ...] in the order in which the two that are rotated together are neighbours, from that in
    which they are in the two halves of a head."""
    halves = rows.view(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def library() -> ModuleType:
    """The package `gguf`. Raises ConfigError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF needs the extra gguf: pip install 'coserve[gguf]'") from error
    module: ModuleType = gguf
    return module
