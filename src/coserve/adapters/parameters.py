"""Converts linears in adapter files to and from weight names (PEFT's `target_parameters`).

In some mixtures of experts PEFT (0.21.2) takes every target named like an expert's linear of old checkpoints
(`gate_proj`, `up_proj`, `down_proj`) or router (`gate`) for the fused experts or the router, even the whole
path of a shared expert's linear. It resolves names of weights correctly, with tensors named and shaped as
those of the linear.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from transformers import conversion_mapping

from coserve.adapters.experts import chosen_parameters
from coserve.adapters.method import named
from coserve.adapters.patterns import first_entries, peft_entries
from coserve.adapters.saved import Saved
from coserve.adapters.sites import Frame, Kind

_T = TypeVar("_T")

_WEIGHT: Final = ".weight"
_MISTAKEN: Final = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})
_FUSED: Final = "qwen2_moe"  # those whose checkpoints are converted as this type's are
# From a type to the one whose checkpoints are converted alike: the table that PEFT goes by.
_LIKE: Final[Mapping[str, str]] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
# Of a file that names other parameters than weights of linears and of fused experts.
OTHERS: Final = (
    "only weights of linears and of experts that are one tensor may be named; a finished adapter can be "
    "merged into its base with PEFT's merge_and_unload, and the merged model served"
)
_TOGETHER: Final = 30  # names in one pattern, which may have 10,000 characters


def mistaken(model_type: str, paths: Iterable[str]) -> list[str]:
    """The linears that PEFT, when they are targets in a base of this type, takes for fused experts."""
    if _LIKE.get(model_type) != _FUSED:
        return []
    return [path for path in paths if path.rpartition(".")[2] in _MISTAKEN]


def name_weights(fields: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The fields of a LoRA adapter with these of its targets named by their weights.

    Dropout is set to 0, as PEFT has none there; it matters in training only.
    """
    targets, weights = list(fields["target_modules"]), list(paths)
    modules = sorted(set(targets) - set(weights))
    return {
        **fields,
        "target_modules": modules,
        "target_parameters": [*(fields["target_parameters"] or ()), *(path + _WEIGHT for path in weights)],
        "rank_pattern": _of_weights("rank_pattern", fields["rank_pattern"], fields["r"], modules, weights),
        "alpha_pattern": _of_weights(
            "alpha_pattern", fields["alpha_pattern"], fields["lora_alpha"], modules, weights
        ),
        "lora_dropout": 0.0,
    }


def _of_weights(
    field: str, patterns: Mapping[str, _T], default: _T, modules: Sequence[str], weights: Iterable[str]
) -> dict[str, _T]:
    """Patterns equivalent to `patterns` for modules, and for weights to those of their linears.

    PEFT warns of a pattern that matches weights and no module, so each pattern also matches a module for
    which an earlier one applies.
    """
    of_modules = first_entries(field, patterns, modules)
    by_value: dict[_T, list[str]] = {}
    for path, value in first_entries(field, patterns, weights).items():
        if value != default:
            by_value.setdefault(value, []).append(re.escape(path + _WEIGHT))
    first = modules[:1] if by_value else []
    found = {_exact(m): of_modules.get(m, default) for m in modules if m in of_modules or m in first}
    for value, names in by_value.items():
        for start in range(0, len(names), _TOGETHER):
            found[f"^(?:{'|'.join([*map(re.escape, first), *names[start : start + _TOGETHER]])})$"] = value
    return found


def _exact(path: str) -> str:
    return f"^{re.escape(path)}$"


def take_weights(saved: Saved, frame: Frame) -> tuple[list[str], dict[str, list[str]]]:
    """The linears that a file names by their weights, and parameters of fused experts by their module. Raises
    AdapterError for a name of anything else."""
    names = saved.names("target_parameters")
    linears = [path for path, site in frame.sites.items() if site.kind is Kind.LINEAR]
    endings = {name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT)}
    experts = chosen_parameters(names, frame) if names else {}
    there = {f"{path}{_WEIGHT}" for path in linears}
    there |= {f"{path}.{name}" for path, own in experts.items() for name in own}
    known = {".".join(full.split(".")[start:]) for full in there for start in range(full.count(".") + 1)}
    if known.issuperset(names):
        saved.ignore("target_parameters")
    else:
        saved.refuse("target_parameters", OTHERS)
    return [path for path in linears if named(path, endings)], experts


def of_modules(field: str, patterns: Mapping[str, _T], default: _T, paths: Iterable[str]) -> dict[str, _T]:
    """Patterns that give these linears what `patterns` give their weights."""
    paths = list(paths)
    of_weights = peft_entries(field, patterns, [path + _WEIGHT for path in paths])
    as_modules = peft_entries(field, patterns, paths)
    found = {path: of_weights.get(path + _WEIGHT, default) for path in paths}
    return {**{_exact(p): v for p, v in found.items() if v != as_modules.get(p, default)}, **patterns}
