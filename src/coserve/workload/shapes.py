"""Model shapes for measurements: numbers of weights, and weights from a seed.

Importing this module loads no torch; making configurations and weights does.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from coserve.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model with untied embeddings and random weights, a Llama unless `family` says otherwise."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    groups: int  # key-value heads
    vocabulary: int
    positions: int
    dtype: str = "bfloat16"
    family: str = "llama"  # transformers' word for its architecture

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight."""
        return _ITEM_BYTES[self.dtype]

    @property
    def config(self) -> "PreTrainedConfig":
        """The shape as a transformers configuration."""
        import torch
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.hidden // self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            dtype=getattr(torch, self.dtype),
        )

    def build(self, device: str = "cpu") -> "PreTrainedModel":
        """A fresh model; every call makes the same weights (seed 0) in new storage, on `device`: other
        devices draw other numbers."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]), nullcontext() if device == "cpu" else torch.device(device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self.config, dtype=getattr(torch, self.dtype))
        built: PreTrainedModel = model.eval()
        return built

    def in_dtype(self, dtype: str) -> "ModelShape":
        """The same shape with weights of another type."""
        assert dtype in _ITEM_BYTES, dtype
        return replace(self, dtype=dtype)

    @property
    def parameters(self) -> int:
        """Weights of the base, norms included."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layer_weights + 2 * self.head_weights + norms

    @property
    def layer_weights(self) -> int:
        """Weights of all linears in the decoder layers."""
        kv = self.hidden * self.groups // self.heads
        attention = 2 * self.hidden * (self.hidden + kv)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    def lora_weights(self, rank: int) -> int:
        """Weights of an adapter of this rank beside every linear of the decoder layers."""
        kv = self.hidden * self.groups // self.heads
        square, narrow, wide = 2 * self.hidden, self.hidden + kv, self.hidden + self.intermediate
        return self.layers * rank * (2 * square + 2 * narrow + 3 * wide)


_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("70b", 8192, 80, 28672, 64, 8, 128256, 16384),  # Llama 3.1's
        ModelShape("70b-32k", 8192, 80, 28672, 64, 8, 32000, 4096),  # Llama 2's
        ModelShape("30b", 6656, 60, 17920, 52, 52, 32000, 4096),  # LLaMA's, 2,048 positions there
        ModelShape("13b", 5120, 40, 13824, 40, 40, 32000, 4096),
        ModelShape("8b", 4096, 32, 14336, 32, 8, 128256, 16384),
        ModelShape("qwen3-8b", 4096, 36, 12288, 32, 8, 151936, 40960, family="qwen3"),
        ModelShape("1.5b", 1280, 88, 3456, 20, 5, 4096, 2048),
        ModelShape("600m", 1536, 18, 4096, 12, 6, 16384, 4096),
        ModelShape("780m", 1280, 44, 3456, 20, 5, 4096, 2048),  # 1.5b's bytes, if in float32
        ModelShape("255m", 1024, 16, 2816, 16, 8, 32000, 4096),
        ModelShape("19m", 384, 8, 1024, 6, 3, 8192, 2048),
        ModelShape("tiny", 64, 4, 176, 4, 2, 512, 1024),
    )
}


def shape_names() -> tuple[str, ...]:
    """Names of all shapes."""
    return tuple(_SHAPES)


def shape_named(name: str) -> ModelShape:
    """The shape called `name`. Raises ConfigError, with the known names, for any other."""
    if name not in _SHAPES:
        raise ConfigError(f"there is no shape {name!r}; there are {', '.join(_SHAPES)}")
    return _SHAPES[name]
