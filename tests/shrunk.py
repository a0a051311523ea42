"""Small configurations of every causal language model of transformers, made by shrinking its default."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models import POSITIONS, VOCABULARY, WINDOW, spread

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST = 14_000_000  # parameters; what stays larger is not tried
_SIZES: dict[int, tuple[str, ...]] = {
    64: ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size", "index_topk"),
    6: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"),
    4: (
        "num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ),
    2: (
        "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
        "index_n_heads", "num_kv_shared_layers",
    ),
    1: (
        "n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "type_vocab_size",
        "num_nextn_predict_layers",
    ),
    80: (
        "intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
        "intermediate_size_mlp",
    ),
    32: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "kv_channels",
    ),
    16: (
        "head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "global_head_dim",
        "laurel_rank",
    ),
    24: ("q_lora_rank",),
    8: ("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input"),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    POSITIONS: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    WINDOW: ("sliding_window",),
    0: ("pad_token_id", "bos_token_id", "eos_token_id"),
}  # fmt: skip
_DROPOUTS = (
    "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "input_dropout",
    "hidden_dropout",
)  # fmt: skip
_FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * 3
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3, **_MAMBA},
    "bamba": {"attn_layer_indices": [1, 4], **_MAMBA},
    "falcon_h1": _MAMBA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
    "jamba": {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"layer_types": _FULL_AND_SLIDING, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {"layer_types": _FULL_AND_SLIDING},
    "gemma4_unified_text": {"layer_types": _FULL_AND_SLIDING},
    "olmo": {"clip_qkv": 0.4},
    "olmoe": {"clip_qkv": 0.4},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip
# Models whose types have recurrent layers, and these have none.
WITHOUT_RECURRENCE: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "granitemoehybrid experts": ("granitemoehybrid", {}),
    **{
        f"{name} attention": (name, {})
        for name in (
            "lfm2",
            "lfm2_moe",
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "olmo_hybrid",
            "jamba",
        )
    },
}


def shrunk(name: str) -> dict[str, Any]:
    """Fields of a small configuration of `name`; those of its text model where it has several."""
    if name in WITHOUT_RECURRENCE:
        name, own = WITHOUT_RECURRENCE[name]
        return shrunk(name) | {"layer_types": ["full_attention"] * 6} | own
    default = CONFIG_MAPPING[name]()
    text = default.get_text_config()
    known = text.to_dict()
    names = known.keys() | getattr(text, "attribute_map", {}).keys()
    fields: dict[str, Any] = {f: size for size, of in _SIZES.items() for f in of if f in names}
    fields |= {field: 0.0 for field in _DROPOUTS if field in names}
    if known.get("sliding_window") is None:
        fields.pop("sliding_window", None)
    if known.get("kv_lora_rank"):  # latent attention has as many keys as queries
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    if known.get("mlp_layer_types") is not None:
        fields["mlp_layer_types"] = None
    if known.get("layer_types") is not None:
        fields["layer_types"] = None
    fields |= _OWN.get(text.model_type, {})
    if text is default:
        return fields
    return {next(key for key in default.sub_configs if getattr(default, key, None) is text): fields}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """In float32; the same weights every time. Raises whatever transformers does, and ValueError for what
    stays large."""
    fields, kind = shrunk(name), WITHOUT_RECURRENCE.get(name, (name,))[0]
    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    if (count := sketch.num_parameters()) > MOST:
        raise ValueError(f"{count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shrunk(name)))
    spread(model, seed)
    return model.float().eval()
