"""Executors' processes that begin by a fork (`forking.py`) and compute as the tests do."""

import mmap
import os
import random
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, TrainingSegment
from coserve.executors.remote import RemoteExecutor
from coserve.model import load
from coserve.model.base import Base
from coserve.model.chain import Chain
from coserve.train import backward, updating
from coserve.train.session import TrainingSession
from coserve.train.tail import Tail
from coserve.train.window_group import ForwardWindow
from coserve.worker import training_passes
from coserve.worker.fused_pass import FusedPass
from coserve.worker.inference import InferenceBatch
from coserve.worker.opening import open_remote
from coserve.worker.sampler import Sampler
from coserve.worker.sequence_table import SequenceTable
from coserve.worker.worker import Worker
from forking import forked
from models import MIXTURES, Exact


def compute_as_tests_do(shared: int) -> None:
    """In executors' processes: float64 models are float64 throughout, as the tests' own are, whereas those of
    a folder have their rotary tables in float32 and fused experts, whose products have no float64. And plans
    and commands run under `Exact` while it holds in the tests' process, which byte 0 of `shared` tells."""
    is_exact = mmap.mmap(shared, mmap.PAGESIZE)
    plain = load.load_model

    def loaded(model: str | Path, dtype: torch.dtype | str) -> PreTrainedModel:
        made = plain(model, dtype)
        if made.dtype != torch.float64:
            return made
        if made.config.model_type in MIXTURES:
            made.set_experts_implementation("eager")
        return made.to(torch.float64)

    def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            with Exact() if is_exact[0] else nullcontext():
                return function(*args, **named)

        return run

    load.load_model = loaded
    run_short(is_exact, setattr)
    plant(is_exact, setattr)
    plant_errors(setattr)
    for name in ("run", "call"):
        setattr(Worker, name, exactly(getattr(Worker, name)))


def run_short(told: mmap.mmap, patch: Callable[[object, str, Any], object]) -> None:
    """Has memory run out in passes that several share: in so many of a hundred as byte 1 says, before a layer
    that is drawn, by numbers that byte 2 is the seed of."""
    draws = random.Random()
    forward, gradients = Chain.forward, backward.layer_gradients

    def fails() -> bool:
        if told[3]:
            draws.seed(told[2])
            told[3] = 0
        return draws.random() * 100 < told[1]

    def forwarded(chain: Chain, travellers: Sequence[Any], layers: range | None = None, **rest: Any) -> None:
        sharing = sum(len(getattr(one, "segments", (one,))) for one in travellers)
        span = range(len(chain)) if layers is None else layers
        if sharing > 1 and span and fails():
            forward(chain, travellers, range(span.start, draws.choice(span)), **rest)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        forward(chain, travellers, layers, **rest)

    def of_layer(layer: int, windows: Sequence[Any], *rest: Any) -> Any:
        if len(windows) > 1 and fails():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return gradients(layer, windows, *rest)

    patch(Chain, "forward", forwarded)
    patch(backward, "layer_gradients", of_layer)


@contextmanager
def short_memory(percent: int, seed: int = 0) -> Iterator[None]:
    """Has memory run out in so many of a hundred passes that several share, where `run_short` is patched in:
    in executors' processes, and where a test does it in this one."""
    _MEMORY[2], _MEMORY[3] = seed, 1
    _MEMORY[1] = percent
    try:
        yield
    finally:
        _MEMORY[1] = 0


class Planted(TorchDispatchMode):
    """Has memory run out where torch allocates, while plans run: in the part of a step that byte 4 names (of
    PARTS, from 1 on; 0 for none), after as many allocations there as bytes 5 and 6 say, as often as byte 7
    says, with byte 9 allocations in between. Byte 8 counts."""

    def __init__(self, told: mmap.mmap) -> None:
        super().__init__()
        self._told = told
        self.part = PARTS[0]
        self.seen = Counter[str]()  # allocations, by part

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        makes = any(str(one.type) != "Scalar" and one.alias_info is None for one in func._schema.returns)
        if makes and any(one.nbytes for one in tree_leaves(out) if isinstance(one, torch.Tensor)):
            self.seen[self.part] += 1
            if self._told[7] and PARTS[self._told[4] - 1] == self.part and self._is_due():
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return out

    def _is_due(self) -> bool:
        if left := int.from_bytes(self._told[5:7]):
            self._told[5:7] = (left - 1).to_bytes(2)
            return False
        self._told[5:7] = self._told[9].to_bytes(2)
        self._told[7] -= 1
        self._told[8] += 1
        return True

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a part of a step."""

        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            outer, self.part = self.part, part
            try:
                return function(*args, **named)
            finally:
                self.part = outer

        return run


# Parts of a step where memory runs out; the first is what is in none of the others.
PARTS = ("other", "layers", "head", "draw", "note", "fill", "begin", "tail", "back", "update")


def plant(told: mmap.mmap, patch: Callable[[object, str, Any], object]) -> Planted:
    """Has memory run out as `Planted` is told."""
    planted = Planted(told)
    places: dict[str, tuple[object, str]] = {
        "layers": (Chain, "forward"),
        "head": (Base, "tail"),
        "draw": (Sampler, "draw"),
        "note": (Sampler, "note"),
        "fill": (FusedPass, "fill"),
        "begin": (Worker, "_begin"),
        "tail": (Tail, "loss"),
        "back": (backward, "layer_gradients"),
        "update": (training_passes, "update_all"),
    }
    for part, (owner, name) in places.items():
        patch(owner, name, planted.within(part, getattr(owner, name)))
    run = Worker.run

    def planted_run(worker: Worker, plan: BasePlan) -> BaseResult:
        with planted:
            return run(worker, plan)

    patch(Worker, "run", planted_run)
    return planted


def plant_here(patch: pytest.MonkeyPatch) -> Planted:
    """Has `plant_shortages` hold in this process too."""
    return plant(_MEMORY, patch.setattr)


@contextmanager
def shortages(part: str, after: int, times: int, between: int) -> Iterator[Callable[[], int]]:
    """Has memory run out in a part of steps, where `plant` is patched in. Gives how often it has."""
    _MEMORY[8], _MEMORY[9] = 0, between
    _MEMORY[5:7] = after.to_bytes(2)
    _MEMORY[4], _MEMORY[7] = PARTS.index(part) + 1, times
    try:
        yield lambda: _MEMORY[8]
    finally:
        _MEMORY[7] = 0


POISON = 61  # the first token of a prompt whose answer fails in the middle of a pass; others have none
PASSED = 4  # tokens of such an answer that are fed back before that
NOTED = 7  # tokens of an answer of `UNNOTED` before that: no pass fails in the same step
UNNOTED = 60  # the first token of a prompt whose answer fails where its token is noted
POISONED = {"early": 0, "late": 2}  # jobs that fail on their way forward, after so many micro-batches
UNSTEPPED = {"unstepped": 1, "unpublished": 2}  # jobs that fail in an optimizer step, after so many
_SEEN: dict[str, set[int]] = {}  # keys of the micro-batches of such jobs


class PoisonedBatch(InferenceBatch):
    """Rows of which one request's raise an error in the second layer, which has written keys and values."""

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        super().take(layer, hidden)
        if layer > 0:
            raise ValueError("planted")


class PoisonedWindow(ForwardWindow):
    """A window that raises an error in the second layer, in place of keeping its output."""

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        if layer > 0:
            raise ValueError("planted")
        super().take(layer, hidden)


def plant_errors(patch: Callable[[object, str, Any], object]) -> None:
    """Has rows of `POISON` and of `POISONED` jobs raise errors, and tokens of `UNNOTED` and steps of
    `UNSTEPPED` jobs."""
    plain_batch, plain_window = FusedPass._batch, training_passes._forward_window
    plain_noted, plain_norms, plain_published = SequenceTable.sampled, updating._norms, updating._published

    def batch(fused: FusedPass, segments: Sequence[InferenceSegment], *rest: Any) -> InferenceBatch:
        made = plain_batch(fused, segments, *rest)
        own = [fused.table[segment.key] for segment in segments]
        fails = any(one.request.prompt[0] == POISON and len(one.output) > PASSED for one in own)
        return PoisonedBatch(**_fields(made)) if fails else made

    def window(segment: TrainingSegment, *rest: Any) -> ForwardWindow:
        made = plain_window(segment, *rest)
        passed = POISONED.get(segment.job.partition(" ")[0])
        if passed is None:
            return made
        seen = _SEEN.setdefault(segment.job, set())
        seen.add(segment.key)
        return PoisonedWindow(**_fields(made)) if len(seen) > passed else made

    def noted(table: SequenceTable, keys: Sequence[int], *rest: Any) -> list[int]:
        own = [table[key] for key in keys]
        if any(one.request.prompt[0] == UNNOTED and len(one.output) == NOTED for one in own):
            raise ValueError("planted")
        return plain_noted(table, keys, *rest)

    def expect(session: TrainingSession, kind: str) -> None:
        if session.job.partition(" ")[0] == kind and session.step == UNSTEPPED[kind]:
            raise ValueError("planted")

    def norms(due: Sequence[updating.Due], *rest: Any) -> list[float]:
        for session, _ in due:
            expect(session, "unstepped")
        return plain_norms(due, *rest)

    def published(session: TrainingSession, *rest: Any) -> Any:
        expect(session, "unpublished")
        return plain_published(session, *rest)

    patch(SequenceTable, "sampled", noted)
    patch(updating, "_norms", norms)
    patch(updating, "_published", published)
    patch(FusedPass, "_batch", batch)
    patch(training_passes, "_forward_window", window)


def _fields(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in fields(made)}


def run_short_here(patch: pytest.MonkeyPatch) -> None:
    """Has `short_memory` hold in this process too."""
    run_short(_MEMORY, patch.setattr)


_SHARED = os.memfd_create("tests")  # byte 0 counts how many `Exact` hold in the tests' process
os.ftruncate(_SHARED, mmap.PAGESIZE)
_MEMORY = mmap.mmap(_SHARED, mmap.PAGESIZE)
_RUN = "from forked_executors import serve; serve()"


def start_process(descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    """See `remote.start_process`."""
    command = [sys.executable, "-c", _RUN, str(_SHARED), *map(str, descriptors)]
    with forked():
        return subprocess.Popen(command, pass_fds=[_SHARED, *descriptors], stdin=subprocess.DEVNULL, stdout=2)


def serve() -> None:
    """Serves an executor, in its process."""
    compute_as_tests_do(int(sys.argv.pop(1)))
    runpy.run_module("coserve.worker.service", run_name="__main__")


def fork_executors(patch: pytest.MonkeyPatch) -> None:
    """Has executors' processes begin by a fork."""
    patch.setattr("coserve.executors.remote.start_process", start_process)


def compute_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Has every engine compute in a process of its own. A test that looks into an executor is skipped: what
    it looks at is not in this process."""
    fork_executors(patch)

    def is_elsewhere(executor: RemoteExecutor, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"looks at the executor's {name}, which is in another process")

    def enter(mode: Exact) -> Exact:
        _MEMORY[0] += 1
        return plain_enter(mode)

    def leave(mode: Exact, *fault: Any) -> None:
        plain_exit(mode, *fault)
        _MEMORY[0] -= 1

    plain_enter, plain_exit = Exact.__enter__, Exact.__exit__
    patch.setattr(Exact, "__enter__", enter)
    patch.setattr(Exact, "__exit__", leave)
    patch.setattr(RemoteExecutor, "__getattr__", is_elsewhere, raising=False)
    patch.setattr("coserve.engine.engine.open_executor", open_remote)
