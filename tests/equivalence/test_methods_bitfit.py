"""BitFit against models whose biases are other ones, one adapter at a time: what is served, gradients, and
merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coserve.adapters.merge import merge_adapter
from coserve.errors import AdapterError, AdapterMismatch
from methods import SHAPES, SMALL, case_of, engine_of, forward_errors, served, windowed_errors
from models import Exact, logits_of, save, tiny
from plain import Plain, with_biases
from rounding import allowed, both_ways, error

PROMPT = [5, 9, 2, 14, 3, 3, 18]


def plain(name: str, dtype: torch.dtype, **changes: Any) -> Plain:
    """All biases there are; in a model without any, one for every linear and norm of the layers. OPT gives
    the norm before its feed-forward network rows in another shape, where nothing can stand."""
    model = tiny(name, **changes)
    named = [n.rpartition(".")[0] for n, _ in model.named_parameters() if n.endswith(".bias")]
    paths = [
        path
        for path in named
        if not (name == "opt" and path.endswith("final_layer_norm") and "layers." in path)
    ]
    if not paths:
        small = [(path, m) for path, m in model.named_modules() if not list(m.children())]
        weights = [(path, getattr(m, "weight", None)) for path, m in small if ".layers." in path]
        paths = [p for p, w in weights if w is not None and not p.endswith("mlp.gate")]  # no router
    return with_biases(name, dtype, paths, **changes)


@pytest.mark.parametrize("name", [*SHAPES, "qwen2", "qwen3", "opt"])
def test_served_logits(name: str, tmp_path: Path) -> None:
    oracle = plain(name, torch.float32, vocab_size=SMALL)
    error, difference = forward_errors(name, oracle, tmp_path)
    assert error <= 1 and difference > 1e-2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, tmp_path: Path) -> None:
    oracle = plain(name, torch.float32)
    oracle.save_pretrained(tmp_path)
    errors = windowed_errors(case_of(name, oracle, tmp_path, oracle.trainable, torch.float32))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*SHAPES, "qwen2", "qwen3"])
def test_windowed_gradients(name: str, tmp_path: Path) -> None:
    with Exact():
        oracle = plain(name, torch.float64)
        oracle.save_pretrained(tmp_path)
        errors = windowed_errors(case_of(name, oracle, tmp_path, oracle.trainable))
    assert max(errors.values()) <= 1e-10, errors


def test_merged_weights_give_what_is_served(tmp_path: Path) -> None:
    oracle = plain("gpt2", torch.float32, vocab_size=SMALL)
    oracle.save_pretrained(tmp_path / "adapter")
    base = save(tiny("gpt2", vocab_size=SMALL), tmp_path / "base")
    out = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    engine = engine_of("gpt2", vocab_size=SMALL)
    engine.adapters.load("mine", tmp_path / "adapter")
    merged = logits_of(AutoModelForCausalLM.from_pretrained(out).eval(), PROMPT)[:-1].log_softmax(-1)
    single, exact = both_ways(oracle, lambda it: logits_of(it, PROMPT)[:-1].log_softmax(-1))
    for found in (merged, served(engine, PROMPT, "mine")):
        assert error(found, exact) <= allowed(single, exact)
    assert error(served(engine, PROMPT, None), exact) > 1e-2


def test_a_norm_that_is_given_rows_in_another_shape_is_refused(tmp_path: Path) -> None:
    path = "model.decoder.layers.1.final_layer_norm"
    with_biases("opt", torch.float32, [path]).save_pretrained(tmp_path)
    with pytest.raises(AdapterMismatch, match=path):
        engine_of("opt").adapters.load("mine", tmp_path)


def test_a_bias_that_the_base_has_no_room_for_is_not_merged(tmp_path: Path) -> None:
    oracle = with_biases("llama", torch.float32, ["model.layers.0.self_attn.q_proj"])
    oracle.save_pretrained(tmp_path / "adapter")
    base = save(tiny("llama"), tmp_path / "base")
    with pytest.raises(AdapterError, match=r"q_proj has no bias"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
