"""Ladders: approximate chains of a full fine-tune, each with more of its foundation's components (BlockLLM, 3
and 4.2).

Similarities are of one component each, and errors add up. So each chain is judged as a whole, and is in the
ladder only if no chain with fewer components of its own is as near the full fine-tune.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from coserve.errors import ConfigError, ZooError
from coserve.zoo.alternatives import (
    LEAST,
    MOST_CHAINS,
    ApproximateChain,
    Fidelity,
    Ladder,
    StoredAlternative,
)
from coserve.zoo.chain import model_of, parent_of
from coserve.zoo.components import Architecture
from coserve.zoo.distilling import Student, fidelity, windows_of
from coserve.zoo.equivalence import comparisons
from coserve.zoo.export import loaded
from coserve.zoo.figures import equivalents
from coserve.zoo.layered import LayeredModel
from coserve.zoo.manifest import Application
from coserve.zoo.partition import THRESHOLD
from coserve.zoo.store import Zoo, check_unlocked
from coserve.zoo.views import own_weights

CHAINS: Final = 4  # of a ladder, at most
WINDOW: Final = 64  # tokens


def make_ladder(
    zoo: Zoo,
    model: str,
    text: str,
    name: str | None = None,
    most: int = CHAINS,
    least: float = LEAST,
    threshold: float = THRESHOLD,
    window: int = WINDOW,
) -> StoredAlternative:
    """Makes up to `most` approximate chains of the full fine-tune `model`, judges each on the held-out part
    of a text, and stores those with a similarity of at least `least` as `name`, by default "model.ladder".
    From then on a request may allow them.

    A chain has the foundation's components where their measured similarity is at least `threshold`. Raises
    ZooError for a model that is no full fine-tune, has a ladder, was never compared with its foundation or
    has no such chain, and for a text that is too short; ConfigError for settings out of their range.
    """
    name = name or f"{model}.ladder"
    zoo.check_free(name)
    _check_settings(most, least, threshold, window)
    application, foundation = _pair(zoo, model)
    order = _replaced(zoo, application, foundation, threshold)
    windows = windows_of(zoo, application, text, window).held_out
    check_unlocked(zoo)
    candidates = [order[: math.ceil(len(order) * part / most)] for part in range(1, most + 1)]
    own, judged = _judge(zoo, application, foundation, [*dict.fromkeys(candidates)], windows)
    nbytes = _own_bytes(zoo, application, foundation, [(), *judged])
    made = Ladder(
        model=model,
        foundation=foundation.name,
        threshold=threshold,
        least=least,
        tokens=windows.numel(),
        nbytes=nbytes[()],
        own=own,
        chains=tuple(
            ApproximateChain(f"{model}~{len(places)}", tuple(sorted(places)), nbytes[places], found)
            for places, found in nearest_chains(judged, least)
        ),
    )
    if not made.chains:
        nearest = max(found.similarity for found in judged.values())
        raise ZooError(
            f"no chain of {model} with components of {foundation.name} is near enough: the nearest has a "
            f"similarity of {nearest:.4f}, and {least} is asked for"
        )
    models = {model: application.digest, foundation.name: foundation.digest}
    found = StoredAlternative(name, models, {}, hashlib.sha256(text.encode()).hexdigest(), made)
    with zoo.writing(waits=True):
        zoo.check_free(name)
        _check_first(zoo, model)
        zoo.publish(found)
    return found


def with_components(whole: LayeredModel, tensors: Mapping[str, Tensor]) -> Student:
    """The model with these tensors in place of its own parameters, by their names; ties stay."""

    def logits(tokens: Tensor) -> Tensor:
        given = {"input_ids": tokens, "use_cache": False}
        out: Tensor = functional_call(whole.model, dict(tensors), (), given).logits
        return out.flatten(0, 1).float()

    return logits


def components_of(model: PreTrainedModel, places: Collection[int]) -> dict[str, Tensor]:
    """The parameters of a model's components at some places of its chain, by name."""
    place_of = Architecture.of_model(model).place
    return {name: tensor for name, tensor in model.named_parameters() if place_of(name)[0] in places}


def replacement_order(similar: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The order in which components, by place in a chain of `count`, are replaced: first those behind the
    first third of the layers, the most similar first, then those of that third from its end on, last the
    embedding. What is replaced in front costs most (figure 10)."""
    early = 1 + 2 * max(1, (count - 2) // 6)

    def rank(place: int) -> tuple[bool, float]:
        return place < early, float(-place) if place < early else -similar[place]

    return tuple(sorted(similar, key=rank))


def _pair(zoo: Zoo, model: str) -> tuple[Application, Application]:
    """A full fine-tune without a ladder, and its foundation."""
    applications = zoo.applications()
    application = model_of(zoo.application(model))
    foundation = parent_of(application, applications)
    if foundation is None:
        raise ZooError(f"{model} is a foundation: approximate chains are those of full fine-tunes")
    _check_first(zoo, model)
    return application, foundation


def _check_first(zoo: Zoo, model: str) -> None:
    if (before := zoo.alternatives.ladder_of(model)) is not None:
        raise ZooError(f"{model} has a ladder, {before.name}: remove it first")


def _replaced(
    zoo: Zoo, application: Application, foundation: Application, threshold: float
) -> tuple[int, ...]:
    """The places at which a full fine-tune differs from its foundation and is equivalent to it, in the order
    in which they are replaced. Raises ZooError."""
    pair = {application.name: application, foundation.name: foundation}
    measured = comparisons(zoo, pair)
    if not measured:
        raise ZooError(
            f"{application.name} was never compared with {foundation.name}: `coserve zoo evaluate "
            f"{application.name}` does so"
        )
    both = zip(application.chain, foundation.chain, strict=True)
    differing = {place for place, (one, other) in enumerate(both) if one.key != other.key}
    found = {
        place: similarity
        for place, similarity in equivalents(application, measured, threshold).items()
        if place in differing
    }
    if not found:
        raise ZooError(
            f"none of the {len(differing)} components in which {application.name} differs from "
            f"{foundation.name} is equivalent to that one's: their similarities are below {threshold}"
        )
    return replacement_order(found, len(application.chain))


def _judge(
    zoo: Zoo,
    application: Application,
    foundation: Application,
    chains: Sequence[tuple[int, ...]],
    windows: Tensor,
) -> tuple[Fidelity, dict[tuple[int, ...], Fidelity]]:
    """Fidelities of a model by itself, and with its foundation's components at the places of each chain."""
    with (
        loaded(zoo, application.name, torch.float32) as own,
        loaded(zoo, foundation.name, torch.float32) as base,
    ):
        whole = LayeredModel(own)
        judged = {
            places: fidelity(with_components(whole, components_of(base, places)), whole.logits, windows)
            for places in chains
        }
        return fidelity(whole.logits, whole.logits, windows), judged


def nearest_chains(
    judged: Mapping[tuple[int, ...], Fidelity], least: float
) -> list[tuple[tuple[int, ...], Fidelity]]:
    """The chains that are near enough, the nearest first: each nearer than all with more components of the
    foundation."""
    kept: list[tuple[tuple[int, ...], Fidelity]] = []
    for places, found in sorted(judged.items(), key=lambda pair: -len(pair[0])):
        if found.similarity >= max([least, *(other.similarity for _, other in kept)]):
            kept.append((places, found))
    return kept[::-1]


def _own_bytes(
    zoo: Zoo, application: Application, foundation: Application, chains: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], int]:
    """Bytes of a full fine-tune's own weights without its components at the places of each chain."""
    own = own_weights(zoo, application, foundation)
    sizes = {key: zoo.tensors.read(key).data.nbytes for _, key in own.keys.values()}
    return {places: sum(sizes[key] for key in own.without(places).values()) for places in chains}


def _check_settings(most: int, least: float, threshold: float, window: int) -> None:
    if not 1 <= most <= MOST_CHAINS:
        raise ConfigError(f"a ladder has 1 to {MOST_CHAINS} chains, not {most}")
    for name, value in (("least similarity of a chain", least), ("threshold", threshold)):
        if not 0 < value <= 1:
            raise ConfigError(f"the {name} must be above 0 and at most 1, not {value}")
    if window < 2:
        raise ConfigError(f"a window has at least 2 tokens, not {window}")
