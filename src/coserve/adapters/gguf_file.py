"""Writes a LoRA adapter as GGUF, for llama.cpp's `--lora`: tensors by the names of the `gguf` package's own
tables, and the fields that llama.cpp reads of an adapter."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from coserve.adapters.bypass import Bypass, Side
from coserve.adapters.files import read_adapter
from coserve.adapters.gguf_architectures import ARCHITECTURES, GgufArchitecture, library, turned
from coserve.adapters.lowrank import LoRABypass, is_lora
from coserve.adapters.merge import WholeModel
from coserve.adapters.text_part import auto_class
from coserve.errors import AdapterError, ConfigError

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
    gguf, kind = library(), ARCHITECTURES.get(config.model_type)
    if kind is None:
        known = ", ".join(ARCHITECTURES)
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
        if kind.turns:
            b = turned(b, path, config)
        writer.add_tensor(f"{names[path]}.lora_a", own.a.contiguous().numpy())
        writer.add_tensor(f"{names[path]}.lora_b", b.contiguous().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return 2 * len(found)


def _plain(path: str, side: Side, bypass: Bypass, is_second: bool) -> LoRABypass:
    if not is_lora(bypass) or side is not Side.OUTPUT or is_second:
        raise AdapterError(f"GGUF holds one plain LoRA at a linear, and {path} has something else: {_MERGE}")
    if not bypass.scale:
        raise AdapterError(f"the adapter's scale at {path} is 0: it changes nothing there")
    return bypass


def _names(
    gguf: ModuleType, kind: GgufArchitecture, config: Any, paths: Mapping[str, object]
) -> dict[str, str]:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.name], config.num_hidden_layers)
    names = {path: table.get_name(f"{path}.weight", try_suffixes=(".weight",)) for path in paths}
    for path, name in names.items():
        if name is None or (name == "output.weight" and config.tie_word_embeddings):
            raise AdapterError(
                f"{path} has no weight of its own in GGUF files of {config.model_type}: {_MERGE}"
            )
    return names
