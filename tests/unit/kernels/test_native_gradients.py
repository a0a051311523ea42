"""Compiled kernels of training against their plain twins, on fresh random inputs.

Gradients in bfloat16 are compared with exact ones: relative to the whole tensor they may be a little farther
off than torch's own. A wrong sign, row or factor is 100 times as far.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from compiled import each_type, in_type, numbers  # noqa: F401  # a fixture
from coserve.kernels import blocked, elementwise, reference
from coserve.kernels.attention import causal_mask
from coserve.kernels.loss import cross_entropy
from coserve.kernels.native import gradients
from coserve.kernels.native.build import torch_only

DRAWS = random.Random()
SLACK = 1.25  # of torch's own error
LEAST = 2**-9  # half a rounding in bfloat16: of few numbers torch's may be exact by luck
WIDE = 2**-22  # two in float32, as an exponential is within two units in the last place


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return in_type(torch.randn(shape) * scale)


def error(got: Tensor, exact: Tensor) -> float:
    """The difference over what is exact, or itself where that is 0: a query of one key has no gradient."""
    return float((got.double() - exact).norm() / (exact.norm() if exact.any() else 1.0))


def assert_as_near(got: Tensor, torchs: Tensor, exact: Tensor) -> None:
    assert got.shape == torchs.shape == exact.shape and got.dtype == torchs.dtype
    assert error(got, exact) <= SLACK * max(error(torchs, exact), WIDE if numbers.is_wide else LEAST)


def vjp(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def assert_gradients(
    native: Callable[..., Tensor],
    own: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: list[Tensor],
) -> None:
    """`own` computes in the inputs' type, `exact` in float64."""
    grad = drawn(*own(*inputs).shape)
    wide = vjp(exact, [x.double() for x in inputs], grad.double())
    for got, torchs, want in zip(vjp(native, inputs, grad), vjp(own, inputs, grad), wide, strict=True):
        assert_as_near(got, torchs, want)


@pytest.mark.parametrize("centred", [False, True])
def test_the_gradient_of_a_norm(centred: bool) -> None:
    for _ in range(10):
        rows, width = DRAWS.randint(1, 70), DRAWS.choice([7, 64, 1000, 2048])
        own = _norm(width, DRAWS.choice([1e-6, 1e-2]), centred)
        x = drawn(1, rows, width, scale=DRAWS.choice([1e-2, 1.0, 100.0]))
        assert_gradients(partial(_native_norm, own), own, partial(_exact_norm, own), [x])


def _norm(width: int, eps: float, centred: bool) -> nn.Module:
    own = (GemmaRMSNorm if centred else LlamaRMSNorm)(width, eps).to(numbers.dtype).requires_grad_(False)
    own.weight.copy_(drawn(width))
    own.settings = eps, centred
    return own


def _native_norm(own: Any, x: Tensor) -> Tensor:
    return elementwise.rms_norm(x, own.weight, *own.settings)


def _exact_norm(own: Any, x: Tensor) -> Tensor:
    eps, centred = own.settings
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (own.weight.double() + centred)


def test_the_gradient_of_a_rotary_embedding_is_bit_for_bit_the_models() -> None:
    for _ in range(10):
        rows, heads, width = DRAWS.randint(1, 300), DRAWS.randint(1, 9), 2 * DRAWS.randint(1, 64)
        whole = drawn(1, rows, heads + 3, width).transpose(1, 2)
        x, other = whole[:, :heads], drawn(1, rows, 1, width).transpose(1, 2)
        cos, sin = drawn(1, rows, width), drawn(1, rows, width)
        grad = DRAWS.choice([drawn(1, rows, heads, width).transpose(1, 2), drawn(1, heads, rows, width)])
        (got,) = vjp(partial(elementwise.rotate, cos=cos, sin=sin), [x], grad)
        (want,) = vjp(partial(_rotated, k=other, cos=cos, sin=sin), [x], grad)
        if numbers.is_wide:  # a product and a sum are one operation, which rounds once
            torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
        else:
            assert torch.equal(got, want)


def _rotated(q: Tensor, **others: Tensor) -> Tensor:
    found: Tensor = apply_rotary_pos_emb(q, **others)[0]
    return found


def test_the_gradients_of_a_gated_activation() -> None:
    def own(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    for _ in range(10):
        shape = DRAWS.randint(1, 40), DRAWS.randint(1, 3000)
        inputs = [drawn(*shape, scale=DRAWS.choice([1.0, 30.0])), drawn(*shape)]
        assert_gradients(elementwise.silu_mul, own, own, inputs)


def test_what_has_no_memory_of_its_own_is_left_to_torch() -> None:
    gate, up = drawn(3, 5), drawn(1, 1).expand(3, 5)
    (got,) = vjp(lambda gate: elementwise.silu_mul(gate, up), [gate], drawn(3, 5).fill_(1))
    (want,) = vjp(lambda gate: F.silu(gate) * up, [gate], drawn(3, 5).fill_(1))
    assert torch.equal(got, want)


def test_attention_both_ways() -> None:
    """One to many examples, with and without keys before the queries; queries fill no whole block."""
    for batch in (1, 1, 2, 5, 40):
        groups, share, width = DRAWS.randint(1, 3), DRAWS.randint(1, 3), 8 * DRAWS.randint(1, 9)
        t = DRAWS.randint(1, 300) if batch < 40 else DRAWS.randint(1, 40)
        keys = t + DRAWS.choice([0, 0, DRAWS.randint(1, 100)])
        q, grad = (drawn(batch, t, groups * share, width).transpose(1, 2) for _ in range(2))
        k, v = drawn(batch, groups, keys, width), drawn(batch, groups, keys, width)
        mask, scale = causal_mask(t, keys, None, q.device), width**-0.5
        wide = [x.double() for x in (q, k, v)]
        exact = reference.attention_forward(*wide, scale, mask)
        exact += reference.attention_backward(grad.double(), *wide, *exact, scale, mask)
        native = _attended(q, k, v, grad)
        with torch_only():
            plain = _attended(q, k, v, grad)
        assert not torch.equal(native[2], plain[2]) or t < 4
        for got, torchs, want in zip(native, plain, exact, strict=True):
            assert_as_near(got, torchs, want)


@torch.no_grad()
def _attended(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    out, lse = blocked.forward(q, k, v, scale, None, with_lse=True)
    return out, lse, *blocked.backward(grad, q, k, v, out, lse, scale, None)


def test_examples_attend_to_themselves_alone() -> None:
    """A NaN in one of several examples that share a product's batch reaches no other."""
    q, k, v, grad = (drawn(4, 2, 20, 8) for _ in range(4))
    with torch.no_grad():
        whole = blocked.forward(q, k, v, 1.0, None, with_lse=True)
        k[1], q[1] = torch.nan, torch.nan
        out, lse = blocked.forward(q, k, v, 1.0, None, with_lse=True)
        found = blocked.backward(grad, q, k, v, out, lse, 1.0, None)
    others = [0, 2, 3]
    assert torch.equal(out[others], whole[0][others])
    assert all(not x[others].isnan().any() for x in found)
    assert all(x[1].isnan().any() for x in found)


@pytest.mark.parametrize("spread", [0.1, 5.0, 80.0])
def test_the_loss_and_its_gradient(spread: float) -> None:
    rows, vocabulary = DRAWS.randint(1, 30), DRAWS.randint(2, 5000)
    logits, labels = drawn(rows, vocabulary, scale=spread), torch.randint(0, vocabulary, (rows,))
    untouched = logits.clone()
    with torch.no_grad():
        loss, gradient = cross_entropy(logits, labels, 0.37)
        with torch_only():
            plain = cross_entropy(logits, labels, 0.37)
    assert torch.equal(logits, untouched)
    wanted, exact = reference.cross_entropy(logits.double(), labels)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    assert_as_near(gradient, plain[1], 0.37 * exact)


def test_a_loss_that_is_not_a_number_stays_one() -> None:
    logits, labels = drawn(3, 50), torch.tensor([0, 1, 2])
    logits[1, 7] = torch.nan
    with torch.no_grad():
        loss, gradient = cross_entropy(logits, labels, 1.0)
    assert loss.isnan() and gradient[1].isnan().all() and not gradient[[0, 2]].isnan().any()


@pytest.mark.parametrize("label", [-1, 50])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    with torch.no_grad(), pytest.raises(IndexError):
        gradients.cross_entropy(drawn(2, 50), torch.tensor([0, label]), 1.0)
