"""An adapter written into its base's weights: a model of its own, for whoever cannot load adapters."""

import shutil
from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.adapters.files import read_adapter
from coserve.adapters.methods.lora import LoRABypass
from coserve.errors import AdapterError, ModelNotFound

# What else a folder holds that the model is of no use without.
_COPIED: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "chat_template*",
)  # fmt: skip


def merge_adapter(model_folder: str | Path, adapter_folder: str | Path, out: str | Path) -> Path:
    """Writes the model in `model_folder` with the LoRA adapter in `adapter_folder` merged into `out`.

    Weights are added up in float32 (float64 ones in float64) and keep the type the model was saved in.
    Returns `out`. Raises ModelNotFound, AdapterMismatch, or AdapterError, also where `out` holds something.
    """
    model_folder, out = Path(model_folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AdapterError(f"{out} exists already and is not empty: nothing is merged over it")
    model = _load(model_folder)
    linears = _linears(model)
    shapes = {path: _shape(linear) for path, linear in linears.items()}
    adapter = read_adapter(adapter_folder, "merged", shapes, torch.float64, torch.device("cpu"))
    for path, bypass in adapter.bypasses.items():
        _add(linears[path], bypass, path)
    model.save_pretrained(out)
    for pattern in _COPIED:
        for file in model_folder.glob(pattern):
            shutil.copy2(file, out / file.name)
    return out


def _load(folder: Path) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{str(folder)!r} is no folder with a model: it has no config.json")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"{str(folder)!r} holds no causal language model: {error}") from error
    return model


def _linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Linears an adapter may stand beside. A head that shares its weight with the embedding is none of them:
    what is added to one would be added to both."""
    embedding = model.get_input_embeddings().weight
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and module.weight is not embedding
    }


def _shape(linear: nn.Module) -> tuple[int, int]:
    assert isinstance(linear.weight, torch.Tensor)
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, Conv1D) else (rows, columns)


@torch.no_grad()
def _add(linear: nn.Module, bypass: LoRABypass, path: str) -> None:
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    exact = torch.promote_types(weight.dtype, torch.float32)
    delta = bypass.scale * (bypass.b.to(exact) @ bypass.a.to(exact))
    merged = weight.to(exact) + (delta.t() if isinstance(linear, Conv1D) else delta)
    if not bool(merged.isfinite().all()):
        raise AdapterError(f"{path}: the adapter's matrices are not all finite numbers")
    weight.copy_(merged)
