"""Stitching blocks: one linear that takes a chain from one model to another of any width (BlockLLM, 4.4).

The linear has one more input, the position of the stitch, so that one block serves all points between two
models. It begins at the least squares between both models' own hidden states (as in Stitchable Neural
Networks, the paper's reference 38), and is then trained from shallow points to deep ones against the larger
model's vocabulary distribution, while everything else is frozen.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from coserve.errors import ConfigError, ZooError
from coserve.zoo.alternatives import Stitching, StitchPoint, StoredAlternative, check_fits
from coserve.zoo.chain import model_of
from coserve.zoo.distilling import DistillationSettings, OnStep, Student, distil, fidelity, windows_of
from coserve.zoo.equivalence import corresponding
from coserve.zoo.export import loaded
from coserve.zoo.layered import LayeredModel
from coserve.zoo.manifest import Application
from coserve.zoo.store import Zoo, check_unlocked
from coserve.zoo.tensor_values import read_tensors, store_tensors

_RIDGE: Final = 1e-6  # of the inputs' mean square, added where least squares have no single answer
_WEIGHT, _BIAS = "weight", "bias"


@dataclass(frozen=True, slots=True)
class Point:
    """A place to go over: behind `layers` layers of the first model, in front of layer `enters` of the
    second, from 0; both at least 1. `position` is the sum of the positions of the last layer before it and
    the first one behind it, each in its own model, as a share of its largest possible value."""

    layers: int
    enters: int
    position: float


def stitch_points(first: int, second: int) -> list[Point]:
    """All points between models of these depths, shallow to deep: the borders of the groups of layers that
    correspond (`zoo/equivalence.py`)."""
    layers = corresponding(2 * first + 2, 2 * second + 2)[1:-1]
    borders = [((a[1] - 1) // 2, (b[1] - 1) // 2) for a, b in layers]
    if first == second:  # its pairs are of components, two a layer
        borders = borders[1::2]
    return [Point(i, j, (i + j + 1) / (first + second)) for i, j in borders[:-1]]


class StitchingBlock(nn.Module):
    """One linear from hidden states [..., inputs] and a position to hidden states [..., outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs + 1, outputs)

    def forward(self, hidden: Tensor, position: float) -> Tensor:
        """Hidden states at the second model's width, in the type of `hidden`; computed in the block's own."""
        given = with_position(hidden, position).to(self.linear.weight.dtype)
        found: Tensor = self.linear(given)
        return found.to(hidden.dtype)


def with_position(hidden: Tensor, position: float) -> Tensor:
    """Hidden states [..., width] with the position as one more feature."""
    return torch.cat([hidden, hidden.new_full((*hidden.shape[:-1], 1), position)], -1)


class Stitched:
    """Two models with a stitching block between them."""

    def __init__(self, first: LayeredModel, second: LayeredModel, block: StitchingBlock) -> None:
        self.first, self.second, self.block = first, second, block

    def at(self, point: Point) -> Student:
        """The stitched model with its stitch at a point."""
        return partial(self._logits, point)

    def _logits(self, point: Point, tokens: Tensor) -> Tensor:
        hidden = self.first.state_behind(point.layers - 1, tokens)
        stitched = self.block(hidden, point.position).to(self.second.model.dtype)
        return self.second.logits_from(point.enters, stitched, tokens)


def stitch(
    zoo: Zoo,
    first: str,
    second: str,
    text: str,
    name: str | None = None,
    layers: Sequence[int] = (),
    settings: DistillationSettings = DistillationSettings(),
    on_step: OnStep = lambda step, steps, loss: None,
) -> StoredAlternative:
    """Trains a stitching block from the model `first` to `second`, stores it as `name` (by default
    "first-to-second") and returns it with how near the larger model each point is on held-out text. `layers`
    are those points of `first` behind which it may be, all by default. Raises ZooError, ConfigError and
    LossNotFinite; the zoo is as it was then."""
    name = name or f"{first}-to-{second}"
    zoo.check_free(name)
    one, other = model_of(zoo.application(first)), model_of(zoo.application(second))
    check_stitchable(one, other)
    points = _chosen(one, other, layers)
    windows = windows_of(zoo, one, text, settings.window)
    check_unlocked(zoo)
    with _both(zoo, one, other) as (head, tail):
        started = time.perf_counter()
        stitched = Stitched(head, tail, StitchingBlock(one.width, other.width))
        fit_states(stitched, points, windows.trained, settings.batch_size)
        teacher = head if is_larger(one, other) else tail
        weaker = tail if teacher is head else head

        stages = [stitched.at(point) for point in points]
        trained = list(stitched.block.parameters())
        steps = distil(stages, teacher.logits, trained, windows.trained, settings, on_step)
        seconds = time.perf_counter() - started
        judged = tuple(
            StitchPoint(p.layers, p.enters, fidelity(stitched.at(p), teacher.logits, windows.held_out))
            for p in points
        )
        alone = fidelity(weaker.logits, teacher.logits, windows.held_out)
    made = Stitching(
        first, second, first if teacher is head else second, windows.tokens, steps, seconds, judged, alone
    )
    with zoo.writing(waits=True):
        zoo.check_free(name)
        linear = stitched.block.linear
        tensors = store_tensors(zoo, {_WEIGHT: linear.weight, _BIAS: linear.bias})
        digests = {first: one.digest, second: other.digest}
        found = StoredAlternative(name, digests, tensors, hashlib.sha256(text.encode()).hexdigest(), made)
        zoo.publish(found)
    return found


def stored_block(zoo: Zoo, alternative: StoredAlternative) -> tuple[list[Point], dict[str, Tensor]]:
    """A stored stitching block: its points, and the linear's `weight` [outputs, inputs + 1], with the
    position as last input, and `bias`. Raises ZooError where it is none, the models have changed, or it does
    not connect them."""
    made = alternative.made
    if not isinstance(made, Stitching):
        raise ZooError(f"{alternative.name} is no stitching block")
    applications = zoo.applications()
    check_fits(alternative, applications)
    one, other = applications[made.first], applications[made.second]
    tensors = read_tensors(zoo, alternative.tensors)
    shapes = {_WEIGHT: (other.width, one.width + 1), _BIAS: (other.width,)}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise ZooError(
            f"{alternative.name} does not connect {made.first} and {made.second}: its weights do not fit"
        )
    there = {(point.layers, point.enters): point for point in stitch_points(one.layers, other.layers)}
    points = [there.get((point.layers, point.enters)) for point in made.points]
    if None in points:
        raise ZooError(f"{alternative.name} has a stitch where {made.first} and {made.second} have none")
    return [point for point in there.values() if point in points], tensors


@contextmanager
def stitched_models(zoo: Zoo, name: str) -> Iterator[tuple[Stitched, list[Point]]]:
    """A stored stitching block between its models, in float32, and its points. Raises ZooError."""
    alternative = zoo.alternatives.get(name)
    points, tensors = stored_block(zoo, alternative)
    made = alternative.made
    assert isinstance(made, Stitching), "it is stored as one"
    one, other = zoo.application(made.first), zoo.application(made.second)
    block = StitchingBlock(one.width, other.width)
    block.linear.load_state_dict(tensors)
    with _both(zoo, one, other) as (head, tail):
        yield Stitched(head, tail, block.requires_grad_(False)), points


def check_stitchable(one: Application, other: Application) -> None:
    """Raises ZooError where no stitching block can lead from one model to another."""
    if one.digest == other.digest:
        raise ZooError(f"{one.name} and {other.name} are the same model: nothing is to be stitched")
    if not one.tokenizer or one.tokenizer != other.tokenizer:
        raise ZooError(
            f"{one.name} and {other.name} have mixed tokenizers, or none: a chain of both would read one's "
            "tokens and answer in the other's"
        )
    if one.vocabulary != other.vocabulary:
        raise ZooError(
            f"{one.name} has a vocabulary of {one.vocabulary} and {other.name} one of {other.vocabulary}: "
            "their distributions do not compare"
        )
    if min(one.layers, other.layers) < 2:
        raise ZooError(f"{one.name} and {other.name} need two layers each, to be cut between them")


def is_larger(one: Application, other: Application) -> bool:
    """Tells whether `one` is the larger model: wider, or as wide and deeper. It is the teacher."""
    return (one.width, one.layers) > (other.width, other.layers)


@torch.no_grad()
def fit_states(stitched: Stitched, points: Sequence[Point], windows: Tensor, batch_size: int) -> None:
    """Sets the block to the least squares from the first model's hidden states to the second's at all points
    together, on windows of token ids. Points count alike, whatever the size of their states."""
    linear = stitched.block.linear
    size = linear.in_features + 1  # and the bias
    sums = torch.zeros(size, size + linear.out_features, dtype=torch.float64)
    for point in points:
        own, energy = torch.zeros_like(sums), 0.0
        for tokens in torch.split(windows, batch_size):
            given = with_position(stitched.first.state_behind(point.layers - 1, tokens), point.position)
            rows = torch.cat([given, given.new_ones(*given.shape[:-1], 1)], -1).flatten(0, 1).double()
            wanted = stitched.second.state_behind(point.enters - 1, tokens).flatten(0, 1).double()
            own += rows.T @ torch.cat([rows, wanted], 1)
            energy += float(wanted.square().sum())
        sums += own / max(energy, torch.finfo(torch.float64).tiny)
    squares, products = sums[:, :size], sums[:, size:]
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    solved = torch.linalg.solve(squares + ridge, products)
    linear.weight.copy_(solved[:-1].T)
    linear.bias.copy_(solved[-1])


def _chosen(one: Application, other: Application, layers: Sequence[int]) -> list[Point]:
    """The points behind these layers of the first model, all by default. Raises ConfigError."""
    points = stitch_points(one.layers, other.layers)
    there = [point.layers for point in points]
    for layer in layers:
        if layer not in there:
            raise ConfigError(
                f"no stitch is possible behind layer {layer} of {one.name}, which has {one.layers}: with "
                f"{other.name} it can be behind {', '.join(map(str, there))}"
            )
    return [point for point in points if not layers or point.layers in layers]


@contextmanager
def _both(zoo: Zoo, one: Application, other: Application) -> Iterator[tuple[LayeredModel, LayeredModel]]:
    with loaded(zoo, one.name, torch.float32) as first, loaded(zoo, other.name, torch.float32) as second:
        yield LayeredModel(first), LayeredModel(second)
