"""A training session: one adapter's master weights, gradients, activations and versions on the device.

A session knows nothing of epochs, schedules or files. It is given micro-batches, whose rows the scheduler
sends there and back (`tape`, `backward`), and optimizer steps (`updating.update_all`). Fine-tuning
(`supervised.py`) is a client of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Bypasses, exact_type
from coserve.adapters.loaded import LoadedAdapters
from coserve.core.plan import MicroBatchStart, Updated
from coserve.errors import LossNotFinite
from coserve.kernels.dropout import Mask
from coserve.memory.arena import Arena
from coserve.memory.ledger import Account
from coserve.model.base import Base
from coserve.train.backward import Backward
from coserve.train.example import IGNORED
from coserve.train.optim import AdamW, Optimizer
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.pruning.plan import fates_of
from coserve.train.save_policy import SavePolicy, SavePolicySetting
from coserve.train.state import Identity, TrainingState
from coserve.train.tail import Tail
from coserve.train.tape import Tape
from coserve.train.window import Window


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session, except those that come with each optimizer step. `keep` is what tapes keep, or
    the bytes that one may take; `rows` the most that a micro-batch has, which those bytes are shared by."""

    optimizer: AdamW = field(default_factory=AdamW)
    keep: SavePolicySetting = SavePolicy.INPUTS
    rows: int = 2048


@dataclass(slots=True)
class _InFlight:
    """A micro-batch of the step under way. Its tape, tail and backward are made when its first window needs
    them, and gone once the last has come back; `loss` is summed over its labels."""

    start: MicroBatchStart
    labels: int
    tape: Tape | None = None
    tail: Tail | None = None
    backward: Backward | None = None
    loss: Tensor | None = None


class TrainingSession:
    """Trains one adapter: accumulates gradients of micro-batches and publishes a version at each optimizer
    step.

    Master weights and gradients are in float32 (float64 on a float64 base); what serves and what is in the
    graph is a copy in the base's dtype, published as one immutable version after every step.

    `start` is the version to train from; with `resume` its weights, moments and counts are those of that
    state. `identity` is kept with the states that are saved. `make_offload` makes the place where moments
    rest; without it they stay beside the weights.
    """

    def __init__(
        self,
        base: Base,
        loaded: LoadedAdapters,
        job: str,
        start: AdapterVersion,
        config: SessionConfig,
        arena: Arena | None = None,
        identity: Identity | None = None,
        resume: TrainingState | None = None,
        make_offload: MakeOffload | None = None,
    ) -> None:
        self.job, self.config = job, config
        if resume is not None:
            start = replace(resume.adapter, name=start.name, version=start.version)
        self._base, self._loaded, self._arena = base, loaded, arena
        self._identity = identity
        start = _in_order(start, base)
        exact = exact_type(base.dtype)
        self.optimizer = Optimizer(start.parameters(), exact, base.device, config.optimizer, make_offload)
        self._masters = self.optimizer.weights
        self.current = start.in_type(base.dtype)
        served = self.current.parameters()
        self._served_exact = [name for name, tensor in served.items() if tensor.dtype != base.dtype]
        self._shape = sorted((name, tuple(tensor.shape)) for name, tensor in served.items())
        self.room: list[Tensor] = []  # room for the version that an update makes
        self.step = 0
        self.loss: float | None = None  # of the last step
        if resume is not None:
            self.optimizer.restore(resume.moments)
            self.step, self.loss = resume.step, resume.loss
        self._micro_batches: dict[int, _InFlight] = {}
        self.make_room()
        torch._foreach_copy_(self.room, self.optimizer.flat)
        self._publish(start.version)
        self.fates = fates_of(base, self.current, config.keep, config.rows)

    # forward_backward

    def begin(self, start: MicroBatchStart) -> None:
        """Takes on a micro-batch of the optimizer step under way."""
        self._micro_batches[start.key] = _InFlight(start, sum(label != IGNORED for label in start.labels))

    def lengths(self, key: int) -> tuple[int, ...]:
        """Rows of the examples of a micro-batch of the step under way."""
        return self._micro_batches[key].start.lengths

    def tape(self, key: int) -> Tape:
        """The tape of a micro-batch, made when its first window sets out."""
        in_flight = self._micro_batches[key]
        if in_flight.tape is None:
            start, virtual = in_flight.start, self._in_graph.virtual
            tokens, labels = (torch.tensor(x, device=self._base.device) for x in (start.tokens, start.labels))
            in_flight.tape = Tape(self._base, start.lengths, tokens, labels, self.fates, self._arena, virtual)
        return in_flight.tape

    def tail(self, key: int) -> Tail:
        """The tail of a micro-batch, made when its first window passes."""
        in_flight = self._micro_batches[key]
        if in_flight.tail is None:
            start, prompt = in_flight.start, self._in_graph.virtual.prompt_count
            leaves, weight = self._leaves.get(self._base.depth, ()), 1.0 / start.step_labels
            accumulate = self.backward(key).accumulate
            in_flight.tail = Tail(self.tape(key), leaves, weight, accumulate, start.loss, prompt)
        return in_flight.tail

    def backward(self, key: int) -> Backward:
        """The backward of a micro-batch, made when its first window needs it."""
        in_flight = self._micro_batches[key]
        if in_flight.backward is None:
            in_flight.backward = Backward(self.tape(key), self._leaves, self._accumulate)
        return in_flight.backward

    def bypasses(self, key: int, window: Window) -> Bypasses:
        """The version being trained, as the rows of `window` see it: with their dropout, and its prompts in
        place of what the first ones embed."""
        found = self._in_graph.bypasses
        if any(bypass.dropout for _, bypass in self._in_graph.placed()):
            seed = self._micro_batches[key].start.dropout_seed
            found = Bypasses.of(
                (place, _dropping(bypass, f"{seed}/{place.path}", window.start))
                for place, bypass in self._in_graph.placed()
            )
        return self._in_graph.virtual.embedded(found, window.before, window.prompt)

    def release(self, key: int) -> None:
        """Drops the tape of a micro-batch that is through; its loss waits for the update."""
        in_flight = self._micro_batches[key]
        assert in_flight.tape is not None
        in_flight.tape.release()
        in_flight.loss = in_flight.tape.loss
        in_flight.tape = in_flight.tail = in_flight.backward = None

    def drop_tapes(self) -> None:
        """Gives back what the micro-batches of the step under way hold; none of them can go on."""
        for in_flight in self._micro_batches.values():
            if in_flight.tape is not None:
                in_flight.tape.release()
            in_flight.tape = in_flight.tail = in_flight.backward = None

    def change(self, config: SessionConfig) -> None:
        """Has the micro-batches to come keep what `config` says. Its optimizer stays as it is."""
        self.config = config
        self.fates = fates_of(self._base, self.current, config.keep, config.rows)

    def abandon(self) -> None:
        """Gives back all that the step under way holds, gradients included."""
        self.drop_tapes()
        self._micro_batches.clear()
        self.optimizer.drop_gradients()

    # optim_step

    def make_room(self) -> None:
        """Takes the memory that an update needs, so that many can share one in which nobody runs out."""
        self.optimizer.bring()
        self.room = self.optimizer.slabs.empty(self._base.dtype, self._base.device)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Equal for sessions whose adapters and steps have one shape: their rows are multiplied together when
        they lie next to each other."""
        return self.tokens, self._shape

    @property
    def tokens(self) -> int:
        """Rows of the examples of the step under way, those of prompts and padding apart."""
        prompt = self.current.virtual.prompt_count
        starts = (in_flight.start for in_flight in self._micro_batches.values())
        return sum(sum(start.lengths) - start.padding - prompt for start in starts)

    @property
    def labels(self) -> int:
        """Rows of the step under way that have a label."""
        return sum(in_flight.labels for in_flight in self._micro_batches.values())

    def loss_so_far(self) -> float:
        """Mean loss per label of the step under way."""
        losses = (m.loss for m in self._micro_batches.values() if m.loss is not None)
        return sum(float(loss) for loss in losses) / self.labels

    def updated(self, loss: float, norm: float, rate: float) -> Updated:
        """Ends an optimizer step whose weights lie in `room`: publishes them, and returns what to report."""
        labels, tokens = self.labels, self.tokens
        self._micro_batches.clear()
        self.step += 1
        self.loss = loss
        self._publish(self.current.version + 1)
        return Updated(self.step, loss, labels, norm, rate, self.current.key, tokens)

    def not_finite(self, what: str) -> LossNotFinite:
        """The error of a step whose loss, gradient or weights are not finite."""
        stays = f"the adapter stays at version {self.current.key}"
        return LossNotFinite(f"job {self.job}: {what} at step {self.step + 1}; {stays}")

    # What it holds

    def state(self) -> TrainingState:
        """A copy of where the session stands after its last optimizer step, without the one under way."""
        assert self._identity is not None, "what is saved says what it was trained on"
        adapter = self.current.with_parameters({name: _copy(p) for name, p in self._masters.items()})
        moments = {name: _copy(moment) for name, moment in self.optimizer.moments().items()}
        return TrainingState(adapter, moments, self.step, self._identity, self.loss)

    @property
    def held(self) -> dict[Account, int]:
        """Bytes it holds now, by account."""
        tapes = [m.tape for m in self._micro_batches.values() if m.tape is not None]
        return {
            Account.TAPES: sum(tape.nbytes for tape in tapes),
            Account.OPTIMIZERS: self.optimizer.nbytes,
            Account.ADAPTERS: self.current.nbytes,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of tapes, master weights, gradients and optimizer state."""
        return self.held[Account.TAPES] + self.held[Account.OPTIMIZERS]

    # Inside

    def _publish(self, version: int) -> None:
        served = self.optimizer.slabs.views(self.room)
        served |= {name: self._masters[name].detach().clone() for name in self._served_exact}
        self.room = []
        self.current = replace(self.current.with_parameters(served), version=version)
        self._loaded.add(self.current)
        self._take_leaves(served)

    def _take_leaves(self, published: Mapping[str, Tensor]) -> None:
        """Graph leaves that share storage with the published version, and where their gradients go."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in published.items()}
        self._in_graph = self.current.with_parameters(leaves)
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        for place, bypass in self._in_graph.placed():
            stage = self._base.sites[place.path].stage
            self._leaves[stage] = (*self._leaves.get(stage, ()), *bypass.parameters().values())

    def _accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        self.optimizer.accumulate(self._names[id(leaf)], gradient)


def _in_order(adapter: AdapterVersion, base: Base) -> AdapterVersion:
    """Sorts an adapter's bypasses into the model's order: a gradient's norm depends on it in its last
    bits."""
    order = {path: number for number, path in enumerate(base.sites)}
    parts = (
        replace(part, bypasses=dict(sorted(part.bypasses.items(), key=lambda item: order[item[0].path])))
        for part in adapter.parts
    )
    return replace(adapter, parts=tuple(parts))


def _dropping(bypass: Bypass, key: str, start: int) -> Bypass:
    return bypass.dropping(Mask(bypass.dropout, key, start)) if bypass.dropout else bypass


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
