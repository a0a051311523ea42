"""The ranks that compute one model together, and their collectives.

Every rank runs the same plan in the same order, so that all call the same collectives. What a collective
gives is the same on all ranks, bit for bit: rounding makes no rank decide otherwise than the others.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from coserve.parallel.states import Change

# Seconds that a collective waits for the slowest rank, as one that reads its part of a large model. A rank
# that has ended is missed at once, and one that hangs is found by the host (`executors/remote.py`).
_PATIENCE: Final = 600.0
_MESH: Final = ("tp",)
Pieces = tuple[int, ...]  # relative widths of parts of a dimension, of which each is cut for itself
ONE_PIECE: Final[Pieces] = (1,)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's place: its number among `count`; they find each other by the file `meeting`."""

    number: int
    count: int
    meeting: str


class Arriving:
    """A tensor of another rank, on its way."""

    def __init__(self, into: Tensor) -> None:
        self._into = into

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        return self._into


class Ranks:
    """One rank alone, to which collectives give back what it gave. `RankGroup` has several."""

    number, count = 0, 1
    waited = 0.0  # seconds so far

    @property
    def is_waiting(self) -> bool:
        """Tells whether this rank waits for others, in a collective."""
        return False

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks as torch names them, on devices of this type."""
        return DeviceMesh(device, torch.arange(self.count), mesh_dim_names=_MESH)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which replaces `x`."""
        return x

    def columns(self, x: Tensor) -> Tensor:
        """All ranks' columns side by side: [..., width] of each to [..., all widths]."""
        return self.along(x, -1)

    def along(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' parts of a tensor end to end along a dimension."""
        return x

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """As `along`, slower, for threads beside steps too, one at a time."""
        return x

    def change(self, x: Tensor, change: Change, pieces: Pieces = ONE_PIECE) -> Tensor:
        """Another state of a tensor of rows, outside of any graph. Columns are cut in each of `pieces`."""
        match change:
            case Change.PARTITION:
                return self.columns_of(x, pieces)
            case Change.COMBINE:
                return join_parts(self.columns(x).chunk(self.count, -1), -1, pieces)
            case Change.REDUCE:
                return self.sum(x.clone(memory_format=torch.contiguous_format))
            case Change.REDUCE_PARTITION:
                return self.columns_of(self.change(x, Change.REDUCE), pieces)
            case Change.SPREAD:
                others = torch.zeros_like(x)
                parts = [x if rank == self.number else others for rank in range(self.count)]
                return join_parts(parts, -1, pieces)
        return x

    def changed(self, x: Tensor, forward: Change, back: Change, pieces: Pieces = ONE_PIECE) -> Tensor:
        """As `change`, in a graph and out of one; the gradient changes on its way back."""
        if self.count > 1 and torch.is_grad_enabled() and x.requires_grad:
            found: Tensor = _Changed.apply(x, self, forward, back, pieces)  # type: ignore[no-untyped-call]
            return found
        return self.change(x, forward, pieces)

    def of(self, rank: int, x: Tensor) -> Tensor:
        """One rank's tensor, for all; theirs have its shape."""
        return x

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers, in float64."""
        return list(numbers)

    def first(self, value: Any) -> Any:
        """The first rank's value, a plain one, for all."""
        return value

    def each(self, value: Any) -> list[Any]:
        """Every rank's value, a plain one or tensors, for all. For threads beside steps too, one at a
        time."""
        return [value]

    def send(self, x: Tensor, rank: int) -> None:
        """Sends a tensor to one rank, and does not wait until it is there."""

    def receive(self, into: Tensor, rank: int) -> "Arriving":
        """Begins to receive what one rank sends; several things come in their order."""
        return Arriving(into)

    def decides(self, value: bool) -> bool:
        """The first rank's decision, for all."""
        return value

    def summed(self, x: Tensor) -> Tensor:
        """In a graph and out of one: the sum of all ranks' x, whose gradient each of them has. Out of one it
        replaces x."""
        if torch.is_grad_enabled() and x.requires_grad:
            return self.changed(x, Change.REDUCE, Change.NOTHING)
        return self.sum(x.contiguous())

    def entering(self, x: Tensor) -> Tensor:
        """In a graph: x, which all ranks have, where each goes on with a part of what follows. Its gradient
        is the sum of theirs."""
        return self.changed(x, Change.NOTHING, Change.REDUCE)

    def gathered(self, x: Tensor) -> Tensor:
        """As `columns`, in a graph and out of one; the gradient of a rank's columns is its own part."""
        return self.changed(x, Change.COMBINE, Change.PARTITION)

    def once(self, x: Tensor) -> Tensor:
        """A summand of a sum over ranks that is x: x on the first rank, zeros on others. All have its
        gradient."""
        if not self.number:
            return x
        found: Tensor = _Once.apply(x)  # type: ignore[no-untyped-call]
        return found

    def columns_of(self, whole: Tensor, pieces: Pieces = ONE_PIECE) -> Tensor:
        """The rank's own columns of a whole tensor."""
        return part_of(whole, -1, self, pieces)


def part_of(whole: Tensor, dim: int, ranks: Ranks, pieces: Pieces = ONE_PIECE) -> Tensor:
    """A rank's part of a tensor along a dimension, of each of the `pieces` that lie end to end."""
    dim %= whole.ndim
    own = [
        torch.unflatten(piece, dim, (ranks.count, -1)).select(dim, ranks.number)
        for piece in torch.split(whole, piece_widths(whole.shape[dim], pieces), dim)
    ]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def join_parts(parts: Sequence[Tensor], dim: int, pieces: Pieces = ONE_PIECE) -> Tensor:
    """The tensor whose parts, as `part_of` gives them, ranks have."""
    split = [torch.split(part, piece_widths(part.shape[dim], pieces), dim) for part in parts]
    return torch.cat([piece for pieces_of_all in zip(*split, strict=True) for piece in pieces_of_all], dim)


def piece_widths(width: int, pieces: Pieces) -> list[int]:
    """The widths of the pieces of so many numbers."""
    return [width * own // sum(pieces) for own in pieces]


ALONE: Final = Ranks()


class RankGroup(Ranks):
    """This process's rank of several. `beside` is a second group, for threads beside steps: on CPUs, as
    collectives of two threads would meet on a GPU in another order on each rank. Sums are added up in the
    order of the ranks where they are `ordered`: else a number's last bits depend on its place."""

    def __init__(
        self,
        number: int,
        count: int,
        steps: dist.ProcessGroup,
        beside: dist.ProcessGroup,
        device: torch.device,
        ordered: bool = False,
    ) -> None:
        self.number, self.count, self._ordered = number, count, ordered
        self._steps, self._beside, self._device = steps, beside, device
        self._is_waiting, self._subgroups = False, tuple[RankGroup, ...]()
        self._sent = deque[tuple[dist.Work, Tensor]]()  # which may not be on its way yet

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other ranks."""
        self._is_waiting, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_waiting = False
            self.waited += time.perf_counter() - began

    @property
    def is_waiting(self) -> bool:
        return self._is_waiting or any(part.is_waiting for part in self._subgroups)

    def mesh(self, device: str) -> DeviceMesh:
        return DeviceMesh.from_group(self._steps, device, mesh_dim_names=_MESH)

    def grid(self, stages: int) -> "RankGrid":
        """These ranks in so many stages, one after the other. All ranks call this together."""
        numbers = torch.arange(self.count).view(stages, -1)
        stage, number = divmod(self.number, numbers.shape[1])
        rows = [self._part(own) for own in numbers.tolist()]
        columns = [self._part(own) for own in numbers.t().tolist()]
        inside, across = rows[stage], columns[number]
        self._subgroups = inside, across
        return RankGrid(self, inside, across)

    def _part(self, numbers: Sequence[int]) -> "RankGroup":
        """A group of some of these ranks, which is of use to them alone."""
        steps, beside = dist.new_group(list(numbers)), dist.new_group(list(numbers), backend="gloo")
        number = numbers.index(self.number) if self.number in numbers else -1
        return RankGroup(number, len(numbers), steps, beside, self._device, self._ordered)

    def sum(self, x: Tensor) -> Tensor:
        if self._ordered:
            parts = self._parts(x, self._steps)
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part
            return x
        with self.waiting():
            dist.all_reduce(x, group=self._steps)
        return x

    def along(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts(x.to(self._device), self._steps), dim).to(x.device)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts(x.cpu(), self._beside), dim).to(x.device)

    def _parts(self, x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """All ranks' tensors."""
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.count)]
        with self.waiting():
            dist.all_gather(parts, own, group=group)
        return parts

    def of(self, rank: int, x: Tensor) -> Tensor:
        found = x.to(self._device, copy=True, memory_format=torch.contiguous_format)
        with self.waiting():
            dist.broadcast(found, group=self._steps, group_src=rank)
        return found.to(x.device)

    def totals(self, numbers: Sequence[float]) -> list[float]:
        if not numbers:
            return []
        found = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        totals: list[float] = self.sum(found).tolist()
        return totals

    def each(self, value: Any) -> list[Any]:
        found = [None] * self.count
        with self.waiting():
            dist.all_gather_object(found, value, group=self._beside)
        return found

    def send(self, x: Tensor, rank: int) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        sent = x.contiguous()
        work = dist.isend(sent, group=self._steps, group_dst=rank)
        assert work is not None, "this rank is in its group"
        self._sent.append((work, sent))

    def receive(self, into: Tensor, rank: int) -> Arriving:
        work = dist.irecv(into, group=self._steps, group_src=rank)
        assert work is not None, "this rank is in its group"
        return _Received(into, work, self)

    def decides(self, value: bool) -> bool:
        return bool(self.of(0, torch.tensor([value], device=self._device)))

    def first(self, value: Any) -> Any:
        told = [value]
        with self.waiting():
            dist.broadcast_object_list(told, group=self._steps, group_src=0)
        return told[0]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The place of a process among all those of one model (`every`): the ranks of its stage of a pipeline
    (`inside`), and of all stages those with its number there (`stages`)."""

    every: Ranks = ALONE
    inside: Ranks = ALONE
    stages: Ranks = ALONE

    @staticmethod
    def of(every: Ranks, stages: int) -> "RankGrid":
        """Ranks in so many stages, equally many in each. All ranks call this together."""
        if stages == 1:
            return RankGrid(every, every)
        if stages == every.count:
            return RankGrid(every, stages=every)
        assert isinstance(every, RankGroup), "one rank alone has no stages"
        return every.grid(stages)


class _Received(Arriving):
    def __init__(self, into: Tensor, work: dist.Work, ranks: RankGroup) -> None:
        super().__init__(into)
        self._work, self._ranks = work, ranks

    def wait(self) -> Tensor:
        with self._ranks.waiting():
            self._work.wait()
        return super().wait()


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, forward: Change, back: Change, pieces: Pieces) -> Tensor:
        ctx.told = ranks, back, pieces
        return x.view_as(x) if forward is Change.NOTHING else ranks.change(x, forward, pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks, back, pieces = ctx.told
        return ranks.change(grads[0], back, pieces), None, None, None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def is_stopped(process: int) -> bool:
    """Tells whether a signal has stopped a rank's process; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def join(rank: Rank, device: torch.device, patience: float = _PATIENCE, ordered: bool = False) -> Ranks:
    """Joins the other ranks, on this machine: waits until all are there. Ranks on CPUs talk by gloo, those on
    GPUs by NCCL. Raises RuntimeError where they do not come."""
    if rank.count == 1:
        return ALONE
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside reaches them
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{rank.meeting}",
        rank=rank.number,
        world_size=rank.count,
        timeout=timedelta(seconds=patience),
    )
    steps = dist.group.WORLD
    assert steps is not None, "it was made above"
    return RankGroup(rank.number, rank.count, steps, dist.new_group(backend="gloo"), device, ordered)
