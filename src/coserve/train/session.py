"""A training session: one adapter's master weights, gradients, activations and versions on the device.

A session knows nothing of epochs, schedules or files. It receives micro-batches, whose rows the scheduler
sends forward and back (`micro_batch`), and optimizer steps (`updating.update_all`). Fine-tuning
(`supervised.py`) is a client of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.loaded import LoadedAdapters
from coserve.core.plan import MicroBatchOutput, MicroBatchStart, Updated
from coserve.core.training import ACCURACY
from coserve.errors import LossNotFinite
from coserve.memory.arena import Arena
from coserve.memory.ledger import Account
from coserve.model.base import Base
from coserve.train.master_weights import MasterWeights
from coserve.train.micro_batch import MicroBatchState
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.pruning.plan import fates_of
from coserve.train.save_policy import Fates, SavePolicy, SavePolicySetting
from coserve.train.state import Identity, TrainingState

_ALONE: Final = AdapterVersion("", 0, ())  # the base without an adapter


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session, except those of each optimizer step. `keep` is the policy of stored activations,
    or the bytes that a micro-batch's may take; `rows`, the most rows of a micro-batch, divide those bytes."""

    keep: SavePolicySetting = SavePolicy.INPUTS
    rows: int = 2048


class TrainingSession:
    """Trains one adapter: accumulates gradients of micro-batches and publishes a version at each optimizer
    step. `micro_batches` are those of the step under way, by key; `weights` the master weights.

    `start` is the version to train from; with `resume` its weights, moments and counts are those of that
    state. `identity` is kept with saved states. `make_offload` makes the store where moments rest; without it
    they stay beside the weights. `reference` is the adapter of micro-batches for reference; None is the base
    alone.
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
        reference: AdapterVersion | None = None,
    ) -> None:
        self.job = job
        self.step = 0
        self.loss: float | None = None  # of the last step
        moments = None
        if resume is not None:
            start = replace(resume.adapter, name=start.name, version=start.version)
            moments, self.step, self.loss = resume.moments, resume.step, resume.loss
        self._base, self._arena, self._identity = base, arena, identity
        self.micro_batches: dict[int, MicroBatchState] = {}
        self.weights = MasterWeights(base, loaded, start, moments, make_offload)
        self._reference = _ALONE if reference is None else reference.in_type(base.dtype)
        self._pass = 0  # number of the last pass that has begun
        shapes = self.weights.current.whole.parameters().items()
        self._shape = sorted((name, tuple(tensor.shape)) for name, tensor in shapes)
        self.change(config)

    # forward_backward

    def begin(self, start: MicroBatchStart) -> None:
        """Adds a micro-batch to the optimizer step under way. The first one of a pass ends the one before."""
        if start.pass_number != self._pass:
            self._pass = start.pass_number
            self.weights.optimizer.mark()
        # Without a backward nothing is kept for it.
        fates = Fates(lowest=self._base.depth) if start.forward_only else self.fates
        reference = self._reference if start.reference else None
        state = MicroBatchState(start, self._base, self.weights, fates, self._arena, reference)
        self.micro_batches[start.key] = state

    def take_output(self, key: int) -> MicroBatchOutput:
        """Outcome of a micro-batch that is through. Raises LossNotFinite."""
        micro_batch = self.micro_batches[key]
        if micro_batch.start.forward_only:  # the optimizer step has nothing of it
            del self.micro_batches[key]
        output = micro_batch.output
        (loss,) = self._base.shards.losses([output.loss])
        if not isfinite(loss):
            raise self.not_finite(f"the loss became {loss}")
        return output

    def drop_activations(self) -> None:
        """Frees the activations of the step under way; its micro-batches cannot go on."""
        for micro_batch in self.micro_batches.values():
            micro_batch.drop()

    def change(self, config: SessionConfig) -> None:
        """Sets what later micro-batches keep, as `config` says. The optimizer stays as it is."""
        self.config = config
        self.fates = fates_of(self._base, self.weights.current.whole, config.keep, config.rows)

    def abandon(self, pass_number: int | None = None) -> None:
        """Frees all state of the step under way, gradients included; of the given pass alone, if it has
        begun."""
        for key, micro_batch in list(self.micro_batches.items()):
            if pass_number in (None, micro_batch.start.pass_number):
                micro_batch.drop()
                del self.micro_batches[key]
        if pass_number is None:
            self.weights.optimizer.drop_gradients()
        elif pass_number == self._pass:
            self.weights.optimizer.rollback()

    # optim_step

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Equal for sessions whose adapters and steps have the same shapes: their rows are multiplied
        together if they are adjacent."""
        return self._tokens, self._shape

    @property
    def _tokens(self) -> int:
        """Rows of the examples of the step under way, without prompts and padding."""
        prompt = self.weights.current.virtual.prompt_count
        starts = (micro_batch.start for micro_batch in self.micro_batches.values())
        return sum(sum(start.lengths) - start.padding - prompt for start in starts)

    @property
    def _labels(self) -> int:
        """Rows of the step under way that have a label."""
        return sum(micro_batch.labels for micro_batch in self.micro_batches.values())

    def loss_so_far(self) -> float:
        """Mean loss per label of the step under way."""
        losses = (m.loss for m in self.micro_batches.values() if m.loss is not None)
        return sum(float(loss) for loss in losses) / self._labels

    def accuracy_so_far(self) -> float:
        """Share of the labels of the step under way that are the likeliest token; 0 without a count."""
        return sum(float(m.hits) for m in self.micro_batches.values() if m.hits is not None) / self._labels

    def updated(self, loss: float, accuracy: float, norm: float, rate: float) -> Updated:
        """Ends an optimizer step whose weights are in `weights.room`: publishes them, and returns the
        report."""
        labels, tokens = self._labels, self._tokens
        is_counted = any(micro_batch.hits is not None for micro_batch in self.micro_batches.values())
        metrics = {ACCURACY: accuracy} if is_counted else {}
        self.micro_batches.clear()
        self.step += 1
        self.loss = loss
        self.weights.publish(self.weights.current.version + 1)
        return Updated(self.step, loss, labels, norm, rate, self.weights.current.key, tokens, metrics)

    def not_finite(self, what: str) -> LossNotFinite:
        """The error of a step whose loss, gradient or weights are not finite."""
        stays = f"the adapter stays at version {self.weights.current.key}"
        return LossNotFinite(f"job {self.job}: {what} at step {self.step + 1}; {stays}")

    # State

    def snapshot(self) -> Callable[[], TrainingState]:
        """Returns a function that copies the session's state after its last optimizer step, without the one
        under way. It may be called on any thread, while steps go on, also once the session is closed."""
        assert self._identity is not None, "what is saved says what it was trained on"
        adapter, step, identity, loss = self.weights.current, self.step, self._identity, self.loss
        read_optimizer = self.weights.optimizer.snapshot()

        def read() -> TrainingState:
            weights, moments = read_optimizer()
            return TrainingState(adapter.with_parameters(weights), moments, step, identity, loss)

        return read

    @property
    def held(self) -> dict[Account, int]:
        """Bytes held now, by account."""
        return {
            Account.ACTIVATIONS: sum(micro_batch.nbytes for micro_batch in self.micro_batches.values()),
            Account.OPTIMIZERS: self.weights.optimizer.nbytes,
            Account.ADAPTERS: self.weights.current.nbytes + self._reference.nbytes,
        }
