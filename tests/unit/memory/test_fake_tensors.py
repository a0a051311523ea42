"""Allocations counted without data are those that a program makes with it."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from coserve.memory.fake_tensors import _PLAIN, fake_tensors
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


_ATEN = torch.ops.aten
_PLAIN_CALLS = {
    _ATEN._unsafe_view.default: ([6, 20],), _ATEN.alias.default: (), _ATEN.detach.default: (),
    _ATEN.expand.default: ([2, 3, 4, 5],), _ATEN.permute.default: ([2, 0, 1],), _ATEN.select.int: (1, 2),
    _ATEN.slice.Tensor: (1, 1, 3), _ATEN.squeeze.dim: (0,), _ATEN.transpose.int: (0, 1),
    _ATEN.unsqueeze.default: (1,), _ATEN.view.default: ([6, 20],), _ATEN.add.Tensor: (2.0,),
    _ATEN.div.Tensor: (3,), _ATEN.mul.Tensor: (2.0,), _ATEN.neg.default: (), _ATEN.sub.Tensor: (1,),
    _ATEN.rsqrt.default: (), _ATEN.sigmoid.default: (), _ATEN.silu.default: (), _ATEN.cos.default: (),
    _ATEN.sin.default: (), _ATEN.mean.dim: ([-1], True), _ATEN.pow.Tensor_Scalar: (2,),
}  # fmt: skip


def form(x: torch.Tensor) -> tuple[object, ...]:
    storage = x.untyped_storage().nbytes()
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_that_skip_the_general_way_give_its_results(dtype: torch.dtype) -> None:
    """Forms, devices and shared storages, as FakeTensorMode itself has them."""

    def results() -> list[tuple[object, ...]]:
        x = torch.empty(8, 4, 5, dtype=dtype)[1:7]
        matrix, wide = torch.empty(4, 6, dtype=dtype).t(), torch.empty(3, 1, dtype=torch.float32)
        made = []
        for func, args in _PLAIN_CALLS.items():
            source = torch.empty(2, 3, 4, 5, dtype=dtype)[1] if func is _ATEN.expand.default else x
            y = func(source, *args)
            made.append((str(func), *form(y), y.untyped_storage()._cdata == source.untyped_storage()._cdata))
        for y in (
            matrix @ torch.empty(4, 7, dtype=dtype), _ATEN.t.default(matrix), x @ x.transpose(1, 2),
            x + x[:1], torch.empty(3, 4, dtype=dtype) * wide, x.transpose(0, 2) * 2, x - torch.tensor(1.0),
        ):  # fmt: skip
            made.append(form(y))
        return made

    with FakeTensorMode():
        general = results()
    with fake_tensors() as counted:
        assert results() == general
    assert set(_PLAIN_CALLS) | {_ATEN.mm.default, _ATEN.bmm.default, _ATEN.t.default} == _PLAIN
    assert counted.peak > 0


def test_operators_with_other_tensors_take_the_general_way() -> None:
    """Tensors with data, and those of other devices, are refused or converted as FakeTensorMode does it."""
    real = torch.ones(3)
    with fake_tensors():
        x = torch.empty(3)
        assert (x * real).shape == (3,) and (x + torch.tensor(2)).dtype == torch.float32
        with pytest.raises(RuntimeError, match="device"):
            x + torch.empty(3, device="meta")
