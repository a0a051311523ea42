"""Bottleneck adapters against plain torch modules, one adapter at a time: what is served, and gradients."""

from pathlib import Path

import pytest
import torch

from methods import SHAPES, SMALL, case_of, forward_errors, windowed_errors
from models import Exact
from plain import with_bottlenecks

KINDS = [("houlsby", "relu"), ("pfeiffer", "gelu"), ("houlsby", "silu")]


@pytest.mark.parametrize(("layout", "activation"), KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_served_logits(name: str, layout: str, activation: str, tmp_path: Path) -> None:
    plain = with_bottlenecks(name, torch.float32, layout, activation, vocab_size=SMALL)
    assert len(plain.trainable) == 3 * 4 * (2 if layout == "houlsby" else 1)
    error, difference = forward_errors(name, plain, tmp_path)
    assert error <= 1 and difference > 1e-2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, tmp_path: Path) -> None:
    plain = with_bottlenecks(name, torch.float32, "houlsby", "gelu")
    plain.save_pretrained(tmp_path)
    case = case_of(name, plain, tmp_path, plain.trainable, torch.float32)
    errors = windowed_errors(case)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.sample(1, per="layout")
@pytest.mark.parametrize(("layout", "activation"), KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_windowed_gradients(name: str, layout: str, activation: str, tmp_path: Path) -> None:
    with Exact():
        plain = with_bottlenecks(name, torch.float64, layout, activation)
        plain.save_pretrained(tmp_path)
        errors = windowed_errors(case_of(name, plain, tmp_path, plain.trainable))
    assert max(errors.values()) <= 1e-10, errors
