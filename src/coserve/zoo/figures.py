"""Figures of a zoo: its chains as blocks, and the bytes that it takes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coserve.zoo.chain import keys_of, label, parent_of
from coserve.zoo.equivalence import comparisons
from coserve.zoo.manifest import Application
from coserve.zoo.partition import THRESHOLD, ChainBlock, Comparison, partition
from coserve.zoo.store import Zoo
from coserve.zoo.weight_file import parse_header


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of a zoo: `separate` if every application were a model's folder of its own, `exact` as it is, and
    `with_alternatives` if full fine-tunes kept only what is not equivalent to a part of their foundation.
    The last is what a server needs whose requests all allow approximations; the zoo stores all."""

    separate: int
    exact: int
    with_alternatives: int


def blocks_of(
    zoo: Zoo, applications: Mapping[str, Application], threshold: float = THRESHOLD
) -> dict[str, tuple[ChainBlock, ...]]:
    """The blocks of all chains. Raises ZooError."""
    chains = {name: keys_of(one, applications) for name, one in applications.items()}
    return partition(chains, comparisons(zoo, applications), threshold)


def labels_of(applications: Mapping[str, Application]) -> dict[str, Sequence[str]]:
    """Short names of the components of all chains."""
    return {
        name: [label(one.chain, place) for place in range(len(one.chain))]
        for name, one in applications.items()
    }


def storage(zoo: Zoo, applications: Mapping[str, Application], threshold: float = THRESHOLD) -> Storage:
    """Bytes that applications take in the zoo and beside it. Raises ZooError."""
    separate = sum(_separate_bytes(zoo, one, applications) for one in applications.values())
    exact = zoo.nbytes(applications)
    measured = comparisons(zoo, applications)
    every = [set(one.tensor_keys()) for one in applications.values()]
    kept = [_without(one, equivalents(one, measured, threshold)) for one in applications.values()]
    needed = zoo.with_roots(set().union(*every)) - zoo.with_roots(set().union(*kept))
    saved = sum(map(zoo.tensors.nbytes, needed))
    return Storage(separate, exact, exact - saved)


def equivalents(
    one: Application, measured: Sequence[Comparison], threshold: float = THRESHOLD
) -> dict[int, float]:
    """Places of a full fine-tune at which its foundation has something equivalent, with the similarities."""
    found: dict[int, float] = {}
    if one.is_adapter or not one.parent:
        return found
    for comparison in measured:
        if {comparison.one, comparison.other} != {one.name, one.parent}:
            continue
        for group in comparison.groups:
            mine = group.one if comparison.one == one.name else group.other
            if group.similarity >= threshold:
                found |= dict.fromkeys(range(*mine), group.similarity)
    return found


def _separate_bytes(zoo: Zoo, one: Application, others: Mapping[str, Application]) -> int:
    """Bytes of a folder that has all of an application: an adapter with its model."""
    parent = parent_of(one, others) if one.is_adapter else None
    own = sum(len(zoo.files.read(key)) for key in one.file_keys())
    for entry in one.weights.values():
        _, fields = parse_header(zoo.files.read(entry.header))
        own += sum(nbytes for _, _, nbytes in fields.values())
    return own + (0 if parent is None else _separate_bytes(zoo, parent, others))


def _without(one: Application, places: Collection[int]) -> set[str]:
    """Ids of an application's tensors, but for those of components at these places."""
    return {key for place, own in enumerate(one.chain) if place not in places for key in own.tensors.values()}
