"""Accuracy of alternatives at each depth of a model (BlockLLM, 4.2, figures 10, 11 and 13).

| alternative | at a depth |
|---|---|
| shared | some layers from there on are those of another model of the same shape (figure 10a) |
| pruned | some layers from there on are pruned, without recovery (figure 10b) |
| switching | from there to the end, layers change between both models every so many (figure 11a) |
| stitched | a stored stitching block leads from one model to the other there (figure 13) |
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch
from torch import nn

from coserve.errors import ConfigError, ZooError
from coserve.zoo.alternatives import Criterion, Fidelity, Stitching, StoredAlternative
from coserve.zoo.chain import model_of
from coserve.zoo.distilling import fidelity, windows_of
from coserve.zoo.export import loaded
from coserve.zoo.layered import LayeredModel
from coserve.zoo.manifest import Application
from coserve.zoo.pruning import check_share
from coserve.zoo.stitching import stitched_models
from coserve.zoo.store import Zoo
from coserve.zoo.surrogates import choose_units, pruned_layers, with_layers

COUNTS: Final = (1, 2, 4)  # layers of one alternative
WINDOW: Final = 64  # tokens


class Depth(msgspec.Struct, frozen=True):
    """An alternative from a depth on: `layers` of the model itself precede it, or are what it stands in
    for."""

    layers: int
    fidelity: Fidelity


class Depths(msgspec.Struct, frozen=True):
    """Fidelity of a model with each alternative at each depth, by the alternative's name; `own` is that of
    the model itself on the same held-out text."""

    model: str
    own: Fidelity
    alternatives: dict[str, tuple[Depth, ...]]

    def accuracies(self) -> dict[str, list[tuple[int, float]]]:
        """Each alternative's depths with its accuracies, to be drawn."""
        return {
            name: [(depth.layers, depth.fidelity.accuracy) for depth in own]
            for name, own in self.alternatives.items()
        }


def measure_depths(
    zoo: Zoo,
    name: str,
    text: str,
    partner: str | None = None,
    counts: Sequence[int] = (),
    share: float = 0.5,
    criterion: Criterion = Criterion.TAYLOR,
    window: int = WINDOW,
) -> Depths:
    """Judges the alternatives of a model at each depth on the held-out part of a text: `counts` layers (by
    default those of `COUNTS` that it has) of `partner` where one is given, as many pruned layers, and the
    stored stitching blocks whose teacher it is. Raises ZooError, ConfigError and UnsupportedModel."""
    application = model_of(zoo.application(name))
    check_share(share)
    for count in counts:
        if not 1 <= count <= application.layers:
            raise ConfigError(f"{name} has {application.layers} layers, and no {_layers(count)} in a row")
    counts = counts or [count for count in COUNTS if count <= application.layers]
    windows = windows_of(zoo, application, text, window)
    found = dict[str, tuple[Depth, ...]]()
    with loaded(zoo, name, torch.float32) as own:
        whole = LayeredModel(own)
        if partner is not None:
            check_same_shape(application, model_of(zoo.application(partner)))
            with loaded(zoo, partner, torch.float32) as theirs:
                others = dict(enumerate(LayeredModel(theirs).layers))
                for count in counts:
                    shared = _judge(whole, _runs(others, count), windows.held_out)
                    found[f"{partner}, {_layers(count)}"] = shared
                for count in counts:
                    switched = _judge(whole, _switches(others, count), windows.held_out)
                    found[f"{partner}, switching every {_layers(count)}"] = switched
        kept = choose_units(whole, range(1, 2 * whole.depth + 1), share, criterion, windows.trained)
        pruned = pruned_layers(whole, kept)
        for count in counts:
            runs = _judge(whole, _runs(pruned, count), windows.held_out)
            found[f"{share:.0%} pruned, {_layers(count)}"] = runs
        for alternative in zoo.alternatives.all().values():
            if isinstance(alternative.made, Stitching) and alternative.made.teacher == name:
                found[alternative.name] = _stitched(zoo, alternative, whole, windows.held_out)
        return Depths(name, fidelity(whole.logits, whole.logits, windows.held_out), found)


def check_same_shape(one: Application, other: Application) -> None:
    """Raises ZooError where layers of one model cannot run in another."""
    if one.tokenizer != other.tokenizer:
        raise ZooError(f"{one.name} and {other.name} have mixed tokenizers")
    if (one.width, one.layers) != (other.width, other.layers):
        raise ZooError(
            f"layers of {other.name} do not fit {one.name}: it has {other.layers} of width {other.width}, "
            f"instead of {one.layers} of {one.width}; a stitching block leads from one to the other"
        )


def _judge(
    whole: LayeredModel, alternatives: Mapping[int, Mapping[int, nn.Module]], windows: torch.Tensor
) -> tuple[Depth, ...]:
    """A model with other layers, by the depth from which on it has them."""
    return tuple(
        Depth(depth, fidelity(with_layers(whole, layers), whole.logits, windows))
        for depth, layers in alternatives.items()
    )


def _runs(others: Mapping[int, nn.Module], count: int) -> dict[int, dict[int, nn.Module]]:
    """Runs of `count` layers, by where they begin."""
    return {
        start: {number: others[number] for number in range(start, start + count)}
        for start in range(len(others) - count + 1)
    }


def _switches(others: Mapping[int, nn.Module], count: int) -> dict[int, dict[int, nn.Module]]:
    """Layers behind each start of which `count` are others, as many the model's own, and so on to the end."""
    return {
        start: {n: others[n] for n in range(start, len(others)) if (n - start) // count % 2 == 0}
        for start in range(len(others))
    }


def _stitched(
    zoo: Zoo, alternative: StoredAlternative, teacher: LayeredModel, windows: torch.Tensor
) -> tuple[Depth, ...]:
    """A stored stitching block at each of its points, by the teacher's layers in front of it, or else by
    those that it skips."""
    made = alternative.made
    assert isinstance(made, Stitching)
    with stitched_models(zoo, alternative.name) as (stitched, points):
        return tuple(
            Depth(
                point.layers if made.teacher == made.first else point.enters,
                fidelity(stitched.at(point), teacher.logits, windows),
            )
            for point in points
        )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
