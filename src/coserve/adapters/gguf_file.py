"""Writes a LoRA adapter as GGUF, for llama.cpp's `--lora`: tensors by the names of the `gguf` package's own
tables, and the fields that llama.cpp reads of an adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Side
from coserve.adapters.files import read_adapter
from coserve.adapters.lowrank import LoRABypass, is_lora
from coserve.adapters.merge import WholeModel
from coserve.adapters.text_part import auto_class
from coserve.errors import AdapterError, ConfigError


@dataclass(frozen=True, slots=True)
class _Architecture:
    """`name` of an architecture of GGUF. Where `turns`, rows of the projections of queries and keys are in
    another order there, as llama.cpp rotates neighbours and transformers halves."""

    name: str
    turns: bool = False


# By transformers' type of models: those whose linears have one tensor each in both.
_KINDS: Final[Mapping[str, _Architecture]] = MappingProxyType({
    "llama": _Architecture("LLAMA", True),
    "mistral": _Architecture("LLAMA", True),
    "smollm3": _Architecture("SMOLLM3", True),
    "granite": _Architecture("GRANITE", True),
    "qwen2": _Architecture("QWEN2"),
    "qwen3": _Architecture("QWEN3"),
    "olmo2": _Architecture("OLMO2"),
    "gemma2": _Architecture("GEMMA2"),
    "gemma3_text": _Architecture("GEMMA3"),
})  # fmt: skip
_MERGE: Final = "merge it into its base with `coserve adapters merge`"


def write_gguf(adapter_folder: str | Path, config: Any, out: str | Path) -> int:
    """Writes the adapter of a folder, for a base with this configuration, of which no weights are needed, to
    the file `out`. Numbers are float32, as they are in the folder. Returns the number of tensors.

    Raises AdapterError for what GGUF has no place for, AdapterMismatch for another base, and ConfigError
    without the `gguf` package or where `out` exists.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already: nothing is written over it")
    gguf, kind = _library(), _KINDS.get(config.model_type)
    if kind is None:
        known = ", ".join(_KINDS)
        raise AdapterError(f"adapters of {config.model_type} are not written as GGUF, but those of {known}")
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    adapter = read_adapter(adapter_folder, "exported", WholeModel(model), torch.float32, torch.device("cpu"))
    found: dict[str, LoRABypass] = {}
    for place, bypass in adapter.placed():
        found[place.path] = _plain(place.path, place.side, bypass, place.path in found)
    names = _names(gguf, kind, config, found)
    # llama.cpp multiplies by alpha / rank, with one alpha for all: other scales are written into B.
    alpha = next((own.scale * len(own.a) for own in found.values()), 1.0)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind.name]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for path, own in found.items():
        b = own.b * (own.scale * len(own.a) / alpha)
        if kind.turns and (heads := _heads(path, config)):
            b = neighbours(b, heads)
        writer.add_tensor(f"{names[path]}.lora_a", own.a.contiguous().numpy())
        writer.add_tensor(f"{names[path]}.lora_b", b.contiguous().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return 2 * len(found)


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows [out, ...] in the order in which the two that are rotated together are neighbours, from that in
    which they are in the two halves of a head."""
    halves = rows.view(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _plain(path: str, side: Side, bypass: Bypass, is_second: bool) -> LoRABypass:
    if not is_lora(bypass) or side is not Side.OUTPUT or is_second:
        raise AdapterError(f"GGUF holds one plain LoRA at a linear, and {path} has something else: {_MERGE}")
    if not bypass.scale:
        raise AdapterError(f"the adapter's scale at {path} is 0: it changes nothing there")
    return bypass


def _names(gguf: ModuleType, kind: _Architecture, config: Any, paths: Mapping[str, object]) -> dict[str, str]:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.name], config.num_hidden_layers)
    names = {path: table.get_name(f"{path}.weight", try_suffixes=(".weight",)) for path in paths}
    for path, name in names.items():
        if name is None or (name == "output.weight" and config.tie_word_embeddings):
            raise AdapterError(
                f"{path} has no weight of its own in GGUF files of {config.model_type}: {_MERGE}"
            )
    return names


def _heads(path: str, config: Any) -> int:
    """Heads of a projection of queries or keys; 0 for another linear."""
    if path.endswith("q_proj"):
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if path.endswith("k_proj") else 0


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF needs the extra gguf: pip install 'coserve[gguf]'") from error
    module: ModuleType = gguf
    return module
