"""Slots of low-rank adapters, so that a step applies many in a few operations.

Adapters with the same linears and nearly the same ranks share a *pool*; each has a slot in the pool's tables,
of which there is one for each group of linears that are given the same input. A version is copied to its slot
when a step first has rows of it, and stays until the slot is needed for another, so decode steps only
multiply. Eviction is least recently used, by plans' uses of sequences (`LoraSlotPools.use`) over all pools.
Other rows (DoRA, IA3, long prompts, a pool's only adapter in the step) use their own bypasses, and so do all
where a kernel in C multiplies by them (`kernels/native/lora.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import AdapterRows, LoraBatch, SlotRows
from coserve.adapters.lowrank import LoRABypass, is_lora
from coserve.kernels.lora.dispatch import make_slot_backend, make_slot_tables, slot_bounds, slot_rank
from coserve.kernels.lora.slots import SlotTables, SlotWeights
from coserve.kernels.native.lora import computes

# A CPU's memory is taken when it is first written, a GPU's when it is asked for: 256 slots of rank 16 at all
# linears of an 8B model would be 21 GB. There tables begin with so many slots, and double when they are full.
_FIRST_SLOTS: Final = 16

_LAST: Final = 1 << 30  # of sort keys

Shape = tuple[tuple[str, int], ...]  # of a pool: its linears' paths, and the rank of its slots at each


@dataclass(slots=True, eq=False)
class SlotEntry:
    """An adapter version in pools: its bypasses that may have a slot, and its others. `used` grows with each
    use."""

    bypasses: Bypasses
    plain: Mapping[str, LoRABypass]
    rest: Bypasses | None  # None where there is nothing else
    shape: Shape
    used: int = 0


class LoraSlotPool:
    """Adapters of one shape, each in a slot of every linear's tables."""

    def __init__(
        self, groups: Iterable[Sequence[str]], slots: int, first: SlotEntry, grows: bool = False
    ) -> None:
        """`slots` are the most; where it `grows`, memory is taken as they are needed."""
        self._most, self._grows = slots, grows
        slots = self._slots_made = min(slots, _FIRST_SLOTS) if grows else slots
        self._free = list(reversed(range(slots)))
        self._slots: dict[int, tuple[int, SlotEntry]] = {}  # by id
        self._tables: list[SlotTables] = []
        self._touched = 0
        self._places: dict[str, tuple[SlotTables, int]] = {}  # of each linear: its tables, and which it is
        self.weights: dict[str, SlotWeights] = {}
        for rank, paths in _alike(groups, dict(first.shape)):
            tables = _tables(slots, rank, paths, first)
            self._tables.append(tables)
            for number, path in enumerate(paths):
                self._places[path] = tables, number
                self.weights[path] = tables.weights(number)

    def __len__(self) -> int:
        """Entries that have a slot."""
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """Slots that there are tables for; 0 once the pool is no longer used."""
        return self._slots_made

    def close(self) -> None:
        """Frees the tables: no entry is left."""
        self._slots_made = 0
        self._tables, self._places, self.weights = [], {}, {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that take memory."""
        slots = self._slots_made if self._grows else self._touched  # else those never written take none
        return slots * sum(tables.slot_nbytes for tables in self._tables)

    def slot(self, entry: SlotEntry, used: Collection[int]) -> int:
        """The slot of an entry, assigned if it has none; entries with ids in `used` are not evicted."""
        key = id(entry.bypasses)
        if key not in self._slots:
            if not self._free and self._slots_made < self._most:
                self._grow()
            if not self._free:
                oldest = min((k for k in self._slots if k not in used), key=lambda k: self._slots[k][1].used)
                self._free.append(self._slots.pop(oldest)[0])
            slot = self._free[-1]  # taken once it is written: memory may run out
            self._touched = max(self._touched, slot + 1)
            for path, bypass in entry.plain.items():
                tables, number = self._places[path]
                tables.put(slot, number, bypass.a, bypass.b, bypass.scale)
            self._free.pop()
            self._slots[key] = slot, entry
        return self._slots[key][0]

    def _grow(self) -> None:
        before, made = self._slots_made, min(2 * self._slots_made, self._most)
        for tables in self._tables:
            tables.grow(made)
        self._slots_made = made
        for path, (tables, number) in self._places.items():
            self.weights[path] = tables.weights(number)
        self._free += reversed(range(before, self._slots_made))

    def forget(self, key: int) -> None:
        """Frees the slot of a removed entry."""
        found = self._slots.pop(key, None)
        if found is not None:
            self._free.append(found[0])


class LoraSlotPools:
    """The pools of a device. `groups` are the linears with slots, grouped by input; `slots` is the most
    adapters of one pool in a step. A device without a backend for slots has no pools."""

    def __init__(self, groups: Sequence[Sequence[str]], slots: int, device: torch.device) -> None:
        self._groups, self._slots, self._device = groups, slots, device
        self._paths = frozenset(path for group in groups for path in group)
        self._bounds = slot_bounds(device)
        self._entries: dict[int, SlotEntry] = {}
        self._pools: dict[Shape, LoraSlotPool] = {}
        self._numbers: dict[Shape, int] = {}  # of the entries' shapes
        self._count, self._uses = count(), count(1)
        self._last: tuple[tuple[tuple[int, int, int], ...], LoraBatch] | None = None

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())

    def slot_nbytes(self, bypasses: Bypasses) -> int:
        """Bytes of a version's slot if it had one; its tensors need no values."""
        entry = _entry(bypasses, self._paths)
        if self._bounds is None or self._is_native(entry):
            return 0
        alike = _alike(self._groups, dict(entry.shape))
        return sum(_tables(1, rank, paths, entry).slot_nbytes for rank, paths in alike)

    def batch(self, adapters: Sequence[AdapterRows]) -> LoraBatch:
        """The batch of adapters over their ranges of rows, in slots where several share a pool. An unchanged
        batch is reused. Without adapters (training beside answers) nothing is changed."""
        if not adapters:
            return LoraBatch(())
        key = tuple((rows.start, rows.stop, id(bypasses)) for rows, bypasses in adapters)
        if self._last is None or self._last[0] != key:
            self._last = key, self._batch(adapters)
        return self._last[1]

    def assign(self, adapters: Sequence[AdapterRows], rows: int) -> dict[LoraSlotPool, list[int]] | None:
        """The slot of each of `rows` rows in every pool of these adapters, -1 where it has none; None where
        an adapter has bypasses without a slot."""
        if not adapters:
            return {}
        by_shape = self._by_shape(adapters)
        if self._bounds is None or by_shape is None:
            return None
        found: dict[LoraSlotPool, list[int]] = {}
        for shape, members in by_shape.items():
            slots = [-1] * rows
            pool = self._pool(shape, members[0][1])
            for own, slot in self._placed(pool, members):
                slots[own] = [slot] * (own.stop - own.start)
            found[pool] = slots
        return found

    def _by_shape(self, adapters: Sequence[AdapterRows]) -> dict[Shape, list[tuple[slice, SlotEntry]]] | None:
        """Rows with their entries by pool; None where an adapter has bypasses without a slot."""
        found: dict[Shape, list[tuple[slice, SlotEntry]]] = {}
        for rows, bypasses in adapters:
            entry = self._entry(bypasses)
            if entry.rest is not None:
                return None
            if entry.shape:  # else it is a prefix, whose rows pass as the base's
                found.setdefault(entry.shape, []).append((rows, entry))
        return found

    @property
    def adapters(self) -> int:
        """Versions that have a slot."""
        return sum(len(pool) for pool in self._pools.values())

    def order(self, bypasses: Bypasses) -> int:
        """A sort key common to the adapters of one pool: sorted by it, their rows are contiguous. Those
        without low-rank bypasses come last, so that all others are one range with the base's."""
        if self._bounds is None:
            return 0
        shape = self._entry(bypasses).shape
        if not shape:
            return _LAST
        if shape not in self._numbers:
            self._numbers[shape] = next(self._count)
        return self._numbers[shape]

    def use(self, bypasses: Bypasses) -> None:
        """Notes that a sequence of a version begins or ends."""
        if self._bounds is not None:
            self._entry(bypasses).used = next(self._uses)

    def forget(self, bypasses: Bypasses) -> None:
        """Frees the slot of a removed version."""
        entry = self._entries.pop(id(bypasses), None)
        pool = None if entry is None else self._pools.get(entry.shape)
        if entry is not None and pool is not None:
            pool.forget(id(bypasses))
            if not len(pool):
                self._pools.pop(entry.shape).close()
        if entry is not None and all(other.shape != entry.shape for other in self._entries.values()):
            self._numbers.pop(entry.shape, None)
        self._last = None

    def _batch(self, adapters: Sequence[AdapterRows]) -> LoraBatch:
        if self._bounds is None or len(adapters) < self._bounds.adapters:
            return LoraBatch(adapters)
        by_shape: dict[Shape, list[tuple[slice, SlotEntry]]] = {}
        alone: list[AdapterRows] = []
        for rows, bypasses in adapters:
            entry = self._entry(bypasses)
            is_short = rows.stop - rows.start <= self._bounds.rows
            if entry.shape and is_short and not self._is_native(entry):
                by_shape.setdefault(entry.shape, []).append((rows, entry))
            else:
                alone.append((rows, bypasses))
        slots = []
        for shape, found in by_shape.items():
            if len({id(entry) for _, entry in found}) < self._bounds.adapters:
                alone += [(rows, entry.bypasses) for rows, entry in found]
                continue
            slots.append(self._slot_rows(shape, found))
            alone += [(rows, entry.rest) for rows, entry in found if entry.rest is not None]
        return LoraBatch(alone, slots)

    def _is_native(self, entry: SlotEntry) -> bool:
        """Tells whether a kernel in C multiplies by the version's own matrices faster than by slots."""
        found = entry.plain.values()
        return bool(found) and all(computes(bypass.a.dtype, self._device) for bypass in found)

    def _slot_rows(self, shape: Shape, found: Sequence[tuple[slice, SlotEntry]]) -> SlotRows:
        pool = self._pool(shape, found[0][1])
        return SlotRows(pool.weights, make_slot_backend(self._placed(pool, found), self._device))

    def _pool(self, shape: Shape, first: SlotEntry) -> LoraSlotPool:
        if shape not in self._pools:
            grows = self._device.type != "cpu"
            self._pools[shape] = LoraSlotPool(self._groups, self._slots, first, grows)
        return self._pools[shape]

    def _placed(
        self, pool: LoraSlotPool, found: Sequence[tuple[slice, SlotEntry]]
    ) -> list[tuple[slice, int]]:
        """Rows with their entries' slots."""
        used = {id(entry.bypasses) for _, entry in found}
        return [(rows, pool.slot(entry, used)) for rows, entry in found]

    def _entry(self, bypasses: Bypasses) -> SlotEntry:
        entry = self._entries.get(id(bypasses))
        if entry is None:
            entry = self._entries[id(bypasses)] = _entry(bypasses, self._paths)
        return entry


def _entry(bypasses: Bypasses, paths: Collection[str]) -> SlotEntry:
    plain = {path: b for path, b in bypasses.outputs.items() if path in paths and is_lora(b)}
    others = {path: bypass for path, bypass in bypasses.outputs.items() if path not in plain}
    rest = Bypasses(bypasses.inputs, others) if others or bypasses.inputs else None
    shape = tuple((path, slot_rank(len(bypass.a))) for path, bypass in sorted(plain.items()))
    return SlotEntry(bypasses, plain, rest, shape)


def _tables(slots: int, rank: int, paths: Sequence[str], entry: SlotEntry) -> SlotTables:
    """Makes the tables for the linears at `paths`, which share an input."""
    a = entry.plain[paths[0]].a
    return make_slot_tables(slots, rank, a.shape[1], [len(entry.plain[path].b) for path in paths], a)


def _alike(groups: Iterable[Sequence[str]], ranks: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Groups of linears with bypasses of the same rank."""
    for group in groups:
        by_rank: dict[int, list[str]] = {}
        for path in group:
            if path in ranks:
                by_rank.setdefault(ranks[path], []).append(path)
        yield from by_rank.items()
