"""Writes a model with an adapter merged into its weights as one GGUF file, for llama.cpp."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coserve.adapters.gguf_architectures import ARCHITECTURES, GgufArchitecture, library, turned
from coserve.adapters.gguf_vocabulary import add_vocabulary
from coserve.adapters.merge import merged_model
from coserve.errors import AdapterError, ConfigError

OUTTYPES: Final = ("auto", "f32", "f16", "bf16", "q8_0")
_OWN: Final = {torch.float16: "f16", torch.bfloat16: "bf16"}  # others are written as f32
_PATTERN: Final = {"GEMMA2": 2, "GEMMA3": 6}  # one layer of so many has no sliding window


def write_merged_gguf(
    model_folder: str | Path,
    adapter_folder: str | Path,
    out: str | Path,
    outtype: str = "auto",
    weights_only: bool = False,
) -> int:
    """Writes the model in `model_folder`, with the adapter in `adapter_folder` merged into it, to the file
    `out`; with the tokenizer and the chat template unless `weights_only`. Returns the number of tensors.

    Matrices are of the type `outtype`: one of OUTTYPES, of which `auto` is the type of the model's weights.
    Vectors are f32, and a matrix that has no whole blocks for q8_0 is f16. Raises what `merge_adapter` does,
    also for what GGUF has no place for, and ConfigError without the `gguf` package or where `out` exists.
    """
    model_folder, out = Path(model_folder), Path(out)
    if outtype not in OUTTYPES:
        raise ConfigError(f"the outtype is one of {', '.join(OUTTYPES)}, not {outtype!r}")
    if out.exists():
        raise ConfigError(f"{out} exists already: nothing is written over it")
    gguf = library()
    model = merged_model(model_folder, adapter_folder)
    config = model.config
    kind = ARCHITECTURES.get(config.model_type)
    if kind is None or not kind.whole:
        known = ", ".join(name for name, one in ARCHITECTURES.items() if one.whole)
        raise AdapterError(f"models of {config.model_type} are not written as GGUF, but those of {known}")
    outtype = _OWN.get(model.dtype, "f32") if outtype == "auto" else outtype
    partial = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind.name]])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_folder.name)
    by_outtype = (
        gguf.LlamaFileType.ALL_F32 if outtype == "f32" else gguf.LlamaFileType[f"MOSTLY_{outtype.upper()}"]
    )
    writer.add_file_type(by_outtype)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_fields(writer, gguf, kind, config)
    if weights_only:
        writer.add_tokenizer_model("none")
    else:
        add_vocabulary(writer, gguf, model_folder, config.vocab_size)
    try:
        count = _write(writer, gguf, _tensors(model, gguf, kind), outtype)
        writer.close()
        partial.rename(out)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return count


def _write(writer: Any, gguf: ModuleType, tensors: dict[str, Tensor], outtype: str) -> int:
    """Writes the header, and the tensors one after the other, so that one of them is converted at a time."""
    types = {name: _type(gguf, tensor, outtype) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[types[name]]
        writer.add_tensor_info(
            name, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, types[name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        numbers = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        if types[name] is gguf.GGMLQuantizationType.F16 and np.abs(numbers).max() > np.finfo(np.float16).max:
            raise AdapterError(f"{name} has numbers beyond those of float16: choose another outtype")
        writer.write_tensor_data(gguf.quantize(numbers, types[name]))
    return len(tensors)


def _type(gguf: ModuleType, tensor: Tensor, outtype: str) -> Any:
    types = gguf.GGMLQuantizationType
    if tensor.dim() == 1:
        return types.F32
    if outtype == "q8_0" and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[types.Q8_0][0]:
        return types.F16
    return types[outtype.upper()]


def _tensors(model: PreTrainedModel, gguf: ModuleType, kind: GgufArchitecture) -> dict[str, Tensor]:
    """The model's tensors as GGUF has them, by their names there."""
    config = model.config
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.name], config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (name := table.get_name(own, try_suffixes=(".weight", ".bias"))) is None:
            raise AdapterError(f"{own} has no place in GGUF files of {config.model_type}")
        if kind.turns:
            tensor = turned(tensor, own.rpartition(".")[0], config)
        if kind.centred and own.endswith("norm.weight"):
            tensor = tensor.float() + 1
        found[name] = tensor
    if (factors := _frequency_factors(model)) is not None:
        found["rope_freqs.weight"] = factors
    return found


def _add_fields(writer: Any, gguf: ModuleType, kind: GgufArchitecture, config: Any) -> None:
    """Adds what llama.cpp reads of a model's configuration. Raises AdapterError for what it would compute
    otherwise."""
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    if kind.name in _PATTERN:
        writer.add_sliding_window(window)
    elif window:  # there are none in this architecture: up to this length a model with them gives the same
        length = min(length, window)
    writer.add_context_length(length)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if kind.name == "GEMMA2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping or 0.0)
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    for refused in _otherwise(kind, config, width):
        raise AdapterError(
            f"llama.cpp has no {config.model_type} with {refused}: it would compute something else"
        )


def _otherwise(kind: GgufArchitecture, config: Any, width: int) -> Iterator[str]:
    """Settings of a configuration that llama.cpp takes to be otherwise, each in words."""
    rope = config.rope_parameters
    types = {one["rope_type"] for one in (rope.values() if "full_attention" in rope else [rope])}
    known = {"default", "linear", "llama3"} - ({"llama3"} if kind.name in _PATTERN else set())
    if unknown := types - known:
        yield f"positions of the type {min(unknown)}"
    if "sliding_attention" in rope and rope["sliding_attention"]["rope_type"] != "default":
        yield "scaled positions in its sliding windows"
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != ("gelu_pytorch_tanh" if kind.centred else "silu"):
        yield f"the activation {activation}"
    if pattern := _PATTERN.get(kind.name):
        sliding = [bool((layer + 1) % pattern) for layer in range(config.num_hidden_layers)]
        if [one == "sliding_attention" for one in config.layer_types] != sliding:
            yield f"other sliding windows than in all but each {pattern}th layer"
        if config.query_pre_attn_scalar != width:
            yield f"queries scaled by {config.query_pre_attn_scalar} and not by the width of a head, {width}"
        capped = config.attn_logit_softcapping, config.final_logit_softcapping
        if (None in capped) if kind.name == "GEMMA2" else (capped != (None, None)):
            yield f"caps of logits {capped}"


def _frequency_factors(model: PreTrainedModel) -> Tensor | None:
    """By what each of the rotary frequencies is divided, where they are scaled as Llama 3's are."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    scaled: Tensor = model.get_decoder().rotary_emb.inv_freq
    width = 2 * len(scaled)
    plain = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    factors: Tensor = (plain / scaled.double()).float()
    return factors
