"""Reads the configuration of a foreign model, and refuses what would take hours or all memory to load.

A few numbers in a configuration decide how many modules transformers makes and how large their tables are. A
folder's tensors tell which numbers are true: layers have tensors, and widths are dimensions of them. Where
all numbers are such, the model is loaded; where some are not, its modules are first made in a sandbox, on the
meta device.
"""

import json
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from coserve.errors import CoserveError, LimitExceeded, ModelError, ModelNotFound
from coserve.model.dequantized.forms import is_readable, quantized_fields
from coserve.model.hub import check_hub
from coserve.model.refusal import refuse_kind, refuse_layers, refuse_quantized, told_by
from coserve.sandbox.process import Sandbox

LARGEST_CONFIG: Final = 16 << 20  # bytes of config.json; that of a model with 61 layers has 2 KB
LARGEST_HEADER: Final = 32 << 20  # bytes of a safetensors header: some 300,000 tensors
MOST_POSITIONS: Final = 1 << 26  # transformers' models have 10 million at most
_USUAL: Final = 256  # numbers up to this cost little, whatever they count
# Floating-point types as safetensors calls them.
_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_LAYERS: Final = re.compile(r"(n|num|encoder|decoder|num_hidden|num_decoder|num_encoder)_layers?")
_NO_SIZE: Final = re.compile(r".*(_ids?|token_index|theta|window|chunk_size|seed)")
_POSITIONS: Final = re.compile(r".*position.*|n_ctx|.*max_length|max_seq_len|seq_length")
_MOST_LAYERS: Final = 4096  # where no header tells how many tensors there are
_WEIGHTS: Final = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*")
_SECONDS: Final = 30.0  # of processor time in the sandbox, 3 of them for imports
_MEMORY: Final = 8 << 30  # bytes of address space; torch maps some
_CARD: Final = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
_MOST_OF_CARD: Final = 1 << 16  # characters: the fields are at its beginning

_log = logging.getLogger(__name__)


def read_config(model: str | Path) -> PreTrainedConfig:
    """The configuration of a causal language model, in a folder or on the hub, with the form of its weights
    where they were saved quantized. Raises ModelNotFound where there is none, UnsupportedModel where it
    cannot be served, and ModelError where it asks for too much."""
    folder = folder_of(model)
    fields = _fields_of(model, folder / "config.json")
    refuse_kind(fields["model_type"])
    found = quantized_fields(fields)
    if found is None or not is_readable(found):
        refuse_quantized(fields, _made_of(folder))
    if Path(model).exists() and not any(_WEIGHTS.fullmatch(file.name) for file in folder.iterdir()):
        raise ModelNotFound(f"{str(model)!r} holds no weights: no file of safetensors")
    examine(model, folder, fields)
    try:
        config = AutoConfig.from_pretrained(str(model), trust_remote_code=False)
        refuse_layers(config)
    except CoserveError:
        raise
    except Exception as error:  # of validators, in many classes
        _log.warning("%s: %s: %s", model, type(error).__name__, error)
        raise ModelNotFound(
            f"{str(model)!r} has a config.json that is none of its type {fields['model_type']!r}"
            f"{told_by(error)}"
        ) from error
    return config


def examine(model: str | Path, folder: Path, fields: dict[str, Any]) -> None:
    """Raises ModelError for a configuration of far more than the folder's files have, or that takes more than
    30 seconds or 8 GiB to make a model of."""
    shapes = [shape for _, shape in saved_tensors(folder)]
    tensors, widths = len(shapes), {width for shape in shapes for width in shape}
    is_usual = tensors > 0
    for name, number in _numbers(fields):
        if _LAYERS.fullmatch(name) and number > (tensors or _MOST_LAYERS):
            held = f"its files hold {tensors} tensors" if tensors else f"at most {_MOST_LAYERS} are loaded"
            raise ModelError(
                f"{str(model)!r} is refused: its config.json asks for {number} layers ({name}), {held}"
            )
        if _POSITIONS.fullmatch(name):
            is_usual &= number <= MOST_POSITIONS
        elif not _NO_SIZE.fullmatch(name):
            is_usual &= number <= _USUAL or number in widths
    if is_usual:
        return
    with Sandbox("coserve.model.made:make_modules", _MEMORY) as sandbox:
        try:
            sandbox.call(str(folder), seconds=_SECONDS)
        except LimitExceeded as error:
            raise ModelError(
                f"{str(model)!r} is refused: its config.json asks for more modules than can be made: {error}"
            ) from error
        except CoserveError as error:
            _log.debug("%s in the sandbox: %s", model, error)  # loading says it better


def folder_of(model: str | Path) -> Path:
    """The folder of a model, where it is on the hub after its configuration has been fetched."""
    if Path(model).exists():
        return Path(model)
    check_hub(model)
    try:
        found = cached_file(str(model), "config.json")
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{str(model)!r} is no local folder or reachable hub name") from error
    return Path(found).parent


def _fields_of(model: str | Path, file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > LARGEST_CONFIG:
            raise ModelError(f"{str(model)!r} is refused: its config.json has {size} bytes")
        fields: dict[str, Any] = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"{str(model)!r} is no folder of a model: it has no config.json") from error
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{str(model)!r} has a config.json that is no JSON") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        named = f"names the type {kind!r:.80}" if kind else "names no model_type"
        raise ModelNotFound(
            f"{str(model)!r} has a config.json that {named}, which transformers does not know"
        )
    return fields


def _made_of(folder: Path) -> str:
    """The model that a model's card says it was made of; empty where there is none."""
    try:
        with (folder / "README.md").open(errors="replace") as file:
            found = _CARD.search(file.read(_MOST_OF_CARD))
    except OSError:
        return ""
    return found[1] if found else ""


def saved_tensors(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Type, as safetensors names it, and shape of each tensor in a folder's files. Raises ModelError for
    other files."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if LARGEST_HEADER < length <= file.stat().st_size:
                raise ModelError(f"{file} is refused: its header has {length} bytes")
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_slice(name)
                    yield tensor.get_dtype(), tensor.get_shape()
        except (OSError, SafetensorError) as error:
            raise ModelNotFound(f"{file} is no safetensors file") from error


def saved_type(folder: Path | None) -> torch.dtype | None:
    """Type of most of a folder's saved numbers; None where there are none."""
    counts: Counter[str] = Counter()
    for name, shape in () if folder is None else saved_tensors(folder):
        counts[name] += math.prod(shape)
    known = [name for name, _ in counts.most_common() if name in _TYPES]
    return _TYPES[known[0]] if known else None


def _numbers(fields: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers of nested fields, with their names."""
    if isinstance(fields, dict):
        for key, value in fields.items():
            yield from _numbers(value, key)
    elif isinstance(fields, list):
        for value in fields:
            yield from _numbers(value, name)
    elif isinstance(fields, int) and not isinstance(fields, bool):
        yield name, fields
