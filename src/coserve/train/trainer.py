"""A fine-tuning job on the device: its master weights, its examples, its tapes, its versions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank
from coserve.adapters.methods.lora import LoRABypass, LoRAConfig
from coserve.core.plan import Updated
from coserve.core.sequence import MicroBatch
from coserve.errors import AdapterMismatch, ConfigError, LossNotFinite
from coserve.kernels.dropout import Mask
from coserve.memory.arena import Arena
from coserve.model.base import Base
from coserve.model.batch import Bypass
from coserve.train.example import Example, LossOn, epochs, pack, steps_per_epoch
from coserve.train.rates import LearningRate, Schedule
from coserve.train.tape import Keep, Tape, Window
from coserve.train.walk import Walk


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How an adapter is trained.

    `batch_size` examples make one optimizer step, however many micro-batches of at most `rows` rows they
    are packed into. `max_steps` ends before `epochs` do.
    """

    learning_rate: float = 2e-4
    schedule: Schedule = "linear"  # after the warm-up
    warmup_ratio: float = 0.03
    batch_size: int = 8
    epochs: int = 1
    max_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0  # None does not clip
    seed: int = 0
    max_length: int | None = None  # tokens an example is cut to; None cuts nothing
    loss_on: LossOn = "assistant"  # or "all"
    rows: int = 2048
    keep: Keep = Keep.INPUTS
    weight: float = 1.0  # share among jobs that train at the same time

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "rows", "learning_rate", "weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"training.{name} must be positive, not {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"training.max_steps must be at least 1, not {self.max_steps}")


@dataclass(slots=True)
class _Travelling:
    """A micro-batch of the step under way."""

    tokens: Tensor
    labels: Tensor
    tape: Tape | None = None
    walk: Walk | None = None
    loss: Tensor | None = None  # summed over its labels, once it is through


@dataclass(slots=True)
class _Step:
    """One optimizer step: how many labels it averages over and the micro-batches it is made of."""

    labels: int
    micro_batches: dict[int, _Travelling] = field(default_factory=dict)


class TrainingRun:
    """Trains one adapter. The scheduler decides when its rows travel; `update` ends an optimizer step.

    Master weights and gradients are in float32 (float64 on a float64 base); what serves and what is in the
    graph is a copy in the base's dtype, published as one immutable version after every step.
    """

    def __init__(
        self,
        base: Base,
        bank: AdapterBank,
        job: str,
        start: AdapterVersion,
        examples: Sequence[Example],
        config: TrainingConfig,
        arena: Arena | None = None,
    ) -> None:
        self.job, self.config, self.examples = job, config, examples
        self._base, self._bank, self._arena = base, bank, arena
        self._exact = torch.promote_types(base.dtype, torch.float32)
        self.current = start
        self._masters = {
            path: tuple(_master(p, self._exact, base.device) for p in bypass.parameters())
            for path, bypass in start.bypasses.items()
        }
        self._flat = [p for pair in self._masters.values() for p in pair]
        self._optimizer = torch.optim.AdamW(
            self._flat,
            lr=0.0,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps = self._count_steps()
        self._rate = LearningRate(
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_ratio=config.warmup_ratio,
            total_steps=self.steps,
        )
        self._batches = self._epochs()
        self.step = 0
        self._under_way: _Step | None = None
        self._publish(start.version)

    def next_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, keyed from `keys`; none when training is over."""
        if self.step >= self.steps:
            return []
        chosen = [self.examples[i] for i in next(self._batches)]
        step = _Step(sum(example.label_count for example in chosen))
        made = []
        for indices in pack([len(e) for e in chosen], self.config.rows):
            packed = [chosen[i] for i in indices]
            lengths = tuple(len(e) for e in packed)
            micro_batch = MicroBatch(next(keys), self.job, self.current.key, lengths, self._base.depth)
            step.micro_batches[micro_batch.key] = _Travelling(
                self._tensor([t for e in packed for t in e.tokens]),
                self._tensor([t for e in packed for t in e.labels]),
            )
            made.append(micro_batch)
        self._under_way = step
        return made

    def tape(self, micro_batch: MicroBatch) -> Tape:
        """The tape of a micro-batch, made when its first window sets out."""
        travelling = self._travelling(micro_batch)
        if travelling.tape is None:
            travelling.tape = Tape(
                self._base,
                micro_batch.lengths,
                travelling.tokens,
                travelling.labels,
                self.config.keep,
                self._arena,
            )
        return travelling.tape

    def walk(self, micro_batch: MicroBatch) -> Walk:
        """The way back of a micro-batch."""
        travelling = self._travelling(micro_batch)
        if travelling.walk is None:
            assert self._under_way is not None
            weight = 1.0 / self._under_way.labels
            travelling.walk = Walk(self.tape(micro_batch), self._leaves, weight, self._accumulate)
        return travelling.walk

    def bypasses(self, micro_batch: MicroBatch, window: Window) -> Mapping[str, Bypass]:
        """The version being trained, as the rows of `window` see it: with their dropout."""
        config = self.current.config
        if not config.dropout:
            return self._in_graph
        assert self._under_way is not None
        index = list(self._under_way.micro_batches).index(micro_batch.key)
        key = f"{self.config.seed}/{self.step}/{index}"
        return {
            path: bypass.dropping(Mask(config.dropout, f"{key}/{path}", window.start))
            for path, bypass in self._in_graph.items()
        }

    def update(self) -> Updated:
        """The optimizer's step, after every micro-batch has been there and back; publishes the next version.

        Raises LossNotFinite, with nothing changed: the last good version stays.
        """
        step = self._under_way
        assert step is not None
        loss = sum(float(t.loss) for t in step.micro_batches.values() if t.loss is not None) / step.labels
        limit = self.config.max_grad_norm
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self._flat if p.grad is not None]))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._not_finite(f"the loss became {loss} (gradient norm {norm})")
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self._flat, limit, torch.tensor(norm, dtype=self._exact))
        rate = self._rate.at(self.step)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not math.isfinite(float(torch.nn.utils.get_total_norm(self._flat))):
            raise self._not_finite(f"the weights left the numbers at a learning rate of {rate:g}")
        self.step += 1
        self._under_way = None
        self._publish(self.current.version + 1)
        return Updated(self.step, loss, step.labels, norm, rate, self.current.key)

    def _not_finite(self, what: str) -> LossNotFinite:
        stays = f"the adapter stays at version {self.current.key}"
        return LossNotFinite(f"job {self.job}: {what} at step {self.step + 1}; {stays}")

    @property
    def nbytes(self) -> int:
        """Bytes of tapes, master weights, gradients and optimizer state."""
        tapes = [t.tape for t in self._under_way.micro_batches.values() if t.tape] if self._under_way else []
        state = [v for s in self._optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        grads = [p.grad for p in self._flat if p.grad is not None]
        return sum(t.nbytes for t in tapes) + sum(t.nbytes for t in (*self._flat, *grads, *state))

    def release(self, micro_batch: MicroBatch) -> None:
        """Drops the tape of a micro-batch that is through; its loss waits for the update."""
        travelling = self._travelling(micro_batch)
        assert travelling.tape is not None
        travelling.tape.release()
        travelling.loss, travelling.tape, travelling.walk = travelling.tape.loss, None, None

    def abandon(self) -> None:
        """Gives back what the step under way holds; the job goes no further."""
        if self._under_way is not None:
            for travelling in self._under_way.micro_batches.values():
                if travelling.tape is not None:
                    travelling.tape.release()
            self._under_way = None

    def _publish(self, version: int) -> None:
        copies = {
            path: bypass.with_parameters(
                tuple(p.detach().to(self._base.dtype, copy=True) for p in self._masters[path])
            )
            for path, bypass in self.current.bypasses.items()
        }
        self.current = AdapterVersion(self.current.name, version, self.current.config, copies)
        self._bank.publish(self.current)
        self._take_leaves()

    def _take_leaves(self) -> None:
        """Graph leaves that share storage with the published version, and where their gradients go."""
        self._in_graph: dict[str, LoRABypass] = {}
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        self._master_of: dict[int, Tensor] = {}  # by the id of a leaf
        for path, bypass in self.current.bypasses.items():
            leaves = tuple(p.detach().requires_grad_() for p in bypass.parameters())
            self._in_graph[path] = bypass.with_parameters(leaves)
            layer = self._base.layer_linears[path]
            self._leaves[layer] = (*self._leaves.get(layer, ()), *leaves)
            self._master_of.update(zip(map(id, leaves), self._masters[path], strict=True))

    def _accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        master = self._master_of[id(leaf)]
        if master.grad is None:
            master.grad = gradient.to(self._exact, copy=True)
        else:
            master.grad += gradient

    def _travelling(self, micro_batch: MicroBatch) -> _Travelling:
        assert self._under_way is not None
        return self._under_way.micro_batches[micro_batch.key]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._base.device)

    def _epochs(self) -> Iterator[tuple[int, ...]]:
        config = self.config
        return iter(epochs(len(self.examples), config.batch_size, config.epochs, config.seed))

    def _count_steps(self) -> int:
        steps = steps_per_epoch(len(self.examples), self.config.batch_size) * self.config.epochs
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)


def fresh_adapter(base: Base, name: str, config: LoRAConfig, seed: int) -> AdapterVersion:
    """A LoRA adapter that changes nothing yet, beside the linears of the layers that `config` names."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.promote_types(base.dtype, torch.float32)
    bypasses = {}
    for path in base.layer_linears:
        if config.matches(path):
            linear = base.linears[path]
            drawn = LoRABypass.fresh(linear.in_features, linear.out_features, config, generator)
            bypasses[path] = drawn.with_parameters(
                tuple(p.to(base.device, exact) for p in drawn.parameters())
            )
    unmatched = [t for t in config.targets if not any(p == t or p.endswith("." + t) for p in bypasses)]
    if unmatched or not bypasses:
        endings = sorted({p.rpartition(".")[2] for p in base.layer_linears})
        raise AdapterMismatch(f"no linear of the decoder layers is called {unmatched}; there are {endings}")
    return AdapterVersion(name, 0, config, bypasses)


def _master(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return parameter.detach().to(device=device, dtype=dtype, copy=True).requires_grad_()
