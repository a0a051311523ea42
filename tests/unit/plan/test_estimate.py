"""Estimates against what the parts of a program are known to hold, and against measuring."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from coserve.adapters.settings import settings_of
from coserve.memory.compiled import built_bytes
from coserve.plan.engine_run import EngineRun, refusals
from coserve.plan.estimate import Estimate, estimates
from coserve.plan.measure import MeasureOrder
from coserve.plan.recipes import METHODS
from coserve.plan.rows import PlanRequest, make_plan
from coserve.plan.stages import PlainLoss, Program, ProgramSize, Stage, System
from coserve.plan.subject import Subject, subject_of
from coserve.plan.torch_run import TorchRun
from coserve.train.fresh import fresh_adapter
from coserve.wire.control import decode_line, encode_line

CONFIG = LlamaConfig(
    hidden_size=64, num_hidden_layers=2, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=320, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
LOAD = ProgramSize(batch=2, length=48, cache_tokens=128)
WIDTH = 4  # bytes of a float32


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of("small", CONFIG, "float32")


@pytest.fixture(scope="module")
def full(subject: Subject) -> Estimate:
    """The whole model trains, in plain torch."""
    return of(subject, System.TORCH)


def parameters(subject: Subject) -> int:
    return sum(p.numel() for p in subject.build().parameters())


def program(system: System, method: str | None, **load: Any) -> Program:
    """An adapter's; with None the whole model's."""
    fields = ProgramSize(**{"batch": 2, "length": 48, "cache_tokens": 128, **load})
    parts = () if method is None else (METHODS[method],)
    return Program(method or "full", system, fields, trains=True, parts=parts)


def of(subject: Subject, system: System, method: str | None = None, **load: Any) -> Estimate:
    (found,) = estimates(subject, [program(system, method, **load)])
    return found


def test_full_fine_tuning_is_made_of_what_it_holds(subject: Subject, full: Estimate) -> None:
    weights = WIDTH * parameters(subject)
    parts = full.components
    assert parts.weights == pytest.approx(weights, rel=0.01)
    assert parts.optimizer == pytest.approx(2 * weights, rel=0.01), "two moments"
    assert parts.total == full.peaks[Stage.STEP] >= 4 * weights, "gradients too"
    assert list(full.peaks) == list(Stage)
    assert list(full.peaks.values()) == sorted(full.peaks.values())


def test_activations_grow_with_the_batch_and_the_weights_do_not(subject: Subject) -> None:
    """Linearly, as in the report's figure; what goes back adds less and less."""
    one, two, four = (
        of(subject, System.TORCH, None, batch=n, loss=PlainLoss.SUM).components for n in (2, 4, 8)
    )
    assert one.weights == two.weights == four.weights and one.optimizer == four.optimizer
    for part in ("no_grad", "activations"):
        steps = getattr(two, part) - getattr(one, part), getattr(four, part) - getattr(two, part)
        assert steps[1] == pytest.approx(2 * steps[0], rel=0.1), part
    assert one.backward > two.backward > four.backward
    assert four.backward < 0.001 * four.total


@pytest.mark.sample(2, per="system")
@pytest.mark.parametrize("system", list(System))
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_is_planned_for(subject: Subject, full: Estimate, system: System, method: str) -> None:
    found = of(subject, system, method).components
    assert 0 < found.optimizer < full.components.optimizer
    assert found.activations > 0
    if system is System.COSERVE and method in ("lora", "ia3", "p_tuning"):
        adapter = fresh_adapter_of(subject, method)
        # Master weights, their gradients and two moments in float32, and two versions.
        assert found.optimizer == pytest.approx(WIDTH * adapter * (4 + 1), rel=0.3)


def fresh_adapter_of(subject: Subject, method: str) -> int:
    """The number of trainable parameters of a method on this model."""
    from coserve.model.load import load_base

    adapter = fresh_adapter(load_base(subject.build()), "a", settings_of(METHODS[method]), 0)
    return sum(tensor.numel() for tensor in adapter.parameters().values())


def test_our_cache_is_the_engines(subject: Subject) -> None:
    """Keys and values of 128 tokens and a page of zeros, in two layers of two groups of 16."""
    found = of(subject, System.COSERVE, "lora").components
    assert found.cache == 2 * 2 * 2 * 16 * WIDTH * (128 + 16)


def test_activations_of_everything_are_larger(subject: Subject) -> None:
    lean = Program("lora", System.COSERVE, LOAD, True, (METHODS["lora"],), "inputs")
    full = Program("lora", System.COSERVE, LOAD, True, (METHODS["lora"],), "everything")
    peaks = [found.peaks[Stage.FORWARD] for found in estimates(subject, [lean, full])]
    products = 2 * 96 * WIDTH * (64 + 32 + 32 + 64 + 160 + 160 + 64)  # of both layers' linears
    assert 0.6 * products <= peaks[1] - peaks[0] <= 1.6 * products


@pytest.mark.parametrize("kind", [TorchRun, EngineRun])
def test_the_same_program_runs_with_data(subject: Subject, kind: type[TorchRun] | type[EngineRun]) -> None:
    """The estimate equals the bytes that the program itself counts when it runs."""
    system = System.TORCH if kind is TorchRun else System.COSERVE
    asked = program(system, "lora", length=16)
    run = kind(subject, asked, torch.device("cpu"))
    assert list(run.go()) == list(Stage)
    (whole,) = estimates(subject, [asked])
    found = whole.components
    assert (run.cache, run.optimizer) == (found.cache, found.optimizer)


def refusal(subject: Subject, asked: Program, memory: int, on_cpu: bool = True) -> str:
    (found,) = refusals(subject, [asked], memory, on_cpu)
    return found


@pytest.mark.slow
def test_the_engine_itself_refuses_what_does_not_fit(subject: Subject) -> None:
    asked = program(System.COSERVE, "lora", batch=4, length=256)
    assert refusal(subject, asked, 1 << 30) == ""
    assert refusal(subject, asked, built_bytes(), on_cpu=False) == "", "on a GPU nothing is set aside"
    assert "too few" in refusal(subject, asked, 100_000)
    short, enough = 100_000, 1 << 30
    while enough - short > 1 << 16:
        middle = (short + enough) // 2
        short, enough = (middle, enough) if refusal(subject, asked, middle) else (short, middle)
    said = refusal(subject, asked, short)
    assert "needs" in said and "fit with" in said, said


def test_what_a_server_sets_aside_for_libraries_is_no_room(subject: Subject) -> None:
    answers = replace(program(System.COSERVE, "lora"), trains=False)
    assert "for what libraries take in this process (128 MiB)" in refusal(subject, answers, built_bytes())


def test_an_order_says_all_that_a_program_is(subject: Subject) -> None:
    asked = Program(
        "lora", System.COSERVE, ProgramSize(3, 5, 64, PlainLoss.SUM), True, [dict(METHODS["lora"])], 1000
    )
    line = encode_line(MeasureOrder.of(subject, asked, "cpu", 2))
    order = decode_line(line, MeasureOrder)
    assert order.program == asked
    again = order.subject()
    assert again.dtype is subject.dtype and again.config.to_dict() == subject.config.to_dict()


@pytest.mark.slow
def test_a_plan_is_measured_in_fresh_processes(subject: Subject) -> None:
    """On a model so small nothing can be said of errors, but that there are figures for all stages."""
    recipes: Mapping[str, Any] = {}
    plan = make_plan(subject, PlanRequest(recipes, (1,), 8, 64, budget=1 << 40, device="cpu"))
    names = [(row["system"], row["name"]) for row in plan["rows"]]
    assert names == [("torch", "inference"), ("torch", "full fine-tuning"), ("coserve", "inference")]
    for row in plan["rows"]:
        assert row["measured"].keys() == row["peaks"].keys() == row["errors"].keys()
        assert row["fits"] and row["total"] == sum(row[part] for part in PARTS)
    assert plan["error"] == max(error for row in plan["rows"] for error in row["errors"].values())
    assert "resident" in plan["measure"]


PARTS = ("weights", "cache", "optimizer", "no_grad", "activations", "backward")
