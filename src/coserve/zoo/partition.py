"""Lazy partitioning: the blocks that chains are cut into (BlockLLM, 4.3).

A block is a run of components at whose borders something changes: who uses the component, or which measured
partners have an equivalent one there. So a chain that nobody shares a part of is one block, and a new
application cuts existing blocks only where it shares a part of one, or is equivalent to one. The cuts follow
from all chains and measurements, whatever the order in which they came, and need no storage of their own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

THRESHOLD: Final = 0.98  # cosine similarity from which components are equivalent


@dataclass(frozen=True, slots=True)
class PlaceGroup:
    """Places of two chains that correspond, as ranges, and their similarity; of chains of one length these
    are the same places, one each."""

    one: tuple[int, int]
    other: tuple[int, int]
    similarity: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured similarities of two applications' components."""

    one: str
    other: str
    groups: tuple[PlaceGroup, ...]


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A part of chains: the components at places `start` to `stop`, by key. `users` are the applications in
    whose chains it is, `equivalents` those that have something equivalent at its places."""

    start: int
    stop: int
    keys: tuple[str, ...]
    users: frozenset[str]
    equivalents: frozenset[str]

    @property
    def id(self) -> str:
        """SHA-256 of what the block computes with."""
        return hashlib.sha256("\n".join(self.keys).encode()).hexdigest()


def partition(
    chains: Mapping[str, Sequence[str]],
    comparisons: Sequence[Comparison] = (),
    threshold: float = THRESHOLD,
) -> dict[str, tuple[ChainBlock, ...]]:
    """The blocks of each application's chain, in order. `chains` are the keys of components, by application;
    equal keys are equal components."""
    users: dict[str, set[str]] = {}
    for name, keys in chains.items():
        for key in keys:
            users.setdefault(key, set()).add(name)
    equivalents = _equivalents(chains, comparisons, threshold)
    return {
        name: tuple(_blocks(keys, users, equivalents)) for name, keys in chains.items()
    }  # fmt: skip


def distinct(blocks: Mapping[str, Sequence[ChainBlock]]) -> dict[str, ChainBlock]:
    """All blocks by id, each once."""
    return {block.id: block for own in blocks.values() for block in own}


def _equivalents(
    chains: Mapping[str, Sequence[str]], comparisons: Sequence[Comparison], threshold: float
) -> dict[str, set[str]]:
    """The partners that have something equivalent and different at a component's place, by its key."""
    found: dict[str, set[str]] = {}
    for comparison in comparisons:
        one, other = chains.get(comparison.one), chains.get(comparison.other)
        if one is None or other is None:
            continue
        for group in comparison.groups:
            mine, theirs = one[slice(*group.one)], other[slice(*group.other)]
            if group.similarity < threshold or list(mine) == list(theirs):
                continue
            for keys, partner in ((mine, comparison.other), (theirs, comparison.one)):
                for key in keys:
                    found.setdefault(key, set()).add(partner)
    return found


def _blocks(
    keys: Sequence[str], users: Mapping[str, set[str]], equivalents: Mapping[str, set[str]]
) -> list[ChainBlock]:
    found: list[ChainBlock] = []
    signs = [(frozenset(users[key]), frozenset(equivalents.get(key, ()))) for key in keys]
    start = 0
    for place in range(1, len(keys) + 1):
        if place == len(keys) or signs[place] != signs[start]:
            found.append(ChainBlock(start, place, tuple(keys[start:place]), *signs[start]))
            start = place
    return found
