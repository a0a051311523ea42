"""Pruned sets of layers that one can write out by hand."""

from collections.abc import Mapping

import pytest
import torch
from transformers import LlamaConfig, OPTConfig

from coserve import LoRAConfig, SavePolicy
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.errors import UnsupportedModel
from coserve.train.pruning import layers
from coserve.train.pruning.plan import explain_model
from coserve.train.pruning.table import Explained

HIDDEN, WIDE, GROUPED = 64, 256, 32  # bytes of a row are twice that
LLAMA = LlamaConfig(
    hidden_size=HIDDEN, num_hidden_layers=3, intermediate_size=WIDE, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96,
)  # fmt: skip
OPT, NARROW = (
    OPTConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, ffn_dim=WIDE, num_attention_heads=4, vocab_size=96,
        word_embed_proj_dim=embedded,
    )
    for embedded in (HIDDEN, HIDDEN // 2)
)  # fmt: skip
# What every layer keeps: its input, keys and values, attention with a log-sum-exp of four heads, and what
# goes into the activation.
LEAST = 2 * (HIDDEN + 2 * GROUPED + HIDDEN) + 4 * 4 + 2 * 2 * WIDE


def middle(config: object, keep: SavePolicy = SavePolicy.PRUNED) -> Explained:
    """Of a Llama's layers that have trained ones below."""
    return explain_model(LLAMA, torch.bfloat16, [config], keep)[-1]


def fates(explained: Explained) -> Mapping[str, str]:
    return {
        line.tensor.removesuffix(": product"): line.fate
        for line in explained.lines
        if "product" in line.tensor
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "more"),
    [
        (LoRAConfig(rank=4), 0),
        (LoRAConfig(rank=4, targets=("q_proj",)), 0),
        (IA3Config(), 0),  # keys and values before they are scaled are cheap
        (BitFitConfig(), 0),
        (PrefixTuningConfig(4), 0),
        (PromptTuningConfig(4), 0),
        (PTuningConfig(4), 0),
        (BottleneckConfig(width=4), 2 * HIDDEN),  # what the second one is given
        (LoRAConfig(rank=4, dora=True), 2 * HIDDEN),  # the magnitude's gradient asks for the product
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_what_a_llama_layer_keeps(config: object, more: int) -> None:
    explained = middle(config)
    assert explained.kept == LEAST + more
    found = fates(explained)
    kept = {"mlp.gate_proj", "mlp.up_proj"} | ({"mlp.down_proj"} if more else set())
    assert {path for path, fate in found.items() if fate == "kept"} == kept
    assert found["self_attn.q_proj"] == found["self_attn.o_proj"] == "recomputed"
    if not more:
        assert found["mlp.down_proj"] == "pruned"


def test_products_that_only_end_in_sums_or_in_the_cache_are_pruned() -> None:
    found = fates(middle(LoRAConfig(rank=4)))
    assert {path for path, fate in found.items() if fate == "pruned"} == {
        "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj",
    }  # fmt: skip
    scaled = fates(middle(IA3Config()))  # a scale's gradient is the product's inner one with what comes back
    assert scaled["self_attn.k_proj"] == scaled["self_attn.v_proj"] == "recomputed"


def test_inputs_alone() -> None:
    explained = middle(LoRAConfig(rank=4), SavePolicy.INPUTS)
    assert explained.kept == 2 * (HIDDEN + 2 * GROUPED)
    assert set(fates(explained).values()) == {"recomputed", "pruned"}


def test_no_norm_is_kept_in_float32() -> None:
    for config in (LoRAConfig(rank=4), BitFitConfig(), BottleneckConfig(width=4)):
        norms = [line for line in middle(config).lines if "norm" in line.tensor]
        assert any(line.nbytes == 4 * HIDDEN for line in norms), "torch would keep it"
        assert all(line.kept == 0 for line in norms)


def test_layers_below_the_lowest_adapter_are_not_there() -> None:
    (explained,) = explain_model(LLAMA, torch.bfloat16, [LoRAConfig(rank=4, targets=("2.mlp.up_proj",))])
    assert explained.layers == (2,)
    # Nobody asks for the gradient of the layer's input: the product's own input, and what is behind it.
    assert {path for path, fate in fates(explained).items() if fate == "kept"} == {"mlp.gate_proj"}


def test_a_relus_input_is_a_bit_where_nothing_hangs_behind_it() -> None:
    for config, fate, nbytes in (
        (PrefixTuningConfig(4), "compressed", WIDE / 8),
        (BitFitConfig(), "compressed", WIDE / 8),
        (LoRAConfig(rank=4, targets=("q_proj", "v_proj")), "compressed", WIDE / 8),
        (LoRAConfig(rank=4), "kept", 2 * WIDE),
        (IA3Config(), "kept", 2 * WIDE),
    ):
        lines = explain_model(OPT, torch.bfloat16, [config])[-1].lines
        (line,) = (line for line in lines if line.tensor == "fc1: product")
        assert (line.fate, line.kept) == (fate, nbytes), config


def test_layers_that_are_wider_than_the_embeddings() -> None:
    wide, narrow = (explain_model(model, torch.bfloat16, [PromptTuningConfig(4)]) for model in (OPT, NARROW))
    assert narrow == wide


def test_every_line_says_why() -> None:
    for explained in explain_model(LLAMA, torch.bfloat16, [LoRAConfig(rank=4)]):
        assert all(line.why for line in explained.lines)
        kept = [line for line in explained.lines if line.fate in ("kept", "compressed")]
        assert explained.kept == sum(line.kept for line in kept) < explained.pruned < explained.autograd


def test_two_methods_at_once() -> None:
    both = explain_model(LLAMA, torch.bfloat16, [LoRAConfig(rank=4), BottleneckConfig(width=4)])[-1]
    assert both.kept == LEAST + 2 * HIDDEN


def test_a_model_that_cannot_be_sketched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("it looks at numbers")

    monkeypatch.setattr(layers, "Sketch", fail)
    layers.SKETCHES.clear()
    try:
        with pytest.raises(UnsupportedModel, match="it looks at numbers"):
            explain_model(LLAMA, torch.bfloat16, [LoRAConfig(rank=4)])
    finally:
        layers.SKETCHES.clear()
