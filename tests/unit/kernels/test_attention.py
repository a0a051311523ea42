"""Every way attention is computed against its plain twin."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import attention, reference
from coserve.kernels.attention import AttentionSpec, attend, attend_decode, attend_keeping, causal_mask

# Rounding of sums of a few dozen products, relative to values around 1; bfloat16 keeps 8 bits of each
# weight and value, and the reference rounds its own weights too.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    return {
        "batch": draw(st.integers(1, 3)),
        "groups": draw(st.integers(1, 3)),
        "share": draw(st.integers(1, 3)),
        "queries": draw(st.one_of(st.just(1), st.integers(1, 40))),
        "past": draw(st.one_of(st.just(0), st.integers(0, 30))),
        "dk": draw(st.sampled_from([4, 16])),
        "dv": draw(st.sampled_from([4, 16, 12])),
        "seed": draw(st.integers(0, 2**31)),
    }


def make_spec(
    kind: str, heads: int, window: int | None, generator: torch.Generator, dtype: torch.dtype
) -> AttentionSpec:
    sinks = torch.randn(heads, generator=generator).to(dtype) if "sinks" in kind else None
    return AttentionSpec(0.3, window, 2.0 if "softcap" in kind else None, sinks)


def tensors(s: dict[str, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(s["seed"])
    length, groups = s["past"] + s["queries"], s["groups"]
    q = torch.randn(s["batch"], groups * s["share"], s["queries"], s["dk"], generator=g, dtype=torch.float64)
    k = torch.randn(s["batch"], groups, length, s["dk"], generator=g, dtype=torch.float64)
    v = torch.randn(s["batch"], groups, length, s["dv"], generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype), g


def brute_force_mask(queries: int, keys: int, window: int | None) -> Tensor:
    allowed = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        position = keys - queries + i
        for j in range(position + 1):
            allowed[i, j] = window is None or position - j < window
    return allowed


@settings(max_examples=60, deadline=None, derandomize=False)
@given(shapes(), st.sampled_from([None, 1, 5, 20, 1000]))
def test_causal_mask(s: dict[str, int], window: int | None) -> None:
    queries, keys = s["queries"], s["past"] + s["queries"]
    mask = causal_mask(queries, keys, window, torch.device("cpu"))
    assert torch.equal(mask, brute_force_mask(queries, keys, window))


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "softcap and sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=40, deadline=None)
@given(s=shapes(), window=st.sampled_from([None, 1, 5, 20, 1000]))
def test_attend_is_its_twin_both_ways(
    kind: str, dtype: torch.dtype, s: dict[str, int], window: int | None
) -> None:
    """Outputs and the gradients of queries, keys and values, computed by the twin in float64."""
    q, k, v, g = tensors(s, dtype)
    spec = make_spec(kind, q.shape[1], window, g, dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    allowed = brute_force_mask(q.shape[2], k.shape[2], window)
    sinks = None if spec.sinks is None else spec.sinks.double()
    wanted = reference.attention(*exact, spec.scale, allowed, spec.softcap, sinks)
    own = [t.requires_grad_() for t in (q, k, v)]
    got = attend(*own, spec)
    assert got.shape == wanted.shape and got.dtype == dtype
    weights = torch.randn(got.shape, generator=g, dtype=torch.float64)
    wanted_gradients = torch.autograd.grad(wanted, exact, weights)
    gradients = torch.autograd.grad(got, own, weights.to(dtype))
    for one, other in zip((got.detach(), *gradients), (wanted.detach(), *wanted_gradients), strict=True):
        scale = other.abs().max().clamp_min(1.0)
        assert float((one.double() - other).abs().max() / scale) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "softcap and sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=30, deadline=None)
@given(s=shapes(), window=st.sampled_from([None, 1, 5, 20, 1000]))
def test_decode_is_one_query_at_a_time(
    kind: str, dtype: torch.dtype, s: dict[str, int], window: int | None
) -> None:
    """Sequences of different lengths in slots that are longer: each equals its own attention."""
    q, k, v, g = tensors({**s, "queries": 1}, dtype)
    batch, slots = q.shape[0], k.shape[2]
    spec = make_spec(kind, q.shape[1], window, g, dtype)
    lengths = torch.randint(1, slots + 1, (batch,), generator=g)
    bias = torch.full((batch, 1, slots), float("-inf"))
    for i, length in enumerate(lengths.tolist()):
        bias[i, :, max(0, length - (window or length)) : length] = 0
    got = attend_decode(q[:, :, 0], k.transpose(0, 1), v.transpose(0, 1), bias, spec)
    for i, length in enumerate(lengths.tolist()):
        row = slice(i, i + 1)
        allowed = brute_force_mask(1, length, window)
        exact = (t[row].double() for t in (q, k[:, :, :length], v[:, :, :length]))
        sinks = None if spec.sinks is None else spec.sinks.double()
        wanted = reference.attention(*exact, spec.scale, allowed, spec.softcap, sinks)[0, :, 0]
        assert float((got[i].double() - wanted).abs().max()) <= TOLERANCE[dtype] * max(
            1, float(wanted.abs().max())
        )


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "softcap and sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=20, deadline=None)
@given(s=shapes(), window=st.sampled_from([None, 1, 5, 1000]))
def test_what_was_kept_stands_for_what_would_be_computed(
    kind: str, dtype: torch.dtype, s: dict[str, int], window: int | None
) -> None:
    """Bit for bit, there and back; and nothing but what was kept is given."""
    q, k, v, g = tensors(s, dtype)
    spec = make_spec(kind, q.shape[1], window, g, dtype)
    own = [t.requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        kept = attend_keeping(*own, spec)
    plain, again = attend(*own, spec), attend(*own, spec, kept)
    assert torch.equal(plain, again) and kept.lse.shape == q.shape[:3]
    weights = torch.randn(plain.shape, generator=g).to(dtype)
    for one, other in zip(
        torch.autograd.grad(plain, own, weights), torch.autograd.grad(again, own, weights), strict=True
    ):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert attend(*own, spec, kept) is kept.out


def test_sinks_take_their_share() -> None:
    """With a sink far above the scores hardly anything of the values is left; far below, all of it."""
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
    v = torch.ones(1, 1, 3, 4)
    spec = [AttentionSpec(1.0, sinks=torch.tensor([value])) for value in (50.0, -50.0)]
    assert float(attend(q, k, v, spec[0]).abs().max()) < 1e-6
    assert torch.allclose(attend(q, k, v, spec[1]), torch.ones(1, 1, 1, 4))


@pytest.mark.parametrize("window", [None, 7])
def test_torch_s_attention_with_a_mask_is_given_a_head_of_keys_for_each_of_queries(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU chunks behind others go to a kernel that has masks and no groups."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, rows, 8, generator=draws, dtype=torch.float64)
        for heads, rows in ((6, 5), (2, 12), (2, 12))
    )
    spec, seen = AttentionSpec(0.3, window), []
    original = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        seen.append((k.shape[1], v.shape[1], more["enable_gqa"]))
        return original(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    got = attention._fused(q, k, v, spec)
    allowed = causal_mask(5, 12, window, q.device)
    assert torch.allclose(got, reference.attention(q, k, v, 0.3, allowed, None, None), atol=1e-12)
    attention._fused(q, q[:, :2], q[:, :2], AttentionSpec(0.3))
    assert seen == [(6, 6, False), (2, 2, True)]
