"""One micro-batch's way there and back by hand, and the oracle of its gradients.

The oracle shares nothing with the walk: transformers' own model with its eager attention, PEFT's modules (or
plain torch ones), one example at a time, ordinary autograd. `models.Exact` keeps what the models compute in
float32 in float64 on both sides. `methods.py` makes cases of any adapter method.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import lora_adapter
from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.lowrank import LoRABypass
from coserve.core.plan import BasePlan
from coserve.core.sequence import Direction, LossSpec, MicroBatch, Span
from coserve.schedule.segments import batch_start, training_segment
from coserve.train.example import Example, epochs
from coserve.train.micro_batch import MicroBatchState
from models import linear_paths, lora_parameters, prompts, tiny, with_lora
from rounding import largest
from training_runs import TrainingRun, adopt

LORA = LoRAConfig(rank=4, alpha=6.0)  # as `with_lora` makes them
_HUGE = 1e14

Gradients = dict[str, Tensor]


@dataclass
class Case:
    """Packed examples, an adapter, and the oracle's loss and gradients by name: by those of the adapter's
    parameters, or of these in files (`methods.py`)."""

    engine: Engine  # idle; its executor is driven by hand
    lengths: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    adapter: AdapterVersion
    loss: float
    wanted: Gradients
    spec: Callable[[MicroBatch], LossSpec] | None = None  # None: cross-entropy

    @property
    def depth(self) -> int:
        return self.engine.base.depth

    @property
    def examples(self) -> list[Example]:
        pairs = zip(self.tokens.split(self.lengths), self.labels.split(self.lengths), strict=True)
        return [Example(tuple(tokens.tolist()), tuple(labels.tolist())) for tokens, labels in pairs]


def examples(draws: random.Random, lengths: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and labels: row i predicts token i + 1, some rows nothing."""
    tokens = prompts(draws, lengths)
    labels = [[t if draws.random() < 0.8 else -100 for t in example[1:]] + [-100] for example in tokens]
    if len(labels) > 1:
        labels[0][:] = [-100] * len(labels[0])  # an example without any label in it
    return tokens, labels


def mean_loss(model: Callable[..., Any], tokens: list[list[int]], labels: list[list[int]]) -> Tensor:
    """Over all labels, one whole example at a time. Rows that the model puts before an example's own (virtual
    tokens) have no label."""
    count = sum(label >= 0 for example in labels for label in example)
    loss = torch.zeros((), dtype=torch.float64)
    for example, of in zip(tokens, labels, strict=True):
        logits = model(input_ids=torch.tensor([example]), use_cache=False).logits[0, -len(example) :]
        loss = loss + F.cross_entropy(logits, torch.tensor(of), ignore_index=-100, reduction="sum") / count
    return loss


def make_case(
    name: str, lengths: Sequence[int], loss_of: Callable[..., Tensor] = mean_loss, **changes: object
) -> Case:
    """Random examples of `lengths` for a model of architecture `name`, an adapter on all of its linears."""
    tokens, labels = examples(random.Random(f"gradients/{name}/{lengths}"), lengths)
    oracle = tiny(name, torch.float64, **changes)
    oracle.set_attn_implementation("eager")
    adapted = with_lora(oracle, seed=1)
    parameters = lora_parameters(adapted)
    flat = [p.requires_grad_() for pair in parameters.values() for p in pair]
    loss = loss_of(adapted, tokens, labels)
    assert parameters.keys() == set(linear_paths(tiny(name, **changes))), "every linear has an adapter"
    found = iter(torch.autograd.grad(loss, flat))
    bypasses = {
        path: LoRABypass(a.detach().clone(), b.detach().clone(), LORA.at([path]).scale(path, LORA.rank))
        for path, (a, b) in parameters.items()
    }
    return Case(
        engine=Engine(tiny(name, torch.float64, **changes), EngineConfig(calibrate=False, cache_tokens=64)),
        lengths=tuple(lengths),
        tokens=torch.tensor(list(itertools.chain(*tokens))),
        labels=torch.tensor(list(itertools.chain(*labels))),
        adapter=lora_adapter("probe", 0, LORA, bypasses),
        loss=float(loss.detach()),
        wanted={f"{path}.lora_{letter}": next(found) for path in parameters for letter in "AB"},
    )


class Passage:
    """The case's examples as one micro-batch, packed in `order`, that the caller sends through the executor
    window by window and span by span.

    Gradients are read off one optimizer step that is made to be plain descent: with an epsilon that dwarfs
    every gradient and no memory, AdamW subtracts learning rate / epsilon (here 1e6) times the gradient.
    """

    def __init__(self, case: Case, keep: SavePolicy, order: Sequence[int] | None = None) -> None:
        self.case = case
        self.executor = case.engine.executor
        count = len(case.lengths)
        config = TrainingConfig(
            learning_rate=1e6 * _HUGE,
            epsilon=_HUGE,
            betas=(0.0, 0.0),
            schedule="constant",
            warmup_ratio=0.0,
            max_grad_norm=None,
            batch_size=count,
            rows=sum(case.lengths) + case.adapter.virtual.prompt_count,
            keep=keep,
        )
        # The examples in places that the job's shuffling takes to the order wanted.
        (shuffled,) = epochs(count, count, 1, config.seed)
        placed = dict(zip(shuffled, range(count) if order is None else order, strict=True))
        data = [case.examples[placed[i]] for i in range(count)]
        self.run = TrainingRun(
            case.engine.base, case.engine.executor.worker.loaded, "probe", case.adapter, data, config
        )
        adopt(case.engine, self.run)
        self.before = self.run.state().adapter.parameters()
        (self.micro_batch,) = self.run.next_step(itertools.count(1))
        if case.spec is not None:
            self.micro_batch.loss = case.spec(self.micro_batch)
            self.run.session.begin(batch_start(self.micro_batch))
        self.gradients: Gradients = {}

    @property
    def state(self) -> MicroBatchState:
        """The micro-batch on the device."""
        return self.run.session.micro_batches[self.micro_batch.key]

    @property
    def rows(self) -> int:
        """Rows that mean something: the examples', and those of the adapter's prompt before them."""
        return self.micro_batch.length - sum(self.micro_batch.padding)

    def go(self, direction: Direction, start: int, rows: int, span: Span) -> None:
        segment = training_segment(self.micro_batch, start, rows, direction, span)
        self.executor.run(BasePlan(training=(segment,)))

    def forward(self, start: int, rows: int, span: Span) -> None:
        self.go(Direction.TRAIN_FORWARD, start, rows, span)

    def backward(self, start: int, rows: int, span: Span) -> None:
        """Back through the layers of `span`; rows that set out from the top pass the tail first."""
        if span.last == self.case.depth:
            self.go(Direction.LOSS, start, rows, Span(span.last, span.last + 1))
        self.go(Direction.BACKWARD, start, rows, span)

    def travel(self, there: int, back: int, draws: random.Random | None = None) -> None:
        """All rows forward in windows of `there` and back in windows of `back`; with `draws`, put down
        between random layers."""
        adopt(self.case.engine, self.run)
        for start, rows in windows(there, self.rows):
            for span in spans(self.case.depth, draws):
                self.forward(start, rows, span)
        if self.micro_batch.loss.couples:
            for start, rows in windows(back, self.rows):
                self.go(Direction.LOGPROBS, start, rows, Span(self.case.depth, self.case.depth + 1))
        for start, rows in reversed(windows(back, self.rows)):
            for span in reversed(list(spans(self.case.depth, draws))):
                self.backward(start, rows, span)

    def finish(self) -> float:
        """The loss, once all rows have been there and back; sets `gradients`."""
        result = self.executor.run(BasePlan(updates=(self.run.supervised.optim_step,)))
        after = self.run.state().adapter.parameters()
        self.gradients = {name: (then - after[name]) / 1e6 for name, then in self.before.items()}
        return result.updated["probe"].loss

    def error(self) -> float:
        """The worst relative error of any parameter's gradient, and of the loss."""
        loss = self.finish()
        return largest([worst(self.gradients, self.case.wanted), abs(loss - self.case.loss) / self.case.loss])


def windows(size: int, rows: int) -> list[tuple[int, int]]:
    """(start, length) of windows that cover all rows."""
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def spans(depth: int, draws: random.Random | None) -> Iterator[Span]:
    """The layers from below in random pieces: where one ends the window is put down."""
    first = 0
    while first < depth:
        last = depth if draws is None else draws.randint(first + 1, depth)
        yield Span(first, last)
        first = last


def worst(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], floor: float = 0.0) -> float:
    """The largest difference of two gradients of a parameter, relative to its norm, or to `floor` times the
    norm of all where that is more (some gradients are zero but for rounding)."""
    assert got.keys() <= wanted.keys()
    whole = float(torch.stack([w.norm() for w in wanted.values()]).norm())
    return largest(
        float((got[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(max(floor * whole, 1e-30)))
        for name in got
    )
