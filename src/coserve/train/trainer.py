"""A fine-tuning job on the device: its master weights, its examples, its tapes, its versions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank
from coserve.adapters.bypass import Bypass, Bypasses, exact_type
from coserve.adapters.methods import method_of
from coserve.core.plan import Updated
from coserve.core.row_buckets import pad_rows
from coserve.core.sequence import MicroBatch
from coserve.errors import ConfigError, LossNotFinite
from coserve.kernels.dropout import Mask
from coserve.memory.arena import Arena
from coserve.memory.ledger import Account
from coserve.model.base import Base
from coserve.train.backward import Backward
from coserve.train.example import IGNORED, Example, LossOn, epochs, pack, steps_per_epoch
from coserve.train.optim import AdamW, Optimizer
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.pruning.plan import fates_of
from coserve.train.rates import LearningRate, Schedule
from coserve.train.save_policy import Fates, SavePolicy, SavePolicySetting, save_policy
from coserve.train.state import Identity, TrainingState
from coserve.train.tape import Tape
from coserve.train.updating import update_all
from coserve.train.window import Window


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
    keep: SavePolicySetting = SavePolicy.INPUTS  # or the bytes that a micro-batch's tape may take
    weight: float = 1.0  # share among jobs that train at the same time

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "rows", "learning_rate", "weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"training.{name} must be positive, not {getattr(self, name)}")
        for name in ("batch_size", "epochs", "rows", "seed"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"training.{name} must be an integer, not {getattr(self, name)!r}")
        if self.max_steps is not None and (type(self.max_steps) is not int or self.max_steps < 1):
            raise ConfigError(f"training.max_steps must be at least 1, not {self.max_steps}")
        checks = {
            "learning_rate": math.isfinite(self.learning_rate),
            "weight_decay": 0.0 <= self.weight_decay < math.inf,
            "betas": len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas),
            "epsilon": 0.0 < self.epsilon < math.inf,
            "max_grad_norm": self.max_grad_norm is None or self.max_grad_norm > 0,
            "loss_on": self.loss_on in get_args(LossOn),
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigError(f"training.{name} is out of its range: {getattr(self, name)}")
        object.__setattr__(self, "keep", save_policy(self.keep))  # a name stands for the setting


@dataclass(slots=True)
class _InFlight:
    """A micro-batch of the step under way."""

    lengths: tuple[int, ...]  # rows of its examples
    tokens: Tensor
    labels: Tensor
    tape: Tape | None = None
    backward: Backward | None = None
    loss: Tensor | None = None  # summed over its labels, once it is through


@dataclass(slots=True)
class _Step:
    """One optimizer step: its examples, how many labels it averages over, its rows, the micro-batches it is
    made of."""

    examples: list[Example]
    labels: int
    tokens: int
    micro_batches: dict[int, _InFlight] = field(default_factory=dict)


class TrainingRun:
    """Trains one adapter. The scheduler decides when its rows travel; `update` ends an optimizer step.

    Master weights and gradients are in float32 (float64 on a float64 base); what serves and what is in the
    graph is a copy in the base's dtype, published as one immutable version after every step.

    `resume` is where an earlier run stopped; this one goes on from there, as that one would have. `digest` is
    that of the examples, and may be left empty where nothing will ever be resumed. `make_offload` makes the
    place where moments rest; without it they stay beside the weights.
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
        digest: str = "",
        resume: TrainingState | None = None,
        make_offload: MakeOffload | None = None,
    ) -> None:
        self.job, self.config, self.examples = job, config, examples
        self.weight = config.weight
        self.identity = Identity(digest, config.seed, config.batch_size, config.epochs)
        if resume is not None:
            self.identity.expect(resume.identity)
            start = replace(resume.adapter, name=start.name, version=start.version)
        self._base, self._bank, self._arena = base, bank, arena
        self._exact = exact_type(base.dtype)
        start = _in_order(start, base)
        settings = AdamW(config.betas, config.epsilon, config.weight_decay)
        self.optimizer = Optimizer(start.parameters(), self._exact, base.device, settings, make_offload)
        self._masters = self.optimizer.weights
        self.current = start.in_type(base.dtype)
        served = self.current.parameters()
        self._served_exact = [name for name, tensor in served.items() if tensor.dtype != base.dtype]
        self._shape = sorted((name, tuple(tensor.shape)) for name, tensor in served.items())
        self.room: list[Tensor] = []  # room for the version that an update makes
        self.steps = count_steps(len(examples), config)
        self._rate = LearningRate(
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_ratio=config.warmup_ratio,
            total_steps=self.steps,
        )
        self.step = 0
        self.loss: float | None = None  # of the last step
        if resume is not None:
            self.optimizer.restore(resume.moments)
            self.step, self.loss = resume.step, resume.loss
        self._batches = self._epochs()
        self._under_way: _Step | None = None
        self.make_room()
        torch._foreach_copy_(self.room, self.optimizer.flat)
        self._publish(start.version)
        self.fates = self._choose()

    def next_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, keyed from `keys`; none when training is over."""
        if self.step >= self.steps:
            return []
        return self._set_out([self.examples[i] for i in next(self._batches)], keys)

    def smaller_step(self, keys: Iterator[int]) -> list[MicroBatch]:
        """The optimizer step under way once more from its beginning, in micro-batches of half the rows that
        keep as little as there is to keep, and so from now on. What it is made of stays the same; what it
        held is free."""
        step = self._under_way
        assert step is not None, "no step is under way"
        self.abandon()
        self.optimizer.drop_gradients()
        self.config = replace(self.config, rows=max(1, self.config.rows // 2), keep=SavePolicy.INPUTS)
        self.fates = self._choose()
        return self._set_out(step.examples, keys)

    def _set_out(self, chosen: list[Example], keys: Iterator[int]) -> list[MicroBatch]:
        """A step of these examples, packed."""
        step = _Step(chosen, sum(e.label_count for e in chosen), sum(len(e) for e in chosen))
        made = []
        virtual = self.current.virtual
        prompt = virtual.prompt_count
        for indices in pack([len(e) for e in chosen], max(self.config.rows - prompt, 1)):
            packed = [chosen[i] for i in indices]
            lengths = tuple(len(e) for e in packed)
            padding = _padding(lengths, prompt)
            missing = sum(padding)
            micro_batch = MicroBatch(
                key=next(keys),
                job=self.job,
                adapter=self.current.key,
                lengths=(*[prompt] * bool(prompt), *lengths, *padding),
                layers=self._base.depth,
                padding=padding,
                prefix=virtual.given_count,
                prompt=prompt,
            )
            step.micro_batches[micro_batch.key] = _InFlight(
                micro_batch.lengths,
                self._tensor([*[0] * prompt, *(t for e in packed for t in e.tokens), *[0] * missing]),
                self._tensor(
                    [*[IGNORED] * prompt, *(t for e in packed for t in e.labels), *[IGNORED] * missing]
                ),
            )
            made.append(micro_batch)
        self._under_way = step
        return made

    def lengths(self, key: int) -> tuple[int, ...]:
        """Rows of the examples of a micro-batch of the step under way."""
        return self._in_flight(key).lengths

    def tape(self, key: int) -> Tape:
        """The tape of a micro-batch, made when its first window sets out."""
        in_flight = self._in_flight(key)
        if in_flight.tape is None:
            in_flight.tape = Tape(
                self._base,
                in_flight.lengths,
                in_flight.tokens,
                in_flight.labels,
                self.fates,
                self._arena,
                self._in_graph.virtual,
            )
        return in_flight.tape

    def backward(self, key: int) -> Backward:
        """The way back of a micro-batch."""
        in_flight = self._in_flight(key)
        if in_flight.backward is None:
            assert self._under_way is not None
            weight = 1.0 / self._under_way.labels
            in_flight.backward = Backward(self.tape(key), self._leaves, weight, self._accumulate)
        return in_flight.backward

    def bypasses(self, key: int, window: Window) -> Bypasses:
        """The version being trained, as the rows of `window` see it: with their dropout, and its prompts in
        place of what the first ones embed."""
        found = self._in_graph.bypasses
        if any(bypass.dropout for _, bypass in self._in_graph.placed()):
            assert self._under_way is not None
            index = list(self._under_way.micro_batches).index(key)
            name = f"{self.config.seed}/{self.step}/{index}"
            found = Bypasses.of(
                (place, _dropping(bypass, f"{name}/{place.path}", window.start))
                for place, bypass in self._in_graph.placed()
            )
        return self._in_graph.virtual.embedded(found, window.before, window.prompt)

    def make_room(self) -> None:
        """Takes the memory that an update needs, so that many can share one in which nobody runs out."""
        self.optimizer.bring()
        self.room = self.optimizer.slabs.empty(self._base.dtype, self._base.device)

    def update(self) -> Updated:
        """The optimizer's step, after every micro-batch has been there and back; publishes the next version.

        Raises LossNotFinite, with nothing changed: the last good version stays.
        """
        self.make_room()
        (found,) = update_all([self])
        if isinstance(found, LossNotFinite):
            raise found
        return found

    @property
    def rate(self) -> float:
        """The learning rate of the step under way."""
        return self._rate.at(self.step)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """The same for runs whose adapters and steps are of one shape: next to each other their rows are
        multiplied together."""
        rows = 0 if self._under_way is None else self._under_way.tokens
        return rows, self._shape

    def loss_so_far(self) -> float:
        """Of the step under way, by the label."""
        step = self._under_way
        assert step is not None
        return sum(float(t.loss) for t in step.micro_batches.values() if t.loss is not None) / step.labels

    def updated(self, loss: float, norm: float) -> Updated:
        """What to tell of a step that is done, whose weights lie in the room for them."""
        step, rate = self._under_way, self.rate
        assert step is not None
        self._under_way = None
        self.step += 1
        self.loss = loss
        self._publish(self.current.version + 1)
        return Updated(self.step, loss, step.labels, norm, rate, self.current.key, step.tokens)

    def not_finite(self, what: str) -> LossNotFinite:
        """What a step ends with whose numbers are none."""
        stays = f"the adapter stays at version {self.current.key}"
        return LossNotFinite(f"job {self.job}: {what} at step {self.step + 1}; {stays}")

    def state(self) -> TrainingState:
        """A copy of where the job stands after its last optimizer step, without the one under way."""
        adapter = self.current.with_parameters({name: _copy(p) for name, p in self._masters.items()})
        moments = {name: _copy(moment) for name, moment in self.optimizer.moments().items()}
        return TrainingState(adapter, moments, self.step, self.identity, self.loss)

    @property
    def is_under_way(self) -> bool:
        """Whether an optimizer step has begun and has not ended."""
        return self._under_way is not None

    @property
    def held(self) -> dict[Account, int]:
        """Bytes it holds now, by account."""
        tapes = [t.tape for t in self._under_way.micro_batches.values() if t.tape] if self._under_way else []
        return {
            Account.TAPES: sum(t.nbytes for t in tapes),
            Account.OPTIMIZERS: self.optimizer.nbytes,
            Account.ADAPTERS: self.current.nbytes,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of tapes, master weights, gradients and optimizer state."""
        return self.held[Account.TAPES] + self.held[Account.OPTIMIZERS]

    def release(self, key: int) -> None:
        """Drops the tape of a micro-batch that is through; its loss waits for the update."""
        in_flight = self._in_flight(key)
        assert in_flight.tape is not None
        in_flight.tape.release()
        in_flight.loss, in_flight.tape, in_flight.backward = in_flight.tape.loss, None, None

    def abandon(self) -> None:
        """Gives back what the step under way holds; the job goes no further."""
        self.drop_tapes()
        self._under_way = None

    def drop_tapes(self) -> None:
        """Gives back what the micro-batches of the step under way hold; none of them can go on."""
        for in_flight in self._under_way.micro_batches.values() if self._under_way else ():
            if in_flight.tape is not None:
                in_flight.tape.release()
            in_flight.tape = in_flight.backward = None

    def _publish(self, version: int) -> None:
        served = self.optimizer.slabs.views(self.room)
        served |= {name: self._masters[name].detach().clone() for name in self._served_exact}
        self.room = []
        self.current = replace(self.current.with_parameters(served), version=version)
        self._bank.publish(self.current)
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

    def _choose(self) -> Fates:
        """What its tapes keep."""
        config, prompt = self.config, self.current.virtual.prompt_count
        lengths = sorted(map(len, self.examples), reverse=True)
        step, longest = sum(lengths[: config.batch_size]), max(lengths, default=1)
        rows = pad_rows(min(max(config.rows, longest + prompt), step + prompt))
        return fates_of(self._base, self.current, config.keep, rows)

    def _in_flight(self, key: int) -> _InFlight:
        assert self._under_way is not None
        return self._under_way.micro_batches[key]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._base.device)

    def _epochs(self) -> Iterator[tuple[int, ...]]:
        config = self.config
        return epochs(len(self.examples), config.batch_size, config.epochs, config.seed, start=self.step)


def count_steps(examples: int, config: TrainingConfig) -> int:
    """Optimizer steps of a job with so many examples."""
    steps = steps_per_epoch(examples, config.batch_size) * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)


def _padding(lengths: tuple[int, ...], prompt: int) -> tuple[int, ...]:
    """Examples without labels that fill a micro-batch up to a row count in use, none longer than the real
    ones: positions are bounded."""
    rows, longest = prompt + sum(lengths), max(lengths)
    missing = pad_rows(rows) - rows
    whole, rest = divmod(missing, longest)
    return (*[longest] * whole, *[rest] * bool(rest))


def fresh_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """An adapter that changes nothing yet, or as little as its methods can. `config` are the settings of its
    method; of several, where it is to have several parts. Raises AdapterMismatch."""
    drawn = _drawn(base, name, config, seed)
    exact = exact_type(base.dtype)
    return drawn.with_parameters({n: p.to(base.device, exact) for n, p in drawn.parameters().items()})


def sketch_adapter(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    """What `fresh_adapter` would give, in shapes alone: nothing may be done with its tensors but count them.
    It takes no memory, unless a method's beginning depends on the base's weights (DoRA's norms)."""
    try:
        with torch.device("meta"):
            return _drawn(base, name, config, seed)
    except (RuntimeError, NotImplementedError):  # of mixing numbers that are there with some that are not
        return _drawn(base, name, config, seed)


def _drawn(base: Base, name: str, config: object | Sequence[object], seed: int) -> AdapterVersion:
    generator = torch.Generator("cpu").manual_seed(seed)
    configs = config if isinstance(config, Sequence) else (config,)
    return AdapterVersion(name, 0, tuple(method_of(c).fresh(c, base, generator) for c in configs))


def _in_order(adapter: AdapterVersion, base: Base) -> AdapterVersion:
    """With its bypasses in the model's order, whatever a file's was: a gradient's norm depends on it in its
    last bits."""
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
