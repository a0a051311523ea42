"""Allocations counted without data are those that a program makes with it."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from coserve.memory.fake_tensors import fake_tensors
from coserve.model.load import load_base
from models import tiny

MB = 1 << 20


def test_storages_count_once_and_as_long_as_they_live() -> None:
    with fake_tensors() as counted:
        x = torch.empty(MB, dtype=torch.uint8)
        views = [x[5:], x.view(4, -1), x.detach()]
        assert counted.live == MB
        y = x + 1
        assert counted.live == 2 * MB
        del x, views
        assert (counted.live, counted.peak) == (MB, 2 * MB)
        counted.reset()
        del y
        assert (counted.live, counted.peak) == (0, MB)


def test_what_autograd_saves_is_held_until_it_has_gone_back() -> None:
    """A linear whose weight trains saves its input; one whose weight does not, nothing."""
    found = {}
    for trains in (True, False):
        with fake_tensors() as counted:
            first = nn.Linear(256, 256, bias=False)
            second = nn.Linear(256, 256, bias=False).requires_grad_(trains)
            x = torch.zeros(1024, 256)
            held = counted.live
            loss = second(first(x)).sum()
            found[trains] = counted.live - held
            loss.backward()
            grads = sum(
                p.grad.nbytes for p in (*first.parameters(), *second.parameters()) if p.grad is not None
            )
            assert abs(counted.live - held - grads) <= 16  # the loss, and the gradient it began with
    assert found[True] - found[False] == 1024 * 256 * 4


def test_questions_about_values_are_answered() -> None:
    with fake_tensors():
        x = torch.ones(3, 4)
        assert x.sum().item() == 0.0 and bool((x == x).all()) and torch.equal(x, x + 1)
        assert (x > 0).nonzero().shape == (12, 2)
        assert x.numpy().shape == (3, 4)
        assert x.tolist() == [[0.0] * 4] * 3


def test_nothing_is_allocated() -> None:
    """A petabyte."""
    with fake_tensors() as counted:
        x = torch.empty(1 << 50, dtype=torch.uint8)
        assert counted.live == 1 << 50
        del x
    assert torch.ones(2).sum().item() == 2.0, "outside, tensors have data again"


def test_what_others_make_fake_tensors_does_not_count() -> None:
    with fake_tensors() as counted:
        with FakeTensorMode():
            other = torch.empty(MB) + 1
        assert (counted.live, counted.peak) == (0, 0)
        del other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_models_with_experts_are_driven_without_data_in_any_type(dtype: torch.dtype) -> None:
    config = copy.deepcopy(tiny("mixtral").config)
    with fake_tensors():
        base = load_base(AutoModelForCausalLM.from_config(config, dtype=dtype), dtype)
    real = load_base(tiny("mixtral", dtype=dtype), dtype)
    assert base.parameters == real.parameters and base.caches == real.caches
    assert base.sites.keys() == real.sites.keys()
