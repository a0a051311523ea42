"""Peers at their best settings: what is tried, what is chosen, and that settings change no result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from coserve.workload.requests import fixed_prompts, training_tokens
from coserve.workload.shapes import shape_named
from coserve_benchmarks import finetune, inference, peers
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.peers import (
    GenerateSettings,
    PeftTraining,
    StaticGenerate,
    TrainingSettings,
    best_of,
    has_compiler,
)
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import TINY
from coserve_benchmarks.timing import Timing

SHAPE = shape_named("tiny")


@dataclass(frozen=True)
class Named:
    name: str

    def describe(self) -> str:
        return f"called {self.name}"


def test_the_fastest_of_all_that_were_tried_is_chosen_warm() -> None:
    calls: list[str] = []

    def taking(name: str, *seconds: float) -> Callable[[], float]:
        left = list(seconds)
        return lambda: calls.append(name) or left.pop(0)  # type: ignore[func-returns-value]

    best, tried = best_of(
        {
            Named("a"): taking("a", 9.0, 3.0),
            Named("b"): taking("b", 5.9, 2.0),
            Named("c"): taking("c", 4.1),  # over twice the best, warm or not
        }
    )
    assert best == Named("b") and calls == ["a", "a", "b", "b", "c"]
    assert tried == {"called a": 3.0, "called b": 2.0, "called c": 4.1}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> tuple[StaticGenerate, list[torch.Tensor]]:
    peer = StaticGenerate(SHAPE, fixed_prompts(3, 20, SHAPE.vocabulary), 6)
    made: list[torch.Tensor] = []
    generate = peer._model.generate
    monkeypatch.setattr(peer._model, "generate", lambda *a, **m: made.append(generate(*a, **m)) or made[-1])
    return peer, made


def test_settings_of_generate_change_no_answer(answers: tuple[StaticGenerate, list[torch.Tensor]]) -> None:
    """In bfloat16 on random weights a tie may fall otherwise once; hardly ever for most of 18 tokens."""
    peer, made = answers
    for settings in (GenerateSettings(), GenerateSettings("static"), GenerateSettings(pad=64)):
        peer.use(settings)
        assert peer() > 0
    assert [one.shape[1] for one in made] == [26, 26, 70]
    first, *others = (one[:, -6:] for one in made)
    for other in others:
        assert float((first == other).float().mean()) > 0.6


def test_generate_is_tried_with_both_caches_and_pads(
    answers: tuple[StaticGenerate, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, _ = answers
    took = {"static cache, nothing padded": 0.5}
    monkeypatch.setattr(StaticGenerate, "__call__", lambda self: took.get(self.settings.describe(), 0.9))
    tried = peer.tune()
    assert [*tried] == [
        f"{cache} cache, {pads}"
        for cache in ("dynamic", "static")
        for pads in ("nothing padded", "padded to a multiple of 64")
    ]
    assert peer.settings == GenerateSettings("static")
    whole = StaticGenerate(SHAPE, fixed_prompts(2, 64, SHAPE.vocabulary), 2)
    assert [*whole.tune()] == ["dynamic cache, nothing padded", "static cache, nothing padded"]


def test_torch_compile_is_tried_where_it_is_asked_for_and_there_is_a_compiler(
    answers: tuple[StaticGenerate, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    peer, _ = answers
    monkeypatch.setattr(StaticGenerate, "__call__", lambda self: 1.0)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(peers, "has_compiler", lambda: True)
    assert "static cache, nothing padded, torch.compile" in peer.tune(compiled=True)
    assert "torch.compile" not in " ".join(peer.tune())
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not has_compiler()


@pytest.mark.parametrize("settings", [TrainingSettings(1), TrainingSettings(2), TrainingSettings(4, 1)])
def test_parts_of_a_mini_batch_take_the_same_step(settings: TrainingSettings) -> None:
    """Three examples are no multiple of two: parts weigh as many examples as they have."""
    data = training_tokens([12] * 3, SHAPE.vocabulary)
    found = []
    for chosen in (TrainingSettings(3), settings):
        torch.manual_seed(0)
        peer = PeftTraining(SHAPE, data, 4, matched=False)
        peer._settings[False] = chosen
        clipped: list[torch.Tensor] = []
        peer._optimizer.step = lambda clipped=clipped, peer=peer: clipped.extend(  # type: ignore[method-assign]
            p.grad.clone() for p in peer._trained
        )
        assert peer.step(checkpointing=False) > 0
        found.append(torch.cat([gradient.flatten() for gradient in clipped]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.03  # bfloat16's rounding


def test_training_is_tried_in_parts_and_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeftTraining(SHAPE, training_tokens([8] * 4, SHAPE.vocabulary), 4, matched=True)
    took = {"2 examples at once, all threads": 0.5}
    seen: list[int] = []

    def step(self: PeftTraining, settings: TrainingSettings) -> float:
        seen.append(torch.get_num_threads())
        return took.get(settings.describe(), 0.9)

    monkeypatch.setattr(PeftTraining, "_step", step)
    tried = peer.tune(checkpointing=True, threads=2)
    assert [*tried] == [
        "4 examples at once, all threads",
        "2 examples at once, all threads",
        "1 examples at once, all threads",
        "4 examples at once, 1 threads",
    ]
    assert peer.settings(True) == TrainingSettings(2) and peer.settings(False) == TrainingSettings(4)
    assert [*peer.tune(checkpointing=False, threads=1)] == [*tried][:3]
    assert seen[-1] == torch.get_num_threads()


def test_rows_list_the_settings_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SHAPE, TINY, measure_machine(quick=True), Results({}))
    monkeypatch.setattr(
        finetune, "alternate", lambda contestants, *_: {n: Timing((1.0,)) for n in contestants}
    )
    monkeypatch.setattr(PeftTraining, "_step", lambda self, settings: float(settings.micro_batch))
    data = training_tokens([8] * 4, SHAPE.vocabulary)
    default, matched = (PeftTraining(SHAPE, data, 4, matched=m) for m in (False, True))
    finetune._speed_rows(bench, None, "_checkpointing", default, matched)  # type: ignore[arg-type]
    found = bench.results.as_dict()
    for name in ("finetune.peft_checkpointing", "finetune.peft_checkpointing_matched"):
        assert found["peers"][name]["best"] == "1 examples at once, all threads"
        assert found["peers"][name]["tried"]["4 examples at once, all threads"] == 4.0
    assert "1 examples at once" in found["notes"]["finetune.vs_peft_checkpointing_matched"]
    assert inference._all({"x": 1.0, "y": 2.5}) == "x (1.00 s), y (2.50 s)"
