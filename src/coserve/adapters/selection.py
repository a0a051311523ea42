"""The modules that a file's configuration chooses, as PEFT (0.21) chooses them.

The rules are those of `check_target_module_exists`, `_maybe_include_all_linear_layers` and `_set_trainable`,
written anew because coserve loads adapters without PEFT; a test compares the two. What PEFT skips in silence
is refused: a chosen module where no bypass can stand, and (`Saved.expect`) a chosen one without tensors.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve.adapters.method import named, said_of
from coserve.adapters.patterns import peft_layers, peft_matches
from coserve.adapters.saved import PREFIX, Saved, shown
from coserve.adapters.sites import Frame, Kind, Site
from coserve.errors import AdapterError, AdapterMismatch

_ALL_LINEAR: Final = "all-linear"
_CONDENSED: Final = 20  # targets from which on PEFT replaces them by the endings that tell them from others
_LAYER: Final = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # the first number is the layer's
# Names that PEFT's own layers add to a model, which `modules_to_save` would find in it.
_ADDED: Final = ("base_layer", "default", "lora_dropout", "lora_magnitude_vector", "lora_A", "lora_B",
                 "lora_embedding_A", "lora_embedding_B", "ia3_l", "ln_tuning_layers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selection:
    """Sites that a configuration chooses: `targets` get a bypass, `replaced` are trained whole; `within` are
    names of all parameters of the latter in files."""

    targets: tuple[Site, ...]
    replaced: tuple[str, ...]
    within: tuple[str, ...]


def select(
    saved: Saved,
    frame: Frame,
    kinds: Collection[Kind],
    has_layers: bool = False,
    by_weight: Collection[str] = (),
) -> Selection:
    """Takes `target_modules`, `exclude_modules` and, with `has_layers`, `layers_to_transform` and
    `layers_pattern`; linears `by_weight` are chosen already. Raises AdapterError for values that PEFT
    refuses, too, AdapterMismatch where a chosen module is of none of the `kinds`, or none is chosen.
    `modules_to_save` is left to `take_replacements`."""
    kept = _kept(saved, frame)
    replaced = tuple(path for path in frame.modules.paths if _is_within(path, kept))
    given = saved.fields.get("target_modules")
    targets = _targets(saved, frame, has_layers)
    if not targets and not by_weight and (given or not kept):
        endings = sorted({p.rpartition(".")[2] for p, site in frame.sites.items() if site.kind in kinds})
        raise AdapterMismatch(
            f"{saved.folder}: target_modules={shown(given)} chooses no module of the base that is not "
            f"excluded or replaced; there are {', '.join(endings)}"
        )
    for path in targets:
        site = frame.sites.get(path)
        if site is None or site.kind not in kinds:
            what = " or ".join(kind.value for kind in kinds)
            raise AdapterMismatch(
                f"{saved.folder}: target_modules={shown(given)} chooses {path!r}, "
                f"which is no {what} that an adapter can stand beside{said_of(path)}"
            )
        if path in by_weight:
            raise AdapterMismatch(
                f"{saved.folder}: both target_modules and target_parameters choose {path!r}"
            )
        if _is_within(path, kept):
            raise AdapterMismatch(f"{saved.folder}: {path!r} is replaced, and yet a target")
    within = tuple(f"{PREFIX}{n}" for n in frame.modules.parameters if _is_within(n, kept))
    return Selection(tuple(frame.sites[path] for path in targets), replaced, within)


def _targets(saved: Saved, frame: Frame, has_layers: bool) -> list[str]:
    """Paths of the modules that get bypasses."""
    paths = frame.modules.paths
    targets, excluded = _names(saved, "target_modules"), _names(saved, "exclude_modules")
    layers, pattern = _layers(saved, isinstance(targets, str)) if has_layers else (None, ())
    saved.ignore("target_modules", "exclude_modules")
    barred = _excluded(saved, frame, excluded)
    if isinstance(targets, str):
        if targets.lower() != _ALL_LINEAR:
            matched = peft_matches("target_modules", targets, paths)
            return [path for path in paths if path in matched and path not in barred]
        if frame.modules.fused:
            raise AdapterMismatch(
                f"{saved.folder}: target_modules='all-linear' means the experts of this model too "
                f"({sorted(frame.modules.fused)[0]}), which are one tensor and get no adapters: list the "
                "modules that the file has tensors for"
            )
        targets = sorted(frame.modules.linears)
    if layers is not None and len(set(targets)) >= _CONDENSED:
        targets = _condensed(targets, paths)
    exact = frozenset(targets)
    found = [path for path in paths if path not in barred and named(path, exact)]
    if layers is None:
        return found
    by_ending = [path for path in found if path not in exact]
    inside = {path for path, layer in _layer_numbers(pattern, by_ending).items() if layer in layers}
    return [path for path in found if path in exact or path in inside]


def _layers(saved: Saved, is_pattern: bool) -> tuple[Collection[int] | None, Sequence[str]]:
    """The layers to which targets are restricted (None: all), and expressions for what they are called."""
    layers, pattern = saved.fields.get("layers_to_transform"), saved.fields.get("layers_pattern")
    saved.ignore("layers_to_transform", "layers_pattern")
    listed = [layers] if type(layers) is int else layers
    if listed is not None and not (isinstance(listed, list) and all(type(one) is int for one in listed)):
        raise AdapterError(
            f"{saved.folder}: layers_to_transform must be numbers of layers, not {shown(layers)}"
        )
    patterns = [pattern] if isinstance(pattern, str) and pattern else pattern or []
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise AdapterError(f"{saved.folder}: layers_pattern must be names, not {shown(pattern)}")
    if is_pattern and (listed is not None or pattern is not None):
        raise AdapterError(
            f"{saved.folder}: layers_to_transform and layers_pattern need a list of target_modules, which is "
            "one expression here"
        )
    if patterns and listed is None:
        raise AdapterError(f"{saved.folder}: layers_pattern needs layers_to_transform beside it")
    return frozenset(listed) if listed else None, patterns


def _layer_numbers(patterns: Sequence[str], paths: Iterable[str]) -> dict[str, int]:
    if patterns:
        return peft_layers("layers_pattern", patterns, paths)
    return {path: int(match["idx"]) for path in paths if (match := _LAYER.match(path)) is not None}


def _condensed(targets: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The endings that PEFT takes instead of many targets (`_find_minimal_target_modules`): the same modules,
    but no longer by their whole names, to which `layers_to_transform` does not apply."""
    wanted = frozenset(targets)
    others = {ending for path in paths if not named(path, wanted) for ending in _endings(path)}
    found: dict[str, None] = {}
    for endings in sorted(map(_endings, wanted)):
        for ending in endings:
            if ending in found or ending in others:
                continue
            if not found.keys() & set(endings[:-1]):
                found[ending] = None
                break
    return list(found) or list(wanted)


def _endings(path: str) -> list[str]:
    """Endings of a path after dots, the shortest first, and the path."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]


def _excluded(saved: Saved, frame: Frame, excluded: str | list[str]) -> frozenset[str]:
    """Paths that are never targets: those excluded, and those in `modules_to_save`."""
    paths = frame.modules.paths
    if isinstance(excluded, str):
        barred = set(peft_matches("exclude_modules", excluded, paths)) if excluded else set()
    else:
        endings = frozenset(excluded)
        barred = {path for path in paths if named(path, endings)}
    whole = frozenset(saved.names("modules_to_save"))
    if whole:
        barred.update(path for path in paths if any(named(start, whole) for start in _starts(path)))
    return frozenset(barred)


def _starts(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _kept(saved: Saved, frame: Frame) -> frozenset[str]:
    """Paths of the modules in `modules_to_save`: those whose names end so, whatever is before."""
    names = tuple(saved.names("modules_to_save"))
    if not names:
        return frozenset()
    for name in names:
        if any(one.endswith(name) for one in _ADDED):
            raise AdapterError(
                f"{saved.folder}: modules_to_save={shown(name)} is a name of PEFT's own layers"
            )
    found = frozenset(path for path in frame.modules.paths if path.endswith(names))
    weighted = {start for name in frame.modules.parameters for start in _starts(name)} & found
    if unseen := [name for name in names if not any(path.endswith(name) for path in weighted)]:
        raise AdapterMismatch(
            f"{saved.folder}: modules_to_save={shown(unseen)} chooses no module of the base that has weights"
        )
    for path in found:
        *above, _ = _starts(path)
        if outer := found.intersection(above):
            raise AdapterError(
                f"{saved.folder}: modules_to_save means {path!r} and {min(outer)!r}, of which it is a part"
            )
    return found


def _is_within(path: str, modules: Collection[str]) -> bool:
    return bool(modules) and any(start in modules for start in _starts(path))


def _names(saved: Saved, field: str) -> str | list[str]:
    """A field that is a list of names, or one expression."""
    value: Any = saved.fields.get(field)
    return value if isinstance(value, str) else saved.names(field)
