"""Low-rank adapters side by side: what many of them add in one step, in a few operations for all.

Adapters with the same linears and nearly the same ranks are a *family*; each has a slot in the family's
stacks, one stack for each group of linears that are given the same input. A version is copied there when a
step first has rows of it, and stays until its slot is wanted: a decode step only multiplies. Rows of anything
else (DoRA, IA3, long prompts, an adapter that has no family in the step) stay with their own bypasses.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses
from coserve.adapters.lowrank import LoRABypass
from coserve.kernels.dispatch import Stack, gathering, make_stack, own_rows, stack_rank

Ranged = tuple[slice, Bypasses]  # the rows of one adapter
Shape = tuple[tuple[str, int], ...]  # of a family: its linears' paths, and the rank of its stack at each


@dataclass(frozen=True, slots=True, eq=False)
class SlotEntry:
    """An adapter version as families see it: its plain low-rank bypasses, and what else it has."""

    bypasses: Bypasses
    plain: Mapping[str, LoRABypass]
    rest: Bypasses | None  # None where there is nothing else
    shape: Shape


class LoraSlotPool:
    """Adapters of one shape, each in a slot of every linear's stack."""

    def __init__(self, groups: Iterable[Sequence[str]], slots: int, first: SlotEntry) -> None:
        self._free = list(reversed(range(slots)))
        self._slots: OrderedDict[int, tuple[int, SlotEntry]] = OrderedDict()  # by id, the latest used last
        self._stacks: list[Stack] = []
        self._touched = 0
        self.places: dict[str, tuple[Stack, int]] = {}  # of each linear: its stack, and which it is there
        for rank, paths in _alike(groups, dict(first.shape)):
            stack = _stack(slots, rank, paths, first)
            self._stacks.append(stack)
            self.places |= {path: (stack, number) for number, path in enumerate(paths)}

    def __len__(self) -> int:
        """Members that have a slot."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that have ever been used; the others have never been written, and take none."""
        return self._touched * sum(stack.slot_nbytes for stack in self._stacks)

    def slot(self, member: SlotEntry, used: Collection[int]) -> int:
        """Where a member is, from now on at least; `used` are the ids of those that must stay."""
        key = id(member.bypasses)
        if key not in self._slots:
            if not self._free:
                oldest = next(k for k in self._slots if k not in used)
                self._free.append(self._slots.pop(oldest)[0])
            slot = self._free.pop()
            self._touched = max(self._touched, slot + 1)
            for path, bypass in member.plain.items():
                stack, number = self.places[path]
                stack.put(slot, number, bypass.a, bypass.b, bypass.scale)
            self._slots[key] = slot, member
        self._slots.move_to_end(key)
        return self._slots[key][0]

    def forget(self, key: int) -> None:
        """Frees the slot of a member that is gone."""
        found = self._slots.pop(key, None)
        if found is not None:
            self._free.append(found[0])


class Gathered:
    """Rows of one family in a step."""

    def __init__(
        self, family: LoraSlotPool, rows: Sequence[slice], slots: Sequence[int], device: torch.device
    ) -> None:
        self._family = family
        of_rows = [slot for slot, r in zip(slots, rows, strict=True) for _ in range(r.stop - r.start)]
        self._owned = own_rows(of_rows, device)
        start, stop = rows[0].start, rows[-1].stop
        self._latest: tuple[Tensor, Stack, Tensor] | None = None
        self._rows: slice | Tensor = slice(start, stop)
        if stop - start != len(of_rows):
            picked = [torch.arange(r.start, r.stop, device=device) for r in rows]
            self._rows = torch.cat(picked)

    def add_(self, path: str, given: Tensor, y: Tensor) -> None:
        """What the family's adapters add to y [all rows, out], in place; `given` [..., in] is what the linear
        is given. The first product is taken once for all linears that are given the same tensor in a row."""
        place = self._family.places.get(path)
        if place is None:
            return
        stack, number = place
        if self._latest is None or self._latest[0] is not given or self._latest[1] is not stack:
            h = stack.shrink(given.flatten(0, -2)[self._rows], self._owned)
            self._latest = given, stack, h
        added = stack.expand(number, self._latest[2], self._owned)
        if isinstance(self._rows, slice):
            y[self._rows].add_(added)
        else:
            y.index_add_(0, self._rows, added)


@dataclass(frozen=True, slots=True)
class Partition:
    """The adapters of a step: those that are multiplied together, and the ranges that go one by one."""

    gathered: Sequence[Gathered]
    alone: Sequence[Ranged]


class Stacks:
    """The stacks of a device. `groups` are the linears they may hold adapters of, those that are given the
    same input together; `slots` is the most adapters that a step has of one family. On a device that gathers
    nothing there are none."""

    def __init__(self, groups: Sequence[Sequence[str]], slots: int, device: torch.device) -> None:
        self._groups, self._slots, self._device = groups, slots, device
        self._paths = frozenset(path for group in groups for path in group)
        self._when = gathering(device)
        self._members: dict[int, SlotEntry] = {}
        self._families: dict[Shape, LoraSlotPool] = {}
        self._numbers: dict[Shape, int] = {}  # of the members' shapes
        self._count = count()
        self._last: tuple[tuple[tuple[int, int, int], ...], Partition] | None = None

    @property
    def nbytes(self) -> int:
        return sum(family.nbytes for family in self._families.values())

    def slot_nbytes(self, bypasses: Bypasses) -> int:
        """Bytes of a version's slot, whether it has one or not; its tensors need no values."""
        if self._when is None:
            return 0
        member = _member(bypasses, self._paths)
        alike = _alike(self._groups, dict(member.shape))
        return sum(_stack(1, rank, paths, member).slot_nbytes for rank, paths in alike)

    def lay(self, adapters: Sequence[Ranged]) -> Partition:
        """Which of these go together. What it gave last is given again as long as nothing changes."""
        if self._when is None or len(adapters) < self._when.adapters:
            return Partition((), adapters)
        key = tuple((rows.start, rows.stop, id(bypasses)) for rows, bypasses in adapters)
        if self._last is None or self._last[0] != key:
            self._last = key, self._lay(adapters)
        return self._last[1]

    @property
    def adapters(self) -> int:
        """Versions that have a slot."""
        return sum(len(family) for family in self._families.values())

    def order(self, bypasses: Bypasses) -> int:
        """A number that adapters of one family have in common: sorted by it, their rows lie together, and
        nothing has to be picked out."""
        if self._when is None:
            return 0
        shape = self._member(bypasses).shape
        if shape not in self._numbers:
            self._numbers[shape] = next(self._count)
        return self._numbers[shape]

    def forget(self, bypasses: Bypasses) -> None:
        """Frees the slot of a version that is gone."""
        member = self._members.pop(id(bypasses), None)
        family = None if member is None else self._families.get(member.shape)
        if member is not None and family is not None:
            family.forget(id(bypasses))
            if not len(family):
                del self._families[member.shape]
        if member is not None and all(other.shape != member.shape for other in self._members.values()):
            self._numbers.pop(member.shape, None)
        self._last = None

    def _lay(self, adapters: Sequence[Ranged]) -> Partition:
        assert self._when is not None
        by_shape: dict[Shape, list[tuple[slice, SlotEntry]]] = {}
        alone: list[Ranged] = []
        for rows, bypasses in adapters:
            member = self._member(bypasses)
            if member.shape and rows.stop - rows.start <= self._when.rows:
                by_shape.setdefault(member.shape, []).append((rows, member))
            else:
                alone.append((rows, bypasses))
        gathered = []
        for shape, found in by_shape.items():
            if len({id(member) for _, member in found}) < self._when.adapters:
                alone += [(rows, member.bypasses) for rows, member in found]
                continue
            gathered.append(self._gathered(shape, found))
            alone += [(rows, member.rest) for rows, member in found if member.rest is not None]
        return Partition(gathered, alone)

    def _gathered(self, shape: Shape, found: Sequence[tuple[slice, SlotEntry]]) -> Gathered:
        family = self._families.get(shape)
        if family is None:
            family = self._families[shape] = LoraSlotPool(self._groups, self._slots, found[0][1])
        used = {id(member.bypasses) for _, member in found}
        slots = [family.slot(member, used) for _, member in found]
        return Gathered(family, [rows for rows, _ in found], slots, self._device)

    def _member(self, bypasses: Bypasses) -> SlotEntry:
        member = self._members.get(id(bypasses))
        if member is None:
            member = self._members[id(bypasses)] = _member(bypasses, self._paths)
        return member


def _member(bypasses: Bypasses, paths: Collection[str]) -> SlotEntry:
    plain = {path: bypass for path, bypass in _plain(bypasses.outputs) if path in paths}
    others = {path: bypass for path, bypass in bypasses.outputs.items() if path not in plain}
    rest = Bypasses(bypasses.inputs, others) if others or bypasses.inputs else None
    shape = tuple((path, stack_rank(len(bypass.a))) for path, bypass in sorted(plain.items()))
    return SlotEntry(bypasses, plain, rest, shape)


def _stack(slots: int, rank: int, paths: Sequence[str], member: SlotEntry) -> Stack:
    """Makes the stack for the linears at `paths`, which are given the same input."""
    a = member.plain[paths[0]].a
    return make_stack(slots, rank, a.shape[1], [len(member.plain[path].b) for path in paths], a)


def _alike(groups: Iterable[Sequence[str]], ranks: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Of each group the linears that have adapters of the same rank."""
    for group in groups:
        by_rank: dict[int, list[str]] = {}
        for path in group:
            if path in ranks:
                by_rank.setdefault(ranks[path], []).append(path)
        yield from by_rank.items()


def _plain(outputs: Mapping[str, Bypass]) -> Iterator[tuple[str, LoRABypass]]:
    """Bypasses that are two products and no more."""
    for path, bypass in outputs.items():
        if type(bypass) is LoRABypass and bypass.bias is None and not bypass.a.requires_grad:
            yield path, bypass
