"""PEFT's adapter files, both ways: `adapter_config.json` and `adapter_model.safetensors`.

Whatever would change the result and is not honoured here is refused by name, and so is every tensor that
would go unused.
"""

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.methods.lora import LoRABypass, LoRAConfig
from coserve.errors import AdapterError, AdapterMismatch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT fields that change what the adapter computes, and the values that mean "not used".
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "alpha_pattern": ({}, None),
    "arrow_config": (None,),
    "bias": ("none",),
    "corda_config": (None,),
    "lora_bias": (False, None),
    "loftq_config": ({}, None),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_dora": (False,),
    "use_qalora": (False, None),
}

_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})

Shapes = Mapping[str, tuple[int, int]]  # (out, in) of the linears an adapter may stand beside, by path


def read_adapter(
    folder: str | Path, name: str, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> AdapterVersion:
    """The LoRA adapter in `folder` as version 0 of `name`, its matrices in `dtype` on `device`.

    Raises AdapterError for files that cannot be read, AdapterMismatch for what does not fit the base.
    """
    folder = Path(folder)
    config = _read_config(folder)
    try:
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder / _WEIGHTS} cannot be read: {error}") from error
    bypasses = {}
    for path, (a, b) in _pairs(tensors, folder).items():
        _check_shapes(path, a, b, shapes)
        moved = [t.to(device=device, dtype=dtype) for t in (a, b)]
        bypasses[path] = LoRABypass(moved[0], moved[1], config.scale(a.shape[0]))
    if not bypasses:
        raise AdapterError(f"{folder / _WEIGHTS} holds no LoRA matrices")
    return AdapterVersion(name, 0, config, bypasses)


def write_adapter(adapter: AdapterVersion, folder: str | Path, base_name: str = "") -> None:
    """Writes what PEFT's `from_pretrained` reads; matrices in float32 (float64 ones stay as they are).

    Warns where PEFT is known to read something else.
    """
    if (path := _misread(adapter.bypasses)) is not None:
        warnings.warn(
            f"PEFT (0.21.2) takes targets such as {path} for fused experts: it loads this adapter without a "
            "complaint and computes something else. coserve reads it as it is; for PEFT, leave out the "
            "linears of shared experts and dense layers.",
            stacklevel=2,
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, bypass in adapter.bypasses.items():
        for letter, matrix in zip("AB", bypass.parameters(), strict=True):
            exact = torch.promote_types(matrix.dtype, torch.float32)
            tensors[f"{_PREFIX}{path}.lora_{letter}.weight"] = matrix.detach().to("cpu", exact).contiguous()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": adapter.config.dropout,
        "use_rslora": adapter.config.rslora,
        "bias": "none",
        "target_modules": sorted(adapter.bypasses),
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _misread(paths: Iterable[str]) -> str | None:
    """A target that PEFT mistakes: named like the routed experts', where shared ones are targets too."""
    found = [path for path in paths if path.rpartition(".")[2] in _EXPERTS]
    return min(found) if any(".shared_expert" in path for path in found) else None


def _read_config(folder: Path) -> LoRAConfig:
    try:
        fields = json.loads((folder / _CONFIG).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterError(f"{folder / _CONFIG} cannot be read: {error}") from error
    kind = fields.get("peft_type") if isinstance(fields, dict) else None
    if kind != "LORA":
        raise AdapterError(f"{folder / _CONFIG}: peft_type {kind!r} is not supported, only LORA")
    for field, unused in _UNUSED.items():
        if field in fields and fields[field] not in unused:
            raise AdapterError(f"{folder / _CONFIG}: {field}={fields[field]!r} is not supported")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init != "gaussian":
        raise AdapterError(f"{folder / _CONFIG}: init_lora_weights={init!r} changes the base's weights")
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(
            f"{folder / _CONFIG}: r and lora_alpha must be numbers, not {rank!r} and {alpha!r}"
        )
    return LoRAConfig(
        rank=rank,
        alpha=float(alpha),
        dropout=float(fields.get("lora_dropout") or 0.0),
        rslora=bool(fields.get("use_rslora")),
    )


def _pairs(tensors: dict[str, Tensor], folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by linear; anything else in the file would go unused."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, dot, letter = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if not dot or letter not in ("A", "B") or not name.startswith(_PREFIX) or tensor.ndim != 2:
            raise AdapterMismatch(
                f"{folder / _WEIGHTS}: tensor {name!r} {tuple(tensor.shape)} would go unused"
            )
        matrices.setdefault(path, {})[letter] = tensor
    for path, pair in matrices.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise AdapterMismatch(f"{folder / _WEIGHTS}: {_PREFIX}{path}.lora_{missing}.weight is missing")
    return {path: (pair["A"], pair["B"]) for path, pair in matrices.items()}


def _check_shapes(path: str, a: Tensor, b: Tensor, shapes: Shapes) -> None:
    if path not in shapes:
        raise AdapterMismatch(
            f"the adapter stands beside {path!r}, but the base has no such linear in its layers"
        )
    out_features, in_features = shapes[path]
    rank = a.shape[0]
    if rank < 1 or a.shape != (rank, in_features) or b.shape != (out_features, rank):
        raise AdapterMismatch(
            f"{path}: the base's linear is {in_features} -> {out_features}, but the adapter's A is "
            f"{tuple(a.shape)} and its B {tuple(b.shape)}"
        )
