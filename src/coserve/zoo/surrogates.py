"""Surrogates: smaller stand-ins for blocks, pruned and then recovered with low-rank factors (BlockLLM, 5.2).

Recovery trains LoRA beside the linears that became smaller, against the vocabulary distribution of the whole
model; the factors are merged at the end, so a surrogate computes nothing besides. The engine trains adapters
of models as they are, and knows no such loss, so this is the zoo's own trainer (`zoo/distilling.py`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from coserve.adapters.sites import Kind, decoder_layers, sublayers
from coserve.errors import ConfigError, ZooError
from coserve.zoo.alternatives import Criterion, Pruning, StoredAlternative, check_fits
from coserve.zoo.chain import model_of
from coserve.zoo.distilling import DistillationSettings, OnStep, Student, distil, fidelity, windows_of
from coserve.zoo.export import loaded, skeleton_of
from coserve.zoo.finetune import places_of
from coserve.zoo.layered import LayeredModel
from coserve.zoo.manifest import Application
from coserve.zoo.outputs import component_states, directions
from coserve.zoo.profile import Machine, component_seconds
from coserve.zoo.pruning import check_share, importances, linear_in, most_important, pruned, units_of
from coserve.zoo.store import Zoo, check_unlocked
from coserve.zoo.tensor_values import read_tensors, store_tensors

RANK: Final = 8  # of the factors that recover a linear
TOKENS: Final = 32  # of the one sequence that is timed
_CALIBRATION: Final = 16  # windows at most on which importances are measured
Kept = Mapping[tuple[int, Kind], tuple[int, ...]]  # units that are kept, by layer, from 0, and sublayer


class LowRank(nn.Module):
    """A weight [outputs, inputs] with the product of two low-rank factors added, none at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        down = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        self.down = nn.Parameter(down.to(weight.dtype))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The sum."""
        return weight + self.up @ self.down


def make_surrogate(
    zoo: Zoo,
    model: str,
    block: str,
    text: str,
    machine: Machine,
    name: str | None = None,
    share: float = 0.5,
    criterion: Criterion = Criterion.TAYLOR,
    rank: int = RANK,
    settings: DistillationSettings = DistillationSettings(),
    on_step: OnStep = lambda step, steps, loss: None,
) -> StoredAlternative:
    """Prunes `share` of the heads and neurons of a block of `model` (A3, F3, L3 or a range as L2-4), recovers
    it on a text, and stores it as `name`, by default "model.block". Raises ZooError, ConfigError,
    UnsupportedModel and LossNotFinite; the zoo is as it was then."""
    name = name or f"{model}.{block}"
    zoo.check_free(name)
    check_share(share)
    if rank < 1:
        raise ConfigError(f"the rank of a recovery must be at least 1, not {rank}")
    application = model_of(zoo.application(model))
    start, stop = _block(block, len(application.chain))
    windows = windows_of(zoo, application, text, settings.window)
    check_unlocked(zoo)
    with loaded(zoo, model) as own:
        dtype = own.dtype
        whole = LayeredModel(own.float())
        kept = choose_units(whole, range(start, stop), share, criterion, windows.trained)
        layers = pruned_layers(whole, kept)
        before = fidelity(with_layers(whole, layers), whole.logits, windows.held_out)
        steps = recover(whole, layers, kept, rank, windows.trained, settings, on_step)
        for linear in _cut_linears(whole, layers, kept).values():
            linear.to(dtype).float()  # what is judged is what is stored
        timed = min(TOKENS, settings.window)
        made = Pruning(
            model=model, start=start, stop=stop, criterion=criterion,
            kept={_label(place): units for place, units in kept.items()},
            before=before,
            after=fidelity(with_layers(whole, layers), whole.logits, windows.held_out),
            similarity=similarity_behind(whole, layers, stop - 1, windows.held_out),
            nbytes=(_nbytes(whole.layers, kept, dtype), _nbytes(layers, kept, dtype)),
            seconds=(_seconds(whole, {}, start, stop, timed), _seconds(whole, layers, start, stop, timed)),
            machine=str(machine),
            steps=steps,
        )  # fmt: skip
        tensors = {name: tensor.to(dtype) for name, tensor in cut_tensors(whole, layers, kept).items()}
    with zoo.writing(waits=True):
        zoo.check_free(name)
        digest = hashlib.sha256(text.encode()).hexdigest()
        found = StoredAlternative(
            name, {model: application.digest}, store_tensors(zoo, tensors), digest, made
        )
        zoo.publish(found)
    return found


@contextmanager
def surrogate_of(
    zoo: Zoo, name: str, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[LayeredModel, dict[int, nn.Module]]]:
    """A model in `dtype` and the decoder layers of a stored surrogate, by place from 0. Raises ZooError."""
    alternative = zoo.alternatives.get(name)
    made = alternative.made
    if not isinstance(made, Pruning):
        raise ZooError(f"{name} is no surrogate")
    check_fits(alternative, zoo.applications())
    kept = {_place(label): units for label, units in made.kept.items()}
    with loaded(zoo, made.model, dtype) as own:
        whole = LayeredModel(own)
        _check_units(alternative, dict(enumerate(whole.layers)))
        layers = pruned_layers(whole, kept)
        stored, there = read_tensors(zoo, alternative.tensors), cut_tensors(whole, layers, kept)
        if {n: t.shape for n, t in stored.items()} != {n: t.shape for n, t in there.items()}:
            raise ZooError(f"the weights of {name} do not fit {made.model}")
        with torch.no_grad():
            for tensor, values in ((there[one], stored[one]) for one in there):
                tensor.copy_(values)
        yield whole, layers


def served_linears(
    zoo: Zoo, application: Application, alternative: StoredAlternative
) -> tuple[dict[str, str], dict[str, dict[str, list[int]]]]:
    """A surrogate as linears that stand in for those of `application`: ids of their tensors by name in the
    model, and for each linear, by path, the outputs or inputs that it kept of the model's."""
    made = alternative.made
    assert isinstance(made, Pruning)
    layers = list(decoder_layers(skeleton_of(zoo, application)).items())
    _check_units(alternative, {number: layer for number, (_, layer) in enumerate(layers)})
    numbers = {str(number) for number in range(len(layers))}
    kept = dict[str, dict[str, list[int]]]()
    for label, chosen in made.kept.items():
        number, kind = _place(label)
        path, layer = layers[number]
        units, prefix = units_of(layer, kind), f"{path}.{sublayers(layer)[kind]}"
        for name, rows in units.rows.items():
            kept[f"{prefix}.{name}"] = {"outputs": rows[list(chosen)].flatten().tolist()}
        kept[f"{prefix}.{units.output}"] = {"inputs": units.columns[list(chosen)].flatten().tolist()}
    keys = dict[str, str]()
    for name, key in alternative.tensors.items():
        layer_number, _, tail = name.partition(".")
        path = f"{layers[int(layer_number)][0]}.{tail}" if layer_number in numbers else ""
        if path.rpartition(".")[0] not in kept:
            raise ZooError(
                f"{alternative.name} has the tensor {name[:80]!r}, of no linear that it makes smaller"
            )
        keys[path] = key
    return keys, kept


def _check_units(alternative: StoredAlternative, layers: Mapping[int, nn.Module]) -> None:
    """Raises ZooError where a surrogate keeps units that the model, with these layers, does not have, and
    UnsupportedModel."""
    made = alternative.made
    assert isinstance(made, Pruning)
    for label, chosen in made.kept.items():
        number, kind = _place(label)
        count = len(units_of(layers[number], kind)) if number in layers else 0
        if chosen[-1] >= count:  # they are in order
            raise ZooError(
                f"{alternative.name} keeps unit {chosen[-1]} of {label}, where {made.model} has {count}"
            )


def choose_units(
    whole: LayeredModel, places: Sequence[int], share: float, criterion: Criterion, windows: Tensor
) -> dict[tuple[int, Kind], tuple[int, ...]]:
    """The units of a model's components, by place in its chain, that are kept where `share` of each is
    pruned. Raises UnsupportedModel."""
    sublayers_ = [((p - 1) // 2, Kind.ATTENTION if p % 2 else Kind.FEED_FORWARD) for p in places]
    scores = importances(whole, sublayers_, criterion, windows[:_CALIBRATION])
    return {
        (number, kind): most_important(scores[number, kind], units_of(whole.layers[number], kind), share)
        for number, kind in sublayers_
    }


def pruned_layers(whole: LayeredModel, kept: Kept) -> dict[int, nn.Module]:
    """Pruned copies of a model's decoder layers, by place from 0, with these units."""
    by_layer: dict[int, dict[Kind, tuple[int, ...]]] = {}
    for (number, kind), units in kept.items():
        by_layer.setdefault(number, {})[kind] = units
    return {number: pruned(whole.layers[number], own) for number, own in by_layer.items()}


def with_layers(whole: LayeredModel, layers: Mapping[int, nn.Module]) -> Student:
    """The model with these decoder layers in place of its own."""

    def logits(tokens: Tensor) -> Tensor:
        with whole.swapped(layers):
            return whole.logits(tokens)

    return logits


def recover(
    whole: LayeredModel,
    layers: Mapping[int, nn.Module],
    kept: Kept,
    rank: int,
    windows: Tensor,
    settings: DistillationSettings,
    on_step: OnStep = lambda step, steps, loss: None,
) -> int:
    """Trains low-rank factors beside the linears that became smaller, and merges them; returns the number of
    steps. Raises LossNotFinite."""
    generator = torch.Generator().manual_seed(settings.seed)
    linears = list(_cut_linears(whole, layers, kept).values())
    trained = list[nn.Parameter]()
    for linear in linears:
        factors = LowRank(linear.weight, rank, generator)
        parametrize.register_parametrization(linear, "weight", factors)
        trained += factors.parameters()
    steps = distil([with_layers(whole, layers)], whole.logits, trained, windows, settings, on_step)
    for linear in linears:
        parametrize.remove_parametrizations(linear, "weight")
        linear.requires_grad_(False)
    return steps


def similarity_behind(
    whole: LayeredModel, layers: Mapping[int, nn.Module], place: int, windows: Tensor
) -> float:
    """Mean of `similarities_behind`."""
    return float(similarities_behind(whole, layers, place, windows).mean())


@torch.no_grad()
def similarities_behind(
    whole: LayeredModel, layers: Mapping[int, nn.Module], place: int, windows: Tensor
) -> Tensor:
    """For each token the cosine similarity of the vocabulary distributions behind the component at a place of
    the chain, of the model and of the model with other layers."""
    vocabulary = int(whole.model.config.get_text_config().vocab_size)
    both = []
    for own in ({}, layers):
        with whole.swapped(own):
            both.append(
                directions(whole.model, component_states(whole.model, windows.tolist())[place], vocabulary)
            )
    return (both[0] * both[1]).sum(-1)


def cut_tensors(whole: LayeredModel, layers: Mapping[int, nn.Module], kept: Kept) -> dict[str, Tensor]:
    """Weights and biases of the linears that became smaller, by "layer.path"."""
    return {
        f"{name}.{kind}": tensor
        for name, linear in _cut_linears(whole, layers, kept).items()
        for kind, tensor in linear.named_parameters()
    }


def _cut_linears(whole: LayeredModel, layers: Mapping[int, nn.Module], kept: Kept) -> dict[str, nn.Linear]:
    found = {}
    for number, kind in kept:
        path = sublayers(layers[number])[kind]
        for name in units_of(whole.layers[number], kind).linears:
            found[f"{number}.{path}.{name}"] = linear_in(layers[number], f"{path}.{name}")
    return found


def _block(block: str, places: int) -> tuple[int, int]:
    """The components of a block, as the range of their places. Raises ConfigError."""
    found = sorted(places_of((block,), places))
    if found[0] == 0 or found[-1] == places - 1 or found[-1] - found[0] != len(found) - 1:
        raise ConfigError(f"{block} is no block that can be pruned: expected A3, F3, L3 or a range as L2-4")
    return found[0], found[-1] + 1


def _label(place: tuple[int, Kind]) -> str:
    return f"{'A' if place[1] is Kind.ATTENTION else 'F'}{place[0] + 1}"


def _place(label: str) -> tuple[int, Kind]:
    return int(label[1:]) - 1, Kind.ATTENTION if label[0] == "A" else Kind.FEED_FORWARD


def _nbytes(layers: Mapping[int, nn.Module] | Sequence[nn.Module], kept: Kept, dtype: torch.dtype) -> int:
    """Bytes of the sublayers of a block, in the model's type."""
    own = (layers[number].get_submodule(sublayers(layers[number])[kind]) for number, kind in kept)
    return sum(p.numel() * dtype.itemsize for sublayer in own for p in sublayer.parameters())


def _seconds(
    whole: LayeredModel, layers: Mapping[int, nn.Module], start: int, stop: int, tokens: int
) -> float:
    """Seconds of a block in a pass of one sequence."""
    with whole.swapped(layers):
        return sum(component_seconds(whole.model, 1, tokens)[start:stop])
