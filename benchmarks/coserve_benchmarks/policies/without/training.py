"""PEFT as a trainer: whole mini-batches of the jobs of a workload, one job after another."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coserve.workload.requests import TimedJob, Tokens
from coserve.workload.shapes import ModelShape

_ROUNDS = 2  # optimizer steps, after the first, by which the adapter's dtype is chosen
_IGNORED = -100  # the label of padding


class PeftTrainer:
    """LoRA on a base of its own: forward with labels, backward, clipping, AdamW; nothing is computed twice.

    Its optimizer is set as coserve's is. `matched` keeps adapters in the base's dtype, as coserve computes;
    PEFT's default is float32. None takes what is faster on the first mini-batch, and stays without jobs.
    """

    def __init__(self, shape: ModelShape, jobs: Sequence[TimedJob], matched: bool | None = None) -> None:
        self._base: Any = shape.build()
        self._model: Any = None
        self._adapters: dict[_Kind, _Adapter] = {}
        self._jobs = deque(sorted(jobs, key=lambda job: job.at))
        self._batches: Iterator[Sequence[Tokens]] = iter(())
        self._next: Sequence[Tokens] | None = None  # the mini-batch that the present job goes on with
        self.matched = matched
        if self._jobs:
            self.matched = self._warm(self._jobs[0], (False, True) if matched is None else (matched,))
        for job in self._jobs:
            self._begin(job, bool(self.matched))

    def has_work(self, elapsed: float) -> bool:
        """Tells whether a job that had arrived `elapsed` seconds after the load's beginning has mini-batches
        left."""
        while self._next is None and self._jobs and self._jobs[0].at <= elapsed:
            job = self._jobs.popleft()
            self._begin(job, bool(self.matched))
            self._batches = mini_batches(job)
            self._next = next(self._batches, None)
        return self._next is not None

    def step(self) -> tuple[int, float]:
        """One optimizer step on the next mini-batch: (its tokens, its loss)."""
        assert self._next is not None, "asked `has_work` first"
        batch, self._next = self._next, next(self._batches, None)
        return sum(map(len, batch)), self._step(batch)

    def _warm(self, job: TimedJob, dtypes: Sequence[bool]) -> bool:
        """The faster of adapters that are `matched` or not, past their first steps."""
        batch = next(mini_batches(job))
        taken = dict.fromkeys(dtypes, 0.0)
        for turn in range(1 + (_ROUNDS if len(dtypes) > 1 else 0)):
            for matched in dtypes:
                self._begin(job, matched)
                started = time.perf_counter()
                self._step(batch)
                if turn:
                    taken[matched] += time.perf_counter() - started
        return min(taken, key=taken.__getitem__)

    def _begin(self, job: TimedJob, matched: bool) -> None:
        """Trains an adapter for this job from now on, from its first weights, with an optimizer that knows
        nothing yet. Jobs of one kind share an adapter: PEFT takes 0.3 s to add one, and is slow with many."""
        kind = _Kind(job.rank, job.targets, matched)
        if kind not in self._adapters:
            self._adapters[kind] = self._add(kind)
        adapter = self._adapters[kind]
        if self._model.active_adapter != adapter.name:
            self._model.set_adapter(adapter.name)
        with torch.no_grad():
            for weight, first in zip(adapter.weights, adapter.first, strict=True):
                weight.copy_(first)
        self._trained = adapter.weights
        self._optimizer = torch.optim.AdamW(self._trained, lr=2e-4, weight_decay=0.0, fused=True)

    def _add(self, kind: "_Kind") -> "_Adapter":
        from peft import LoraConfig, get_peft_model

        name = f"adapter-{len(self._adapters)}"
        targets = "all-linear" if kind.targets is None else list(kind.targets)
        lora = LoraConfig(r=kind.rank, lora_alpha=16, lora_dropout=0.0, target_modules=targets)
        if self._model is None:
            self._model = get_peft_model(self._base, lora, name, autocast_adapter_dtype=not kind.matched)
            self._model.train()
        else:
            self._model.add_adapter(name, lora, autocast_adapter_dtype=not kind.matched)
            self._model.set_adapter(name)
        weights = [p for p in self._model.parameters() if p.requires_grad]
        return _Adapter(name, weights, [weight.detach().clone() for weight in weights])

    def _step(self, batch: Sequence[Tokens]) -> float:
        loss = self._model(**tensors(batch), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties by which jobs share an adapter."""

    rank: int
    targets: tuple[str, ...] | None
    matched: bool


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Its name in PEFT, its parameters, and copies of what they were at first."""

    name: str
    weights: list[torch.nn.Parameter]
    first: list[torch.Tensor]


def mini_batches(job: TimedJob) -> Iterator[Sequence[Tokens]]:
    """Mini-batches of a job's optimizer steps: the examples in order, `epochs` times."""
    for _ in range(job.epochs):
        for start in range(0, len(job.examples), job.batch):
            yield job.examples[start : start + job.batch]


def tensors(batch: Sequence[Tokens]) -> dict[str, torch.Tensor]:
    """A model's inputs, [examples, tokens of the longest]. Padding is on the right and has no label; without
    any there is no mask, which attention would pay for."""
    longest = max(map(len, batch))
    ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch])
    if all(len(tokens) == longest for tokens in batch):
        return {"input_ids": ids, "labels": ids}
    lengths = torch.tensor([len(tokens) for tokens in batch])
    mask = torch.arange(longest) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, _IGNORED)}
