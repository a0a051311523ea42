"""Estimates of deep models from runs of the same model with three and with four layers.

Decoder layers that are alike do the same, one after the other. So at a given point of a pass the bytes in use
depend linearly on the layer that is reached and on the number of layers: what each layer keeps is there as
often as there are such layers (but for buffers of whole disk blocks, 4 KiB). Two runs, split at every layer
that is reached, tell these lines: of what precedes the first layer, of the first two, and of the last two. A
peak is the largest of them. The result equals that of the whole model, byte for byte
(`tests/unit/plan/test_depth.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from coserve.adapters.sites import decoder_layers
from coserve.errors import UnsupportedModel
from coserve.memory.fake_tensors import BEFORE
from coserve.plan.stages import Program, Stage, System
from coserve.plan.subject import Subject
from coserve.train.save_policy import SavePolicy

FEW: Final = (3, 4)  # layers of the runs: with three the second is the last but one, too
_OF_LAYERS: Final = ("layers", "layers_to_transform", "exclude_layers", "leave_out")  # fields of adapters

Segments = Sequence[tuple[int, int]]  # the layer that is reached, and the most bytes in use until the next
Pass = tuple[int, dict[int, int]]  # its direction, and the most bytes in use at each layer


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run of a program: segments of each stage, and bytes of the weights at LOADED, of keys and values, of
    the optimizer, and of that when rows go forward."""

    segments: Mapping[Stage, Segments]
    weights: int
    cache: int
    optimizer: int
    early: int

    @property
    def peaks(self) -> dict[Stage, int]:
        """The most bytes in use until each stage was reached."""
        found, most = {}, 0
        for stage, segments in self.segments.items():
            most = max(most, *(nbytes for _, nbytes in segments))
            found[stage] = most
        return found


def shallow(subject: Subject, program: Program) -> list[Subject]:
    """The subject with each of `FEW` numbers of layers; empty where its layers are not alike, or the program
    does not treat them alike."""
    # Other policies depend on bytes, or on a trace of a layer that is made once in a process.
    keeps_inputs = program.system is System.TORCH or program.keep == SavePolicy.INPUTS.value
    if not keeps_inputs or any(field in part for part in program.parts for field in _OF_LAYERS):
        return []
    depth = getattr(subject.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int) or depth <= max(FEW) or not _are_alike(subject.config, depth):
        return []
    found = [replace(subject, config=_with_layers(subject.config, depth, few)) for few in FEW]
    return found if all(_are_alike(one.config, few) for one, few in zip(found, FEW, strict=True)) else []


def _are_alike(config: Any, depth: int) -> bool:
    """Tells whether a model of this configuration has so many layers, and all of them are alike."""
    text = config.get_text_config()
    lists = [own for own in text.to_dict().values() if isinstance(own, list) and len(own) == depth]
    if any(one != own[0] for own in lists for one in own) or getattr(text, "num_kv_shared_layers", None):
        return False
    try:
        with torch.device("meta"):
            layers = list(decoder_layers(Subject("", config, torch.float32).build()).values())
    except (UnsupportedModel, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return False
    return len(layers) == depth and all(_form(layer) == _form(layers[0]) for layer in layers)


def _form(layer: nn.Module) -> list[object]:
    """Modules and shapes of a layer."""
    kinds: list[object] = [(name, type(module).__name__) for name, module in layer.named_modules()]
    return kinds + [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items()]


def _with_layers(config: Any, depth: int, few: int) -> Any:
    """A configuration with fewer layers, and lists of as many entries."""
    own = deepcopy(config)
    text = own.get_text_config()
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:few])
    text.num_hidden_layers = few
    return own


def deepened(runs: Sequence[Recorded], depth: int) -> Recorded | None:
    """The run with `depth` layers, given those with `FEW`; None where they are no passes over all layers."""
    few, more = runs
    segments: dict[Stage, Segments] = {}
    for stage in few.segments:
        one, other = (_passes(run.segments[stage], layers) for run, layers in zip(runs, FEW, strict=True))
        if one is None or other is None or [way for way, _ in one] != [way for way, _ in other]:
            return None
        segments[stage] = list(_lines(one, other, depth))

    def at_depth(name: str) -> int:
        return _line(getattr(few, name), getattr(more, name), depth)

    return Recorded(segments, *map(at_depth, ("weights", "cache", "optimizer", "early")))


def _passes(segments: Segments, layers: int) -> list[Pass] | None:
    """A stage's passes over all layers, one after the other; what is before them is a pass of direction 0.
    A layer may be visited again at once; where all others were, it may be the first of a pass back. None
    where a pass lacks layers."""
    found: list[Pass] = []
    for layer, nbytes in segments:
        way, own = found[-1] if found else (0, {})
        last = next(reversed(own), None)
        if layer == BEFORE:
            found.append((0, {BEFORE: nbytes}))
        elif layer == last and len(own) < layers:
            own[layer] = max(own[layer], nbytes)
        elif way and last is not None and layer == last + way:
            own[layer] = nbytes
        else:
            found.append((1 if layer == 0 else -1, {layer: nbytes}))
    passes: list[Pass] = []
    for way, own in found:
        if way and len(own) == 1 and passes and next(reversed(passes[-1][1])) in own:  # visited once more
            passes[-1][1].update({layer: max(nbytes, passes[-1][1][layer]) for layer, nbytes in own.items()})
        else:
            passes.append((way, own))
    whole = set(range(layers))
    return passes if all(not way or own.keys() == whole for way, own in passes) else None


def _lines(few: Sequence[Pass], more: Sequence[Pass], depth: int) -> Iterator[tuple[int, int]]:
    """The most bytes in use at some layers of each pass with `depth` layers: one of them has the most."""
    for (way, own), (_, other) in zip(few, more, strict=True):
        ends = [(0, 0, 0), (1, 1, 1), (depth - 2, 1, 2), (depth - 1, 2, 3)] if way else [(BEFORE,) * 3]
        for layer, one, two in ends:
            yield layer, _line(own[one], other[two], depth)


def _line(few: int, more: int, depth: int) -> int:
    """The value at `depth` of a line through those at `FEW`."""
    return more + (more - few) * (depth - FEW[1])
