"""AdamW over the master weights of jobs, equal to `torch.optim.AdamW` of each, and its moments' place."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot

import torch
from torch import Tensor

from coserve.core.plan import AdamW
from coserve.train.optimizer_offload import KINDS, MakeOffload
from coserve.train.slabs import Slabs
from coserve.train.snapshot import TensorSnapshot

_COUNT = "step"  # of updates, one number a weight, beside the moments


@dataclass(frozen=True, slots=True)
class Piece:
    """A run [start, stop) of a slab: weights that have a gradient now, and have had as many updates."""

    slab: int
    start: int
    stop: int
    count: int

    def of(self, slabs: Sequence[Tensor | None]) -> Tensor:
        slab = slabs[self.slab]
        assert slab is not None, "what has a gradient has all the rest"
        return slab[self.start : self.stop]


class Optimizer:
    """One job's weights, gradients and AdamW moments, each end to end in slabs.

    With an `OptimizerOffload` the moments rest there between steps; results are bit for bit the same.
    `weights` are the master copies, views of slabs; their `grad` is None or a view of a slab as well.
    """

    def __init__(
        self,
        start: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        make_offload: MakeOffload | None = None,
    ) -> None:
        """`start` are the initial weights, which are copied."""
        self.slabs = Slabs.of({name: tuple(tensor.shape) for name, tensor in start.items()})
        self.flat = self.slabs.empty(dtype, device)
        self.weights = self.slabs.views(self.flat)
        for name, weight in self.weights.items():
            weight.copy_(start[name].detach()).requires_grad_()
        self._counts = dict.fromkeys(self.weights, 0)
        self._gradients: list[Tensor | None] = [None] * len(self.flat)
        self._moments: dict[str, list[Tensor | None]] = {kind: [None] * len(self.flat) for kind in KINDS}
        self._offload = None if make_offload is None else make_offload(self.flat)
        self._next_counts: dict[Piece, Tensor] = {}  # of the step under way
        self._is_marked = False  # no gradient has come since `mark`
        self._saved: dict[str, Tensor] = {}  # gradients at `mark`, once others have come
        self._snapshot: weakref.ref[TensorSnapshot] | None = None  # which the next change must not reach

    def mark(self) -> None:
        """Begins a pass: `rollback` returns to the gradients as they are now."""
        self._is_marked, self._saved = True, {}

    def rollback(self) -> None:
        """Drops the gradients that have come since `mark`, or all where there was none since the last
        step."""
        if self._is_marked:
            return
        saved = self._saved
        self.drop_gradients()
        for name, gradient in saved.items():
            self.accumulate(name, gradient)
        self.mark()

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Adds to the gradient of a weight."""
        if self._is_marked:  # copied only now: most steps are one pass
            weights = self.weights.items()
            self._saved = {n: weight.grad.clone() for n, weight in weights if weight.grad is not None}
            self._is_marked = False
        weight = self.weights[name]
        if weight.grad is not None:
            weight.grad += gradient
            return
        slot = self.slabs.slots[name]
        slab = self._gradients[slot.slab]
        if slab is None:
            slab = self._gradients[slot.slab] = torch.empty_like(self.flat[slot.slab])
        weight.grad = slab[slot.start : slot.stop].view(slot.shape).copy_(gradient)

    def drop_gradients(self) -> None:
        """Drops all gradients."""
        for weight in self.weights.values():
            weight.grad = None
        self._gradients = [None] * len(self.flat)
        self._is_marked, self._saved = False, {}

    def pieces(self) -> list[Piece]:
        """Returns all weights that have a gradient, in as few pieces as possible."""
        found: list[Piece] = []
        for name, slot in self.slabs.slots.items():
            if self.weights[name].grad is None:
                continue
            count = self._counts[name]
            last = found[-1] if found else None
            if last is not None and (last.slab, last.stop, last.count) == (slot.slab, slot.start, count):
                found[-1] = Piece(slot.slab, last.start, slot.stop, count)
            else:
                found.append(Piece(slot.slab, slot.start, slot.stop, count))
        return found

    def bring(self) -> None:
        """Brings the moments of all weights with a gradient beside them; new ones are zero. All memory of a
        step is allocated here."""
        self._settle_snapshot()
        for slab, gradient in enumerate(self._gradients):
            if gradient is None:
                continue
            if self._offload is not None:
                found = [self._offload.bring(slab, kind) for kind in KINDS]
            elif self._moments[KINDS[0]][slab] is None:
                found = [torch.zeros_like(gradient) for _ in KINDS]
            else:
                continue
            for kind, moment in zip(KINDS, found, strict=True):  # after both, in case memory runs out
                self._moments[kind][slab] = moment
        self._next_counts = {
            piece: torch.tensor(piece.count + 1.0, device=self.flat[piece.slab].device)
            for piece in self.pieces()
        }

    def rest(self) -> None:
        """Ends a step: drops gradients, and stores moments in the offload."""
        for name, weight in self.weights.items():
            self._counts[name] += weight.grad is not None
        self._next_counts = {}
        self.drop_gradients()
        self._lay_down()

    def gradients(self, piece: Piece) -> Tensor:
        return piece.of(self._gradients)

    def state(self, piece: Piece) -> list[Tensor]:
        """Weights, gradient and moments of a piece, and the number of its next update."""
        return [
            piece.of(self.flat),
            piece.of(self._gradients),
            *(piece.of(self._moments[kind]) for kind in KINDS),
            self._next_counts[piece],
        ]

    def snapshot(self) -> Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Returns a function that copies weights and moments as they are now to the CPU, on any thread, while
        steps go on.

        Moments have the weight's name and their own: `name.exp_avg`. Weights that never had a gradient have
        none.
        """
        slabs, counts = self.slabs, dict(self._counts)
        every = {(kind, n): slab for kind in KINDS for n, slab in enumerate(self._moments[kind])}
        moments = {place: slab for place, slab in every.items() if slab is not None}
        places = list(moments)
        snapshot = None if self._snapshot is None else self._snapshot()
        if snapshot is None:  # else one of the same step: the next change copies at most once
            snapshot = TensorSnapshot([*self.flat, *moments.values()])
            self._snapshot = weakref.ref(snapshot)
        copied = snapshot.copies

        def read() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            copies = copied()
            own = dict(zip(places, copies[len(slabs.sizes) :], strict=True))
            found: dict[str, Tensor] = {}
            for name, slot in slabs.slots.items():
                if not counts[name]:
                    continue
                found[f"{name}.{_COUNT}"] = torch.tensor(float(counts[name]), dtype=torch.float32)
                for kind in KINDS:
                    found[f"{name}.{kind}"] = own[kind, slot.slab][slot.start : slot.stop].view(slot.shape)
            return slabs.views(copies[: len(slabs.sizes)]), found

        return read

    def restore(self, moments: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> None:
        """Restores the moments of an earlier `snapshot`, from any device; with `weights` these as well,
        without gradients."""
        self._settle_snapshot()
        if weights is not None:
            for name, weight in self.weights.items():
                weight.data.copy_(weights[name])
            self.drop_gradients()
            self._counts = dict.fromkeys(self.weights, 0)
            is_new = self._offload is None
            self._moments = {k: [None if is_new else torch.zeros_like(w) for w in self.flat] for k in KINDS}
        for name, slot in self.slabs.slots.items():
            count = moments.get(f"{name}.{_COUNT}")
            if count is None:
                continue
            self._counts[name] = int(count)
            for kind in KINDS:
                slabs = self._moments[kind]
                slab = slabs[slot.slab]
                if slab is None:
                    slab = slabs[slot.slab] = torch.zeros_like(self.flat[slot.slab])
                slab[slot.start : slot.stop].view(slot.shape).copy_(moments[f"{name}.{kind}"])
        self._lay_down()

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients, and moments, except those offloaded."""
        moments = (
            [slab for slabs in self._moments.values() for slab in slabs] if self._offload is None else []
        )
        held = (*self.flat, *self._gradients, *moments, *self._saved.values())
        return sum(slab.nbytes for slab in held if slab is not None)

    def _settle_snapshot(self) -> None:
        """Copies what a snapshot has not copied, before a change."""
        if self._snapshot is not None and (snapshot := self._snapshot()) is not None:
            snapshot.copies()
        self._snapshot = None

    def _lay_down(self) -> None:
        if self._offload is None:
            return
        for kind, slabs in self._moments.items():
            for number, slab in enumerate(slabs):
                if slab is not None:
                    slabs[number] = self._offload.rest(number, kind, slab)
        self._offload.settle()


def norms(tensors: Sequence[Sequence[Tensor]]) -> list[float]:
    """The Euclidean norm of each job's tensors taken together."""
    every = [tensor for own in tensors for tensor in own]
    found = iter(torch.stack(torch._foreach_norm(every)).cpu() if every else ())  # one device transfer
    return [hypot(*(float(next(found)) for _ in own)) for own in tensors]  # a square may be beyond all floats


def step(due: Sequence[tuple[Optimizer, AdamW, float]]) -> None:
    """Updates each job with its settings and learning rate, after `bring`, and drops its gradients. Jobs with
    the same settings and rate are updated in one operation."""
    alike: dict[tuple[AdamW, float], list[tuple[Optimizer, Piece]]] = {}
    for optimizer, settings, rate in due:
        alike.setdefault((settings, rate), []).extend((optimizer, piece) for piece in optimizer.pieces())
    for (settings, rate), pieces in alike.items():
        states = [optimizer.state(piece) for optimizer, piece in pieces]
        if not states:
            continue
        weights, gradients, first, second, counts = (list(column) for column in zip(*states, strict=True))
        torch._fused_adamw_(
            weights, gradients, first, second, [], counts,
            lr=rate, beta1=settings.betas[0], beta2=settings.betas[1], weight_decay=settings.weight_decay,
            eps=settings.epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip
    for optimizer, _, _ in due:
        optimizer.rest()
