"""PEFT's adapters with virtual tokens, the oracles of ours. Nothing here uses coserve."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import (
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

KINDS: Mapping[str, tuple[type[PeftConfig], dict[str, Any]]] = {
    "prefix": (PrefixTuningConfig, {"num_virtual_tokens": 7}),
    "projected prefix": (
        PrefixTuningConfig,
        {"num_virtual_tokens": 6, "prefix_projection": True, "encoder_hidden_size": 24},
    ),
    "prompt": (PromptTuningConfig, {"num_virtual_tokens": 9}),
    "p-tuning": (PromptEncoderConfig, {"num_virtual_tokens": 5, "encoder_hidden_size": 20}),
    "p-tuning by LSTM": (
        PromptEncoderConfig,
        {"num_virtual_tokens": 4, "encoder_hidden_size": 12, "encoder_reparameterization_type": "LSTM"},
    ),
}


def with_virtual(model: PreTrainedModel, kind: str, seed: int = 1, **fields: Any) -> PeftModel:
    """The model under a random adapter of this kind, in the model's precision."""
    config, own = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config(task_type="CAUSAL_LM", **{**own, **fields}))
    return adapted.to(model.dtype).eval()


def encoder_of(adapted: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters, by PEFT's names."""
    return dict(adapted.prompt_encoder["default"].named_parameters())


def own_logits(adapted: PeftModel, tokens: list[int]) -> Tensor:
    """Logits [rows, vocabulary] of a sequence's own tokens."""
    logits: Tensor = adapted(
        input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long)
    ).logits[0]
    return logits[-len(tokens) :]


def logits_behind(adapted: PeftModel, prefix: Tensor, prompt: Tensor, tokens: list[int]) -> Tensor:
    """The same under LoRA, behind a prefix [n, 2 * layers * key width] and a prompt [m, width] that
    transformers is given by hand, as PEFT has no such adapter."""
    config = adapted.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = prefix.view(len(prefix), 2 * config.num_hidden_layers, -1, head).permute(1, 2, 0, 3)[:, None]
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(past[2 * layer], past[2 * layer + 1], layer)
    embeds = torch.cat([prompt, adapted.get_input_embeddings()(torch.tensor(tokens))])[None]
    logits: Tensor = adapted(inputs_embeds=embeds, past_key_values=cache, use_cache=True).logits[0]
    return logits[len(prompt) :]
