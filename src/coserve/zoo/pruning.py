"""Structured pruning: decoder layers with fewer attention heads and feed-forward neurons (BlockLLM, 5.2).

As in LLM-Pruner (the paper's reference 30), what goes together is removed together: of an attention's unit
the rows of queries, keys and values and the columns of the output; of a neuron its rows of all linears
that read the hidden state and its column of the one that writes it. So the computation really gets smaller.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.adapters.sites import Kind, sublayers
from coserve.errors import ConfigError, UnsupportedModel
from coserve.zoo.alternatives import Criterion
from coserve.zoo.layered import LayeredModel

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj")
_ATTENTION_OUT: Final = "o_proj"


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one sublayer that can be removed. `rows` are indices [units, n] into the outputs of the
    linears `inputs`, by name in the sublayer; `columns` [units, m] into the inputs of the linear `output`."""

    rows: Mapping[str, Tensor]
    output: str
    columns: Tensor

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of all linears that become smaller."""
        return (*self.rows, self.output)


def units_of(layer: nn.Module, kind: Kind) -> Units:
    """The units of a layer's attention or feed-forward: key-value heads with their queries, query heads where
    there is one key-value head, neurons. Raises UnsupportedModel for sublayers in another form."""
    name = sublayers(layer).get(kind)
    sublayer = None if name is None else layer.get_submodule(name)
    found = None
    if sublayer is not None:
        found = _heads(sublayer) if kind is Kind.ATTENTION else _neurons(sublayer)
    if found is None:
        wanted = (
            "q_proj, k_proj, v_proj and o_proj"
            if kind is Kind.ATTENTION
            else "linears of which the last one reads what the others write"
        )
        raise UnsupportedModel(
            f"the {kind.value} of {type(layer).__name__} cannot be pruned: it needs {wanted}"
        )
    return found


def pruned(layer: nn.Module, kept: Mapping[Kind, Sequence[int]]) -> nn.Module:
    """A copy of a decoder layer with some units of its sublayers, by index; sublayers that are not named are
    whole. What is not pruned shares the layer's own parameters."""
    smaller = copy.deepcopy(layer, {id(own): own for own in _shared(layer)})
    for kind, indices in kept.items():
        units, chosen = units_of(layer, kind), torch.tensor(list(indices))
        sublayer = smaller.get_submodule(sublayers(layer)[kind])
        for name, rows in units.rows.items():
            setattr(sublayer, name, _cut(linear_in(sublayer, name), rows[chosen].flatten(), None))
        cut = _cut(linear_in(sublayer, units.output), None, units.columns[chosen].flatten())
        setattr(sublayer, units.output, cut)
        if kind is Kind.ATTENTION and set(units.rows) == {_ATTENTION[0]}:
            sublayer.num_key_value_groups = len(chosen)  # type: ignore[assignment]
    return smaller


def most_important(scores: Mapping[str, Tensor], units: Units, share: float) -> tuple[int, ...]:
    """The units that are kept where `share` of them are removed, at least one, in order. `scores` are the
    importances of the weights of the sublayer's linears, by name."""
    total = scores[units.output].sum(0)[units.columns].sum(1)
    for name, rows in units.rows.items():
        total = total + scores[name].sum(1)[rows].sum(1)
    count = max(1, len(units) - round(share * len(units)))
    return tuple(sorted(total.topk(count).indices.tolist()))


def importances(
    model: LayeredModel, places: Sequence[tuple[int, Kind]], criterion: Criterion, windows: Tensor
) -> dict[tuple[int, Kind], dict[str, Tensor]]:
    """Importances of the weights of sublayers' linears, by name in the sublayer; `places` are layers, from 0,
    and kinds. With `taylor` the loss is on `windows` of token ids. Raises UnsupportedModel."""
    linears = {(number, kind): _linears(model.layers[number], kind) for number, kind in places}
    weights = [linear.weight for own in linears.values() for linear in own.values()]
    is_taylor = criterion is Criterion.TAYLOR
    gradients = _gradients(model, weights, windows) if is_taylor else weights
    scored = iter([(w.detach() * g.detach()).abs() for w, g in zip(weights, gradients, strict=True)])
    return {place: {name: next(scored) for name in own} for place, own in linears.items()}


def linear_in(module: nn.Module, path: str) -> nn.Linear:
    """A linear by its path in a module."""
    found = module.get_submodule(path)
    assert isinstance(found, nn.Linear)
    return found


def check_share(share: float) -> None:
    """Raises ConfigError for what is no share of units that can be removed."""
    if not 0 < share < 1:
        raise ConfigError(f"the share of units that are pruned must be between 0 and 1, not {share}")


def _gradients(model: LayeredModel, weights: Sequence[Tensor], windows: Tensor) -> list[Tensor]:
    """Gradients of the next-token loss, summed over windows."""
    sums = [torch.zeros_like(weight) for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for tokens in windows[:, None]:
            loss = F.cross_entropy(model.logits(tokens)[:-1], tokens[0, 1:])
            for total, own in zip(sums, torch.autograd.grad(loss, list(weights)), strict=True):
                total += own
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    return sums


def _heads(attention: nn.Module) -> Units | None:
    """An attention's units, if it has linears of transformers' usual names."""
    found = {name: module for name, module in attention.named_children() if type(module) is nn.Linear}
    width = getattr(attention, "head_dim", None)
    if not {*_ATTENTION, _ATTENTION_OUT} <= set(found) or not isinstance(width, int):
        return None
    queries, keys, values = (found[name].out_features for name in _ATTENTION)
    if found[_ATTENTION_OUT].in_features != queries or keys != values or queries % keys or keys % width:
        return None
    groups = keys // width
    if groups > 1:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        rows = {name: torch.arange(size).reshape(groups, -1) for name, size in sizes.items()}
        return Units(rows, _ATTENTION_OUT, torch.arange(queries).reshape(groups, -1))
    heads = torch.arange(queries).reshape(queries // width, width)
    return Units({_ATTENTION[0]: heads}, _ATTENTION_OUT, heads)


def _neurons(feed_forward: nn.Module) -> Units | None:
    """A feed-forward's neurons, if its last linear reads what all others write."""
    found = [(name, own) for name, own in feed_forward.named_children() if type(own) is nn.Linear]
    others = [own for own in feed_forward.modules() if next(own.parameters(recurse=False), None) is not None]
    if len(found) < 2 or len(others) > len(found):
        return None
    *inputs, (output, writes) = found
    count = writes.in_features
    if any(own.out_features != count or own.in_features != writes.out_features for _, own in inputs):
        return None
    neurons = torch.arange(count).reshape(count, 1)
    return Units({name: neurons for name, _ in inputs}, output, neurons)


def _linears(layer: nn.Module, kind: Kind) -> dict[str, nn.Linear]:
    """The linears of a layer's units, by name in the sublayer. Raises UnsupportedModel."""
    names = units_of(layer, kind).linears
    return {name: linear_in(layer.get_submodule(sublayers(layer)[kind]), name) for name in names}


def _cut(linear: nn.Linear, rows: Tensor | None, columns: Tensor | None) -> nn.Linear:
    """A linear with some of another's outputs, or inputs."""
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    if columns is not None:
        weight = weight[:, columns]
    cut = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    cut.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return cut.requires_grad_(False)


def _shared(layer: nn.Module) -> list[object]:
    """Objects of a layer that its copy has too: parameters, and configurations."""
    configs = [own.config for own in layer.modules() if hasattr(own, "config")]
    return [*layer.parameters(), *configs]
