"""Small models with recurrent layers, and what coserve's are compared with: transformers' and PEFT's own."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models import POSITIONS, VOCABULARY, with_lora

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,  # of kernels with gradients: a multiple of 16
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_MAMBA_ONE: dict[str, Any] = {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 6}
# By name of the type; `mixers` recurrent layers each.
SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen3_5_text": {**_COMMON, **_DELTA},
    "qwen3_5_moe_text": {**_COMMON, **_DELTA, **_EXPERTS},
    "qwen3_next": {**_COMMON, **_DELTA, **_EXPERTS},
    "granitemoehybrid": {
        **_COMMON,
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {**_COMMON, **_MAMBA, "mamba_d_ssm": 96, "ssm_in_multiplier": 1.25},
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        **_COMMON,
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    },
    "lfm2": {**_COMMON, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {
        **{name: value for name, value in _COMMON.items() if name.endswith("_size") or name.endswith("_id")},
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 6,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "mamba": {
        **{name: value for name, value in _COMMON.items() if name.endswith("_size") or name.endswith("_id")},
        **_MAMBA_ONE,
    },
    "jamba": {
        **_COMMON,
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
    },
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of type `name`; same arguments, same weights."""
    fields = {**SHAPES[name], **changes}
    # The grouped products of fused experts have no float64.
    options = {"experts_implementation": "eager"} if "moe_intermediate_size" in fields else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields), **options)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                # Decays and convolutions stay as they are drawn: others blow up, or forget at once.
                if parameter.ndim == 2 and "A_log" not in path:
                    noise = torch.randn(parameter.shape)
                    parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
                elif parameter.ndim == 1 and path.endswith("norm.weight"):
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def with_adapter(
    name: str, targets: list[str], dtype: torch.dtype = torch.float32, seed: int = 1
) -> PeftModel:
    """The model under PEFT's LoRA. PEFT refuses `out_proj` of models by their types, as Mamba's fused kernels
    do not call it; here nothing is fused, so the type is another one."""
    model = build(name, dtype)
    model.config.model_type = "of its own"
    return with_lora(model, seed, target_modules=targets)
