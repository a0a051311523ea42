"""The form of a checkpoint, by its configuration and the names of its tensors."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedConfig

from coserve.errors import UnsupportedModel
from coserve.model.dequantized.bitsandbytes import BitsAndBytesForm
from coserve.model.dequantized.compressed import CompressedForm
from coserve.model.dequantized.form import Form
from coserve.model.dequantized.groups import AWQForm, GPTQForm
from coserve.model.dequantized.mxfp4 import MXFP4Form
from coserve.model.dequantized.scaled import ScaledForm, scaled_names

READABLE: Final = "FP8, MXFP4, AWQ, GPTQ, bitsandbytes, compressed-tensors"
_FIELD: Final = "quantization_config"
_COMPRESSED: Final = {
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
}  # fmt: skip


def quantized_fields(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a configuration that says how its weights were quantized; None where they were not."""
    text = fields.get("text_config")
    for own in (fields, text if isinstance(text, dict) else {}):
        if own.get(_FIELD):
            found = own[_FIELD]
            return found if isinstance(found, dict) else {}
    return None


def is_readable(found: Mapping[str, Any]) -> bool:
    """Tells whether weights that were saved so can be read."""
    try:
        form_for(found, ())
    except UnsupportedModel:
        return False
    return True


def form_for(found: Mapping[str, Any], names: Collection[str]) -> Form:
    """The form of a checkpoint with tensors of these names. Raises UnsupportedModel."""
    method, bits = found.get("quant_method"), found.get("bits")
    scaled = ScaledForm(str(method), scaled_names(names), _block(found))
    if method == "mxfp4":
        return MXFP4Form()
    if method == "bitsandbytes":
        return BitsAndBytesForm(names)
    if method == "awq" and bits == 4 and str(found.get("version", "gemm")).lower() == "gemm":
        return AWQForm()
    if method == "gptq" and bits in (2, 4, 8):
        return GPTQForm(bits, 0 if found.get("checkpoint_format") == "gptq_v2" else 1)
    if method == "compressed-tensors" and (packed_bits := _packed_bits(found)):
        packed = {name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")}
        return CompressedForm(packed_bits, scaled, packed)
    if method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and found.get("quant_algo") == "FP8"):
        return scaled
    raise UnsupportedModel(f"weights saved as {method!r} are not read, but those saved as {READABLE} are")


def as_dense(config: PreTrainedConfig) -> PreTrainedConfig:
    """Has a configuration describe the model as it is once its weights are read: they are of its own type,
    or of bfloat16 where it has none. Returns it."""
    if quantized_fields(config.to_dict()) is not None:
        for own in (config, config.get_text_config()):
            if getattr(own, _FIELD, None) is not None:
                delattr(own, _FIELD)
        if config.dtype is None:
            config.dtype = torch.bfloat16
    return config


def _block(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """Sizes of blocks of FP8, where the configuration says them."""
    match found.get("weight_block_size"):
        case [int(out), int(inputs)] if out > 0 and inputs > 0:
            return out, inputs
    return None


def _packed_bits(found: Mapping[str, Any]) -> int:
    """Bits of the packed integers of compressed-tensors; 0 where they are of no form, or of several."""
    if found.get("format") not in _COMPRESSED or _is_sparse(found):
        return 0
    groups = found.get("config_groups")
    every = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    bits = [own.get("num_bits") for own in every]
    return next((n for n in (2, 4, 8) if bits and all(own == n for own in bits)), 0)


def _is_sparse(found: Mapping[str, Any]) -> bool:
    own = found.get("sparsity_config")
    return isinstance(own, dict) and own.get("format", "dense") != "dense"
