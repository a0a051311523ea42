"""One micro-batch's way there and back by hand, and the oracle of its gradients.

The oracle shares nothing with the walk: transformers' own model with its eager attention, PEFT's LoRA
modules, one example at a time, ordinary autograd. `models.Exact` keeps what the models compute in float32
in float64 on both sides.
"""

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import lora_adapter
from coserve import Engine, EngineConfig, Keep, LoRAConfig, TrainingConfig
from coserve.adapters.methods.lora import LoRABypass
from coserve.core.plan import Plan, Segment
from coserve.core.sequence import Direction, Span
from coserve.train.example import Example, epochs
from coserve.train.trainer import TrainingRun
from models import linear_paths, lora_parameters, prompts, tiny, with_lora

LORA = LoRAConfig(rank=4, alpha=6.0)  # as `with_lora` makes them
_HUGE = 1e14

Gradients = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Case:
    """Packed examples, an adapter, and the oracle's loss and gradients."""

    engine: Engine  # idle; its runner is driven by hand
    lengths: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    adapter: Gradients  # the parameters themselves, by path
    loss: float
    wanted: Gradients

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


def make_case(name: str, lengths: Sequence[int], **changes: object) -> Case:
    """Random examples of `lengths` for a model of architecture `name`, an adapter on all of its linears."""
    tokens, labels = examples(random.Random(f"gradients/{name}/{lengths}"), lengths)
    oracle = tiny(name, torch.float64, **changes)
    oracle.set_attn_implementation("eager")
    adapted = with_lora(oracle, seed=1)
    parameters = lora_parameters(adapted)
    flat = [p.requires_grad_() for pair in parameters.values() for p in pair]
    count = sum(label >= 0 for example in labels for label in example)
    loss = torch.zeros((), dtype=torch.float64)
    for example, of in zip(tokens, labels, strict=True):
        logits = adapted(input_ids=torch.tensor([example]), use_cache=False).logits[0]
        loss = loss + F.cross_entropy(logits, torch.tensor(of), ignore_index=-100, reduction="sum") / count
    assert parameters.keys() == set(linear_paths(tiny(name, **changes))), "every linear has an adapter"
    found = iter(torch.autograd.grad(loss, flat))
    wanted = {path: (next(found), next(found)) for path in parameters}
    return Case(
        engine=Engine(tiny(name, torch.float64, **changes), EngineConfig(calibrate=False, cache_tokens=64)),
        lengths=tuple(lengths),
        tokens=torch.tensor(list(itertools.chain(*tokens))),
        labels=torch.tensor(list(itertools.chain(*labels))),
        adapter={path: (a.detach().clone(), b.detach().clone()) for path, (a, b) in parameters.items()},
        loss=float(loss.detach()),
        wanted=wanted,
    )


class Passage:
    """The case's examples as one micro-batch, packed in `order`, that the caller sends through the runner
    window by window and span by span. The adapter is beside the linears in `paths`, else beside all.

    Gradients are read off one optimizer step that is made to be plain descent: with an epsilon that dwarfs
    every gradient and no memory, AdamW subtracts learning rate / epsilon (here 1e6) times the gradient.
    """

    def __init__(
        self, case: Case, keep: Keep, order: Sequence[int] | None = None, paths: Collection[str] | None = None
    ) -> None:
        self.case = case
        self.runner = case.engine.runner
        pairs = {path: case.adapter[path] for path in (case.adapter if paths is None else paths)}
        bypasses = {path: LoRABypass(a, b, LORA.scale(path, LORA.rank)) for path, (a, b) in pairs.items()}
        count = len(case.lengths)
        config = TrainingConfig(
            learning_rate=1e6 * _HUGE,
            epsilon=_HUGE,
            betas=(0.0, 0.0),
            schedule="constant",
            warmup_ratio=0.0,
            max_grad_norm=None,
            batch_size=count,
            rows=sum(case.lengths),
            keep=keep,
        )
        # The examples in places that the job's shuffling takes to the order wanted.
        (shuffled,) = epochs(count, count, 1, config.seed)
        placed = dict(zip(shuffled, range(count) if order is None else order, strict=True))
        data = [case.examples[placed[i]] for i in range(count)]
        self.before = lora_adapter("probe", 0, LORA, bypasses)
        self.run = TrainingRun(case.engine.base, case.engine.bank, "probe", self.before, data, config)
        self.runner.runs["probe"] = self.run
        (self.micro_batch,) = self.run.next_step(itertools.count(1))
        self.gradients: Gradients = {}

    def go(self, direction: Direction, start: int, rows: int, span: Span) -> None:
        segment = Segment(self.micro_batch, start, rows, direction, span)
        self.runner.run(Plan(training=(segment,)))

    def forward(self, start: int, rows: int, span: Span) -> None:
        self.go(Direction.KEEP, start, rows, span)

    def backward(self, start: int, rows: int, span: Span) -> None:
        """Back through the layers of `span`; rows that set out from the top pass the tail first."""
        if span.last == self.case.depth:
            self.go(Direction.LOSS, start, rows, Span(span.last, span.last + 1))
        self.go(Direction.BACKWARD, start, rows, span)

    def finish(self) -> float:
        """The loss, once all rows have been there and back; sets `gradients`."""
        result = self.runner.run(Plan(updates=("probe",)))
        after = self.case.engine.bank.find("probe")
        for path, bypass in self.before.bypasses.outputs.items():
            then, now = bypass.parameters(), after.bypasses.outputs[path].parameters()
            a, b = ((then[name] - now[name]) / 1e6 for name in ("lora_A", "lora_B"))
            self.gradients[path] = (a, b)
        return result.updated["probe"].loss

    def error(self) -> float:
        """The worst relative error of any matrix's gradient, and of the loss."""
        loss = self.finish()
        return max(worst(self.gradients, self.case.wanted), abs(loss - self.case.loss) / self.case.loss)


def worst(got: Gradients, wanted: Gradients) -> float:
    """The largest difference of two gradients of a matrix, relative to its norm."""
    assert got.keys() <= wanted.keys()
    return max(
        float((g - w).norm() / w.norm().clamp_min(1e-30))
        for path in got
        for g, w in zip(got[path], wanted[path], strict=True)
    )
