"""Checks that an adapter's files can be loaded here, and that other programs read them as coserve does: PEFT,
by its own loader, and vLLM, by the rules of its loader."""

import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from coserve.adapters.files import CONFIG, WEIGHTS, read_adapter
from coserve.adapters.folder import unreadable
from coserve.adapters.linears import MODEL
from coserve.adapters.merge import WholeModel, load_whole
from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Kind
from coserve.adapters.text_part import keep_text, put_back
from coserve.attention.backend import CacheShape
from coserve.errors import AdapterError

VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that `--max-lora-rank` may be
VLLM_RANK: Final = 16  # by default
_WEIGHT: Final = re.compile(r"(?P<path>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<of>[AB]))")


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """One program's view of an adapter. It reads it as coserve does where there are no `problems`; `notes`
    are what that takes."""

    program: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_adapter(folder: str | Path, model_folder: str | Path) -> tuple[LoaderReport, ...]:
    """Checks an adapter of the model in `model_folder`. Raises ModelNotFound, and AdapterError for files that
    cannot be read, or where PEFT is not installed."""
    model = load_whole(Path(model_folder))
    beside_text = keep_text(model)
    whole = WholeModel(model)
    kinds = (Kind.LINEAR, Kind.EMBEDDING)
    names = {site.path.rpartition(".")[2] for site in whole.sites.values() if site.kind in kinds}
    own = check_own(folder, model)
    put_back(model, beside_text)
    return own, check_peft(folder, model), check_vllm(folder, names)


def check_own(folder: str | Path, model: PreTrainedModel) -> LoaderReport:
    """Loads an adapter's files as an engine does. The model must be unmodified."""
    try:
        read_adapter(folder, "checked", _Frame(model), model.dtype, torch.device("cpu"))
    except AdapterError as error:
        return LoaderReport("coserve", (f"refuses it: {_shown(error)}",))
    return LoaderReport("coserve")


class _Frame(WholeModel):
    """A model as the base of adapters, with keys and values as its configuration says."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._config = model.config.get_text_config()

    @cached_property
    def caches(self) -> Sequence[CacheShape]:
        heads = int(self._config.num_attention_heads)
        groups = int(getattr(self._config, "num_key_value_heads", None) or heads)
        width = int(getattr(self._config, "head_dim", None) or self._config.hidden_size // heads)
        return [CacheShape(groups, width, width)] * self.depth


def check_vllm(folder: str | Path, linears: Collection[str]) -> LoaderReport:
    """Checks an adapter's files against vLLM's rules. `linears` are the last names of the base's linears, and
    of embeddings. Raises AdapterError for files that cannot be read.

    The rules are those of vLLM 0.11 and later: `PEFTHelper` in `vllm/lora/peft_helper.py` for the
    configuration, `LoRAConfig` in `vllm/config/lora.py` for ranks, `from_local_checkpoint` in
    `vllm/lora/lora_model.py` and `parse_fine_tuned_lora_name` in `vllm/lora/utils.py` for tensors. It ignores
    fields that it does not know, so those that change numbers are problems here.
    """
    fields, shapes = _read(Path(folder))
    if fields.get("peft_type") != "LORA":
        return LoaderReport("vLLM", (f"reads LoRA alone, and this is {fields.get('peft_type')}",))
    problems = [
        f"{CONFIG} lacks {name}" for name in ("r", "lora_alpha", "target_modules") if name not in fields
    ]
    refused = {
        "modules_to_save": "takes no modules_to_save",
        "use_dora": "has no DoRA",
        "lora_bias": "has no biases of LoRA",
        "rank_pattern": "takes one rank for all modules, and ignores rank_pattern",
        "alpha_pattern": "takes one alpha for all modules, and ignores alpha_pattern",
        "target_parameters": "reads fused experts in a layout of its own, not PEFT's target_parameters",
        "trainable_token_indices": "ignores trainable_token_indices",
        "layer_replication": "ignores layer_replication",
    }
    problems += [why for name, why in refused.items() if fields.get(name)]
    if fields.get("bias", "none") != "none":
        problems.append(f"takes no bias={fields['bias']!r}")
    problems += _tensor_problems(shapes, linears, fields.get("r"))
    rank, notes = fields.get("r"), []
    if isinstance(rank, int) and rank > VLLM_RANKS[-1]:
        problems.append(f"takes ranks up to {VLLM_RANKS[-1]}, and this has {rank}")
    elif isinstance(rank, int) and rank > VLLM_RANK:
        notes.append(f"with --max-lora-rank {next(most for most in VLLM_RANKS if most >= rank)}")
    return LoaderReport("vLLM", tuple(problems), tuple(notes))


def check_peft(folder: str | Path, model: PreTrainedModel) -> LoaderReport:
    """Has PEFT load an adapter beside its base, and looks that it took each tensor as it is in the file. The
    model is PEFT's afterwards. Raises AdapterError for files that cannot be read, or where PEFT is not
    installed."""
    folder = Path(folder)
    if find_spec("peft") is None:
        raise AdapterError("PEFT is not installed, so whether it reads this cannot be told: pip install peft")
    from peft import PeftModel, PeftType, get_peft_model_state_dict

    name = f"PEFT {version('peft')}"
    fields, _ = _read(folder)
    if fields.get("peft_type") not in {kind.value for kind in PeftType}:
        return LoaderReport(name, (f"has no type {fields.get('peft_type')}",))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loaded = PeftModel.from_pretrained(model, str(folder))
            got = get_peft_model_state_dict(loaded)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        return LoaderReport(name, (f"does not load it: {_shown(error)}",))
    wanted = load_file(folder / WEIGHTS)
    problems = [f"has no place for {one}" for one in sorted(wanted.keys() - got.keys())]
    shared = {name: wanted.get(MODEL + name.rpartition(".")[2]) for name in got.keys() - wanted.keys()}
    # RandLoRA has copies of what its linears share.
    lacking = sorted(n for n, own in shared.items() if own is None or not torch.equal(own, got[n].to(own)))
    problems += [f"lacks {one}, which is not in the file" for one in lacking]
    for one in sorted(wanted.keys() & got.keys()):
        if wanted[one].shape != got[one].shape or not torch.equal(
            wanted[one], got[one].to(wanted[one].dtype)
        ):
            problems.append(f"reads other numbers from {one}")
    missing = [str(one.message) for one in said if "missing adapter keys" in str(one.message).lower()]
    return LoaderReport(name, tuple(problems or map(_shown, [] if shared else missing)))


def _tensor_problems(
    shapes: Mapping[str, Sequence[int]], linears: Collection[str], rank: object
) -> list[str]:
    problems, sides = [], dict[str, set[str]]()
    for name, shape in shapes.items():
        found = _WEIGHT.fullmatch(name)
        if found is None or not name.startswith(PREFIX):
            problems.append(f"has no use for the tensor {name}")
            continue
        path, side = found["path"].removeprefix(PREFIX), found["side"] or found["of"]
        sides.setdefault(path, set()).add(side)
        if path.rpartition(".")[2] not in linears:
            problems.append(f"puts no LoRA on {path}")
        own = shape[0 if side == "A" else -1] if len(shape) == 2 else None
        if own != rank:
            problems.append(f"takes {rank} for the rank of {name}, whose shape is {list(shape)}")
    problems += [f"needs lora_A and lora_B of {path}" for path, found in sides.items() if len(found) < 2]
    return problems if shapes else ["finds no tensors"]


def _read(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Sequence[int]]]:
    """Fields of the configuration, and shapes of the tensors by name."""
    try:
        fields = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(folder / CONFIG, error) from error
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
    except (OSError, SafetensorError) as error:
        raise unreadable(folder / WEIGHTS, error) from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{folder / CONFIG} holds no configuration")
    return fields, shapes


def _shown(error: object) -> str:
    return " ".join(str(error).split())[:300]
