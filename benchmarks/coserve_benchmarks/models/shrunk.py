"""Small configurations of every causal language model of transformers, and of every multimodal one, made by
shrinking its default."""

from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCABULARY = 96
POSITIONS = 256
WINDOW = 20  # of the sliding attentions
NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = tuple(sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES))
MOST = 45_000_000  # parameters; what stays larger is not tried
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
# Of towers for images and sound, where the field is a number.
_TOWERS: dict[int, tuple[str, ...]] = {
    32: ("hidden_size", "embed_dim", "d_model", "width", "embedding_size", "hidden_dim"),
    2: (
        "num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers", "num_heads",
        "num_attention_heads", "n_heads", "heads", "encoder_attention_heads", "attention_heads",
    ),
    64: (
        "intermediate_size", "mlp_dim", "encoder_ffn_dim", "out_hidden_size", "projection_dim", "output_dim",
        "vision_output_dim", "projector_input_dim", "projector_output_dim", "text_hidden_size",
    ),
    28: ("image_size",),
    14: ("patch_size",),
}  # fmt: skip
_DROPOUTS = (
    "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "input_dropout",
    "hidden_dropout",
)  # fmt: skip
_FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * 3


_PADDED = {"pad_token_id": 1}  # from behind which positions count: no token of the texts is it
_HYBRID = ["linear_attention", "hybrid"] * 3


def _rope(*pairs: int) -> dict[str, Any]:
    """Pairs of a head's 8 (or of the part that turns) by time, height and width."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [*pairs]}


def _sections(*pairs: int) -> dict[str, Any]:
    return {"rope_parameters": _rope(*pairs)}


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    **{
        f"{name}_text": _sections(4, 2, 2)
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm_ocr", "paddleocr_vl")
    },
    "glm4v_moe_text": _sections(2, 1, 1),
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **_sections(3, 3, 2)},
    "cosmos3_edge_text": _sections(4, 2, 2),
    "hunyuan_vl_text": _sections(2, 2, 2, 2),
    "cohere_compass_text": {
        "layer_types": _FULL_AND_SLIDING,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _rope(4, 2, 2)),
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 1.0},
        "ffn_config": {"ffn_hidden_size": 80},
    },
    "longcat_flash": {
        "num_layers": 3,
        "head_dim": 8,
        "ffn_hidden_size": 80,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "attention_head_size": 16,
        "feed_forward_size": 80,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "zamba": {"layers_block_type": _HYBRID, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "zamba2": {
        "layers_block_type": _HYBRID[:4],
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "head_dim": 32,
        "num_key_value_heads": 4,
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4, "index_kpool": 4},
    "molmo2_adapter": {
        "vision_feature_layer": [1, 0],
        "hidden_size": 32,
        "head_dim": 16,
        "num_key_value_heads": 2,
    },
    "molmo2": {"hidden_size": 32, "head_dim": 16, "num_key_value_heads": 2},
    "muse_spark_text": {"moe_hidden_size": 32},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 64, "hidden_size": 32},
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 64, "embed_dim": 8},
    "radio": {"video_temporal_patch_size": 2},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 16, 32], "out_hidden_size": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3, **_MAMBA},
    "bamba": {"attn_layer_indices": [1, 4], **_MAMBA},
    "falcon_h1": _MAMBA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"] * 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "jamba": {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "step3p5": {"sliding_window": 64},  # in masks alone, which limits sequences
    **{
        f"{name}roberta{kind}": _PADDED
        for name, kind in (("", ""), ("", "-prelayernorm"), ("xlm-", ""), ("xlm-", "-xl"))
    },
    "camembert": _PADDED,
    "data2vec-text": _PADDED,
    "xmod": {**_PADDED, "default_language": "en_XX", "languages": ["en_XX"]},
    "big_bird": {"attention_type": "original_full"},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"hidden_size": 128},  # its cache rounds the width of keys up to 64, its layers do not
    "gemma3n_text": {"layer_types": _FULL_AND_SLIDING, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {"layer_types": _FULL_AND_SLIDING},
    "gemma4_unified_text": {"layer_types": _FULL_AND_SLIDING},
    "olmo": {"clip_qkv": 0.4},
    "olmoe": {"clip_qkv": 0.4},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}
_IMAGE = {"vocabulary_map": {"<image>": 5}}
_OF_WHOLES: dict[str, dict[str, Any]] = {
    "chameleon": _IMAGE,
    "emu3": _IMAGE,
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [1, 2],
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28, "patch_size": 14,
        },
    },
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
        },
    },
}  # fmt: skip
# Models whose types have recurrent layers, and these have none; and positions by ALiBi.
_FULL = {"layer_types": ["full_attention"] * 6}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid dense": ("granitemoehybrid", {**_FULL, "num_local_experts": 0}),
    "granitemoehybrid experts": ("granitemoehybrid", _FULL),
    "jamba attention": ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    "falcon alibi": ("falcon", {"alibi": True, "multi_query": False}),
    **{
        f"{name} attention": (name, _FULL)
        for name in (
            "lfm2",
            "lfm2_moe",
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
        )
    },
}


def shrunk(name: str) -> dict[str, Any]:
    """Fields of a small configuration of `name`; those of its text model where it has several."""
    if name in VARIANTS:
        name, own = VARIANTS[name]
        return shrunk(name) | own
    default = CONFIG_MAPPING[name]()
    text = default.get_text_config()
    parts = {key: getattr(default, key, None) for key in default.sub_configs}
    fields: dict[str, Any] = {
        key: {"model_type": part.model_type} | (_text_fields(part) if part is text else _tower_fields(part))
        for key, part in parts.items()
        if part is not None
    }
    if text is default:
        fields |= _text_fields(text)
    return fields | _OF_WHOLES.get(name, {})


def _tower_fields(tower: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a small tower for images or sound, which no text passes."""
    names = tower.to_dict().keys() | getattr(tower, "attribute_map", {}).keys()
    given = {f: size for size, of in _TOWERS.items() for f in of if f in names}
    numbers = {f: size for f, size in given.items() if isinstance(getattr(tower, f, None), int | None)}
    return numbers | _OWN.get(tower.model_type, {})


def _text_fields(text: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a small language model."""
    known = text.to_dict()
    names = known.keys() | getattr(text, "attribute_map", {}).keys()
    fields: dict[str, Any] = {f: size for size, of in _SIZES.items() for f in of if f in names}
    fields |= {field: 0.0 for field in _DROPOUTS if field in names}
    if known.get("sliding_window") is None:
        fields.pop("sliding_window", None)
    if known.get("kv_lora_rank"):  # latent attention has as many keys as queries
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    if text.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "rembert"):
        fields["is_decoder"] = True  # as transformers' causal class of an encoder asks for
    if known.get("mlp_layer_types") is not None:
        fields["mlp_layer_types"] = None
    if known.get("layer_types") is not None:
        fields["layer_types"] = None
    return fields | _OWN.get(text.model_type, {})


def kind_of(name: str) -> str:
    """transformers' type of a model of this name."""
    return VARIANTS.get(name, (name,))[0]


def auto_class(kind: str) -> Any:
    """transformers' class that makes a model of this type, a multimodal one as a whole."""
    return AutoModelForMultimodalLM if kind in MULTIMODAL else AutoModelForCausalLM


def build(name: str, seed: int = 0, most: int = MOST, **changes: Any) -> PreTrainedModel:
    """In float32; the same weights every time. Raises whatever transformers does, and ValueError for what
    stays larger than `most` parameters."""
    fields, kind = shrunk(name) | changes, kind_of(name)
    auto = auto_class(kind)
    with torch.device("meta"):
        sketch = auto.from_config(AutoConfig.for_model(kind, **fields))
    if (count := sketch.num_parameters()) > most:
        raise ValueError(f"{count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(AutoConfig.for_model(kind, **(shrunk(name) | changes)))
    spread(model, seed)
    return model.float().eval()


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Weights that make answers depend on their prompts; biases, norms and sinks that are not 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.1 * noise)
