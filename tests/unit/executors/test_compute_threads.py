"""The number of threads that computes a step of a streamed base."""

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.executors.compute_threads import ComputeThreads
from coserve.executors.local import LocalExecutor
from coserve.train.example import Example
from models import save, tiny


def run(chooser: ComputeThreads, seconds: dict[int, float], steps: int, kind: object = 1) -> list[int]:
    chosen = []
    for _ in range(steps):
        threads = chooser.choose(kind)
        chooser.observe(kind, threads, seconds[threads])
        chosen.append(threads)
    return chosen


@pytest.mark.parametrize("faster", [3, 4])
def test_the_faster_number_has_nearly_all_steps(faster: int) -> None:
    chooser = ComputeThreads(4)
    chosen = run(chooser, {3: 1.0, 4: 1.0} | {faster: 0.9}, 300)
    assert set(chosen) == {3, 4} and chosen.count(faster) >= 290


def test_kinds_are_apart_and_a_change_is_noticed() -> None:
    chooser = ComputeThreads(2)
    assert run(chooser, {1: 1.0, 2: 2.0}, 20, "few")[6:] == [1] * 14
    assert run(chooser, {1: 3.0, 2: 2.0}, 20, "many")[6:] == [2] * 14
    changed = run(chooser, {1: 2.5, 2: 2.0}, 400, "few")  # a faster disk
    assert changed[-60:].count(2) > 55


def test_a_thread_alone_computes_always() -> None:
    assert run(ComputeThreads(1), {1: 1.0}, 10) == [1] * 10


def test_steps_that_only_answer_from_a_streamed_base_choose(tmp_path: Path) -> None:
    """A step with training has all threads, as after each step; a base in memory never chooses."""
    folder = save(tiny("llama", num_hidden_layers=4), tmp_path)
    kinds: list[tuple[Hashable, int]] = []

    class Noted(ComputeThreads):
        def observe(self, kind: Hashable, threads: int, seconds: float) -> None:
            kinds.append((kind, threads))
            super().observe(kind, threads, seconds)

    before = torch.get_num_threads()
    for memory in ("auto", 400_000):
        torch.set_num_threads(2)
        engine = Engine(folder, EngineConfig(calibrate=False, cache_tokens=256, base_memory=memory))
        assert isinstance(engine.executor, LocalExecutor)
        engine.executor._threads = Noted(2)
        try:
            engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=12, ignore_eos=True))
            engine.run()
            assert torch.get_num_threads() == 2
            assert bool(kinds) == (memory != "auto")
            count = len(kinds)
            engine.finetune([Example((1, 2, 3), (2, 3, 4))], "mine", LoRAConfig(rank=1))
            engine.run()
            assert len(kinds) == count
        finally:
            torch.set_num_threads(before)
    assert {threads for _, threads in kinds} == {1, 2}
    assert {kind for kind, _ in kinds} == {1, 2}  # one row, and a prompt of three
