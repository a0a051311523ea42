"""Estimates a program's peaks and their components, by running it on tensors without data."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch

from coserve.memory.fake_tensors import BEFORE, fake_tensors
from coserve.plan.depth import Recorded, Segments, deepened, shallow
from coserve.plan.engine_run import EngineRun
from coserve.plan.stages import Peaks, Program, Run, Stage, System
from coserve.plan.subject import Subject
from coserve.plan.torch_run import TorchRun

Map = Callable[..., Iterable[Any]]  # as the builtin `map`


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes at the peak of a whole program, by purpose.

    `weights`, `cache` and `optimizer` are held throughout; `no_grad` are the further bytes of a pass without
    gradients, `activations` those that a forward pass with gradients adds, `backward` those that the backward
    pass adds.
    """

    weights: int
    cache: int
    optimizer: int
    no_grad: int
    activations: int
    backward: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A program's peaks by stage, and the components of the last one."""

    peaks: Peaks
    components: Components

    def without(self, nbytes: int) -> "Estimate":
        """The same with so many bytes of the weights elsewhere."""
        peaks = {stage: peak - nbytes for stage, peak in self.peaks.items()}
        return Estimate(peaks, replace(self.components, weights=self.components.weights - nbytes))


def make_run(subject: Subject, program: Program, device: torch.device) -> Run:
    """The program on a device."""
    kind = TorchRun if program.system is System.TORCH else EngineRun
    return kind(subject, program, device)


@contextmanager
def spread(processes: int) -> Iterator[Map]:
    """A `map` that begins all calls at once, in so many copies of this process, which may have no thread that
    holds a lock; with one process the plain `map`."""
    if processes == 1:
        yield map
        return
    context = get_context("fork")  # a fresh process imports for 4 to 6 s
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


def estimates(subject: Subject, programs: Sequence[Program], run_all: Map = map) -> Iterator[Estimate]:
    """For each program the peak bytes until each stage was reached, and their components. A deep model is run
    with few layers, where all of them are alike (`plan.depth`). Runs begin before this returns, where
    `run_all` can do that."""
    whole = subject.without_weights()
    few = [shallow(whole, program) for program in programs]
    asked = [(one, program) for own, program in zip(few, programs, strict=True) for one in own or [whole]]
    runs = iter(run_all(recorded, *zip(*asked, strict=True)))
    depth = getattr(subject.config.get_text_config(), "num_hidden_layers", 0)

    def found(own: Sequence[Subject], program: Program) -> Estimate:
        first, *rest = islice(runs, max(1, len(own)))
        run = (deepened([first, *rest], depth) or recorded(whole, program)) if own else first
        return estimate_of(run)

    return map(found, few, programs)


def recorded(subject: Subject, program: Program) -> Recorded:
    """Runs a program on tensors without data, with all of the subject's layers."""
    segments: dict[Stage, Segments] = {}
    with fake_tensors() as counted:
        run = make_run(subject, program, torch.device("cpu"))
        run.on_layer = counted.mark
        early = 0  # of the optimizer's bytes, those that are there when rows go forward
        for stage in run.go():
            if stage is Stage.LOADED:
                gc.collect()  # what loading left behind
                weights = counted.live - run.cache
                segments[stage] = [(BEFORE, counted.live)]
            counted.mark(BEFORE)
            if stage is not Stage.LOADED:
                segments[stage] = [*counted.segments]
            if stage is Stage.FORWARD:
                early = run.optimizer
            counted.segments.clear()
        return Recorded(segments, weights, run.cache, run.optimizer, early)


def estimate_of(run: Recorded) -> Estimate:
    """Splits the last stage's peak into components. Each takes what it needs as long as bytes are left:
    memory freed before the peak is not part of it."""
    peaks = run.peaks
    left = list(peaks.values())[-1]
    no_grad = peaks[Stage.INFERENCE] - run.weights - run.cache
    forward = peaks.get(Stage.FORWARD, peaks[Stage.INFERENCE]) - peaks[Stage.INFERENCE] - run.early
    found = []
    for wanted in (run.weights, run.cache, run.optimizer, no_grad, forward, left):
        found.append(max(0, min(wanted, left)))
        left -= found[-1]
    return Estimate(peaks, Components(*found))
