"""Reads and writes adapter files, `adapter_config.json` and `adapter_model.safetensors`, in PEFT's format.

Unsupported fields that would change the result are refused by name, and so are unused tensors. An adapter of
several parts, which PEFT lacks, has the type COSERVE_LIST: `parts` are the configurations of its parts, and
the names of part n's tensors begin with `n:`.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Part, exact_type
from coserve.adapters.folder import CONFIG as CONFIG
from coserve.adapters.folder import WEIGHTS as WEIGHTS
from coserve.adapters.folder import unreadable
from coserve.adapters.method import Written
from coserve.adapters.methods import method_named, reader_of
from coserve.adapters.parameters import mistaken, name_weights
from coserve.adapters.replace import copies_of
from coserve.adapters.saved import TYPES, Saved, expect_numbers, shown
from coserve.adapters.sites import Frame
from coserve.adapters.spelling import renaming_of, with_own_names
from coserve.errors import AdapterError

_LIST: Final = "COSERVE_LIST"
# Of indices, and of tensors that are refused by the names of their types.
_OTHER_TYPES: Final = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_LONGEST_NAME: Final = 300  # characters; those of real models have a third of that
_TASKS: Final = (
    None,
    "CAUSAL_LM",
    "SEQ_CLS",
    "SEQ_2_SEQ_LM",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "FEATURE_EXTRACTION",
)
_BEYOND_WEIGHTS: Final = ("use_dora", "lora_bias")  # that PEFT has beside modules only


def read_adapter(
    folder: str | Path,
    name: str,
    frame: Frame,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[Path], Mapping[str, Tensor]] = load_file,
    rest: Callable[[], None] = lambda: None,
) -> AdapterVersion:
    """The adapter in `folder` as version 0 of `name`, on `device`, for a base in `dtype`.

    The weights from `load` are copied. `rest` is called between pieces of work.

    Raises AdapterError for unreadable files, AdapterMismatch for adapters that do not fit the base.
    """
    folder = Path(folder)
    fields = _read_fields(folder / CONFIG)
    try:
        tensors = load(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise unreadable(folder / WEIGHTS, error) from error
    # A tensor that is in its type already still lies in the file, which somebody may write to.
    exact = _assemble(name, folder, fields, tensors, frame, dtype, device, rest)
    return replace(exact, parts=tuple(part.in_type(dtype, copy=True, rest=rest) for part in exact.parts))


def read_outline(folder: str | Path, name: str, frame: Frame, dtype: torch.dtype) -> AdapterVersion:
    """Reads an adapter as `read_adapter` does, but without weights: its tensors have no values.

    Raises what `read_adapter` does, except for errors of values.
    """
    folder = Path(folder)
    fields = _read_fields(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            tensors = {name: _without_values(one) for name, one in slices.items()}
    except (OSError, SafetensorError) as error:
        raise unreadable(folder / WEIGHTS, error) from error
    return _assemble(name, folder, fields, tensors, frame, dtype, torch.device("meta")).in_type(dtype)


def check_weights(folder: str | Path, name: str, frame: Frame, dtype: torch.dtype) -> None:
    """Raises AdapterError where weights in `folder`, or their products, are not finite in a base of `dtype`.
    Holds one tensor in memory at a time, and the copies of embeddings that a file may have."""
    folder = Path(folder)
    peaks, copies = {}, copies_of(frame)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            renaming = renaming_of(file.keys(), frame.modules)
            for tensor_name in file.keys():  # noqa: SIM118  # no mapping
                tensor = file.get_tensor(tensor_name)
                expect_numbers(str(folder), tensor_name, tensor, torch.finfo(dtype).max)
                own_name = tensor_name if renaming is None else renaming.tensor(tensor_name)
                is_copy = own_name in copies  # which is compared value by value
                peaks[tensor_name] = tensor if is_copy else _peaks(tensor, exact_type(dtype))
    except (OSError, SafetensorError) as error:
        raise unreadable(folder / WEIGHTS, error) from error
    _assemble(name, folder, _read_fields(folder / CONFIG), peaks, frame, dtype, torch.device("cpu"))


def _assemble(
    name: str,
    folder: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    frame: Frame,
    dtype: torch.dtype,
    device: torch.device,
    rest: Callable[[], None] = lambda: None,
    is_known: bool = False,
) -> AdapterVersion:
    """The adapter of a file's fields and tensors, in the exact type of a base in `dtype`. Numbers beyond
    `dtype`, and NaN, are refused, unless the adapter `is_known`."""
    for longest in (max(names, key=len, default="") for names in (fields, tensors)):
        if len(longest) > _LONGEST_NAME:
            raise AdapterError(
                f"{folder}: a name of {len(longest)} characters begins with {longest[:_LONGEST_NAME]!r}; "
                f"fields and tensors have names of up to {_LONGEST_NAME}"
            )
    parts = []
    for own_fields, own_tensors in _split(fields, tensors, folder):
        reader, largest = reader_of(own_fields.get("peft_type")), torch.finfo(dtype).max
        if (task := own_fields.get("task_type")) not in _TASKS:
            raise AdapterError(f"{folder}: task_type={shown(task)} is none of PEFT's")
        if not own_tensors:
            raise AdapterError(f"{folder / WEIGHTS} holds no tensors of its {reader.peft_type} adapter")
        named = with_own_names(str(folder), own_fields, own_tensors, frame.modules)
        saved = Saved(str(folder), *named, exact_type(dtype), device, largest, rest, is_known)
        parts.append(reader.read(saved, frame))
        saved.finish()
    return AdapterVersion(name, 0, tuple(parts))


def _peaks(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The absolute maxima along the longest dimension, expanded to the tensor's shape without copies."""
    if not tensor.is_floating_point() or not tensor.numel() or not tensor.ndim:
        return tensor
    longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
    return tensor.abs().amax(longest, keepdim=True).to(dtype).expand(tensor.shape)


def _without_values(one: Any) -> Tensor:
    """A tensor without values in the shape and type of a slice of safetensors."""
    dtype = ({**TYPES, **_OTHER_TYPES}).get(one.get_dtype(), torch.int8)
    return torch.empty(one.get_shape(), dtype=dtype, device="meta")


def write_adapter(
    adapter: AdapterVersion,
    folder: str | Path,
    base_name: str = "",
    model_type: str = "",
    whole: bool = False,
) -> None:
    """Writes an adapter for PEFT's `from_pretrained` beside a base of this type; tensors in float32 (float64
    ones stay).

    With `whole` also tensors that only training needs, such as prompt encoders. Warns where PEFT is known to
    read the files otherwise.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = _written(adapter, base_name, model_type, whole)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter version as bytes: the contents of its two files, with all that training needs. `is_exact`:
    its tensors are in the type of master weights."""

    name: str
    version: int
    config: bytes
    weights: bytes
    is_exact: bool


def pack_adapter(adapter: AdapterVersion, dtype: torch.dtype) -> PackedAdapter:
    """Packs an adapter of a base in `dtype`."""
    config, tensors = _written(adapter, whole=True)
    is_exact = all(tensor.dtype == exact_type(dtype) for tensor in adapter.parameters().values())
    return PackedAdapter(adapter.name, adapter.version, json.dumps(config).encode(), save(tensors), is_exact)


def unpack_adapter(
    packed: PackedAdapter, frame: Frame, dtype: torch.dtype, device: torch.device
) -> AdapterVersion:
    """Unpacks an adapter to `device` for a base in `dtype`. Raises AdapterMismatch where it does not fit the
    base."""
    fields, tensors = json.loads(packed.config), dict(sorted(load(packed.weights).items()))
    # Its numbers were looked at when it came in, if it was read from files.
    found = _assemble(packed.name, Path(packed.name), fields, tensors, frame, dtype, device, is_known=True)
    found = replace(found, version=packed.version)
    return found.in_type(exact_type(dtype) if packed.is_exact else dtype, copy=True)


def _written(
    adapter: AdapterVersion, base_name: str = "", model_type: str = "", whole: bool = False
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an adapter's two files."""
    written = [method_named(part.method).write(part) for part in adapter.parts]
    if whole:
        written = [replace(w, tensors={**w.tensors, **w.own}) for w in written]
    elif len(written) == 1 and adapter.parts[0].method == "lora":
        written = [replace(written[0], fields=_as_peft_reads(written[0].fields, model_type))]
    configs = [_config(part, w, base_name) for part, w in zip(adapter.parts, written, strict=True)]
    if len(written) == 1:
        tensors, config = dict(written[0].tensors), configs[0]
    else:
        tensors = {f"{n}:{name}": t for n, w in enumerate(written) for name, t in w.tensors.items()}
        config = {"peft_type": _LIST, "base_model_name_or_path": base_name, "parts": configs}
    return config, {n: _plain(t) for n, t in tensors.items()}


def _config(part: Part, written: Written, base_name: str) -> dict[str, Any]:
    return {
        "peft_type": method_named(part.method).peft_type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        **written.fields,
    }


def _plain(tensor: Tensor) -> Tensor:
    kind = exact_type(tensor.dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind).contiguous().clone()


def _read_fields(file: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError too
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{file} holds no configuration")
    return fields


def _split(
    fields: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> list[tuple[Mapping[str, Any], Mapping[str, Tensor]]]:
    """Fields and tensors of each part."""
    if fields.get("peft_type") != _LIST:
        return [(fields, tensors)]
    configs = fields.get("parts")
    if not isinstance(configs, list) or not configs or not all(isinstance(c, dict) for c in configs):
        raise AdapterError(f"{folder / CONFIG}: parts must be the configurations of the adapter's parts")
    by_part: dict[str, dict[str, Tensor]] = {str(number): {} for number in range(len(configs))}
    for name, tensor in tensors.items():
        number, colon, own = name.partition(":")
        if not colon or number not in by_part:
            raise AdapterError(f"{folder / WEIGHTS}: tensor {name!r} belongs to none of the parts")
        by_part[number][own] = tensor
    return list(zip(configs, by_part.values(), strict=True))


def _as_peft_reads(fields: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """A LoRA adapter's fields, with targets that PEFT would misread named by their weights."""
    found = mistaken(model_type, fields["target_modules"])
    if not found:
        return fields
    if beyond := [name for name in _BEYOND_WEIGHTS if fields[name]]:
        warnings.warn(
            f"PEFT (0.21.2) takes targets such as {found[0]} of {model_type} for fused experts, and has no "
            f"{beyond[0]} beside weights: it reads this adapter as something else. coserve reads it as it "
            f"is; for PEFT, leave out the linears of shared experts and dense layers, or {beyond[0]}.",
            stacklevel=4,
        )
        return fields
    return name_weights(fields, found)
