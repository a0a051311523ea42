"""Estimates of deep models from few layers, against the whole model on tensors without data."""

from copy import deepcopy
from dataclasses import replace

import pytest
from transformers import AutoConfig, LlamaConfig

from coserve.plan.depth import deepened, shallow
from coserve.plan.estimate import estimate_of, estimates, recorded, spread
from coserve.plan.recipes import METHODS
from coserve.plan.stages import PlainLoss, Program, ProgramSize, Stage, System
from coserve.plan.subject import Subject, subject_of
from coserve.train import tail

# A page of one layer's keys and values has 4096 bytes: buffers for pages are aligned to as many.
CONFIG = LlamaConfig(
    hidden_size=128, num_hidden_layers=9, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=320, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
LOAD = ProgramSize(batch=3, length=48, cache_tokens=256)
LONG = replace(LOAD, batch=1, length=200, loss=PlainLoss.SUM)
CASES = [(System.TORCH, None), *((system, method) for system in System for method in METHODS)]


def subject(depth: int) -> Subject:
    config = deepcopy(CONFIG)
    config.num_hidden_layers = depth
    return subject_of("deep", config, "bfloat16")


@pytest.mark.sample(1)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("depth", "load"), [(7, LOAD), (13, LONG)])
@pytest.mark.parametrize(("system", "method"), CASES)
def test_few_layers_tell_the_bytes_of_many(
    system: System, method: str | None, trains: bool, depth: int, load: ProgramSize
) -> None:
    parts = () if method is None else (METHODS[method],)
    asked, own = Program(method or "full", system, load, trains, parts), subject(depth)
    found = deepened([recorded(few, asked) for few in shallow(own, asked)], depth)
    whole = recorded(own, asked)
    assert found is not None and found.peaks == whole.peaks
    assert estimate_of(found).components == estimate_of(whole).components


@pytest.mark.slow
def test_processes_tell_the_same() -> None:
    programs = [
        Program("lora", system, LOAD, True, (METHODS["lora"],)) for system in (System.TORCH, System.COSERVE)
    ]
    with spread(2) as run_all:
        assert list(estimates(subject(7), programs, run_all)) == list(estimates(subject(7), programs))


def test_chunks_of_the_loss_that_are_alike_are_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of all chunks, at sizes where the loss has the peak: the last of five, which is
    smaller, has fewer."""
    own = subject(3)
    own.config.vocab_size = 40_000
    monkeypatch.setitem(tail._LOGITS_PER_CHUNK, "cpu", own.config.vocab_size * 64)
    asked = Program("lora", System.COSERVE, replace(LOAD, batch=5, length=55), True, (METHODS["lora"],))
    few = recorded(own, asked)
    monkeypatch.setattr(tail, "unlike", lambda chunks: chunks)
    assert few.peaks == recorded(own, asked).peaks
    monkeypatch.setattr(tail, "unlike", lambda chunks: chunks[-1:])
    assert few.peaks[Stage.STEP] - recorded(own, asked).peaks[Stage.STEP] > 2 * 20 * own.config.vocab_size


def test_layers_that_differ_are_all_run() -> None:
    program = Program("lora", System.COSERVE, LOAD, True, (METHODS["lora"],))
    assert [one.config.num_hidden_layers for one in shallow(subject(9), program)] == [3, 4]
    assert not shallow(subject(4), program)
    assert not shallow(subject(9), replace(program, keep=1 << 20))
    assert not shallow(subject(9), replace(program, keep="pruned"))
    assert not shallow(subject(9), replace(program, parts=({**METHODS["lora"], "layers_to_transform": [1]},)))
    fields = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    mixed = AutoConfig.for_model("gemma3_text", **fields, sliding_window=16)
    assert not shallow(subject_of("mixed", mixed, "float32"), program)
