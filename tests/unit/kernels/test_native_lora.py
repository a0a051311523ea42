"""Low-rank bypasses by the kernel in C, beside a computation in float64."""

import random

import pytest
import torch
from torch import Tensor

from compiled import each_type, in_type, numbers, with_products  # noqa: F401  # fixtures
from coserve.kernels.lora.backend import LoraSegment
from coserve.kernels.native.lora import BottleneckSegment, add_lora, computes, goes_back, lora_back, readable

DRAWS = random.Random()


def segment(start: int, stop: int, rank: int, inputs: int, outputs: int) -> LoraSegment:
    a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank)
    return LoraSegment(start, stop, in_type(a), in_type(b), DRAWS.uniform(-2.0, 2.0))


def bottleneck(start: int, stop: int, rank: int, inputs: int, outputs: int) -> LoraSegment:
    one = segment(start, stop, rank, inputs, outputs)
    biases = in_type(torch.randn(rank)), in_type(torch.randn(outputs))
    return BottleneckSegment(start, stop, one.a, one.b, one.scale, a_bias=biases[0], b_bias=biases[1])


def added(x: Tensor, y: Tensor, one: LoraSegment) -> tuple[Tensor, Tensor]:
    """The segment's rows of y with its bypass, in float64, and a bound on the error of each number."""
    own, ulp = slice(one.start, one.stop), 2.0**-23 if numbers.is_wide else 2.0**-8
    a, b = one.a.double(), one.b.double()
    h, bias = x[own].double() @ a.t(), torch.zeros(len(b)).double()
    rough = 1e-6 * x[own].double().abs() @ a.abs().t()
    if isinstance(one, BottleneckSegment):
        h, bias = (h + one.a_bias.double()).relu(), one.b_bias.double()
        rough += 1e-6 * one.a_bias.double().abs()
    want = y[own].double() + one.scale * h @ b.t()
    lost = abs(one.scale) * ((ulp * h.abs() + rough) @ b.abs().t())
    return want + bias, 1.01 * lost + ulp * (want.abs() + (want + bias).abs()) + 1e-6


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 13, 16, 45, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_get_their_own_bypass(rank: int, threads: int) -> None:
    inputs, outputs = DRAWS.choice([8, 33, 100, 256]), DRAWS.choice([32, 96, 192])
    rows = DRAWS.randint(1, 70)
    cuts = sorted(DRAWS.sample(range(rows + 1), min(rows + 1, DRAWS.choice([2, 4, 6])) // 2 * 2))
    found = [
        DRAWS.choice([segment, bottleneck])(start, stop, DRAWS.randint(1, 9) if i else rank, inputs, outputs)
        for i, (start, stop) in enumerate(zip(cuts[::2], cuts[1::2], strict=True))
    ]
    wide = in_type(torch.randn(rows, inputs + 5))
    x, y = wide[:, :inputs], in_type(torch.randn(rows, outputs))
    before, bypasses = y.clone(), readable(found)
    assert bypasses is not None
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        add_lora(x, bypasses, y)
    finally:
        torch.set_num_threads(kept)
    others = set(range(rows))
    for one in found:
        want, bound = added(x, before, one)
        assert bool(((y[one.start : one.stop].double() - want).abs() <= bound).all())
        others -= set(range(one.start, one.stop))
    rest = sorted(others)
    assert torch.equal(y[rest], before[rest])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_get_a_bypass_of_themselves(threads: int) -> None:
    """As a bottleneck's: the output is its input."""
    found = [bottleneck(0, 37, 20, 128, 128), bottleneck(40, 41, 7, 128, 128)]
    y, bypasses = in_type(torch.randn(45, 128)), readable(found)
    before, kept = y.clone(), torch.get_num_threads()
    assert bypasses is not None
    torch.set_num_threads(threads)
    try:
        add_lora(y, bypasses, y)
    finally:
        torch.set_num_threads(kept)
    for one in found:
        want, bound = added(before, before, one)
        assert bool(((y[one.start : one.stop].double() - want).abs() <= bound).all())
    for rows in (slice(37, 40), slice(41, 45)):
        assert torch.equal(y[rows], before[rows])


def test_what_is_not_a_number_stays_with_its_adapter() -> None:
    found = [segment(0, 3, 8, 64, 64), segment(3, 9, 8, 64, 64)]
    found[0].a.fill_(float("nan"))
    found[0].b.fill_(float("inf"))
    x, y = in_type(torch.randn(9, 64)), in_type(torch.randn(9, 64))
    bypasses = readable(found)
    assert bypasses is not None
    add_lora(x, bypasses, y)
    assert bool(y[:3].isnan().all()) and bool(y[3:].isfinite().all())


def test_other_matrices_are_not_read() -> None:
    plain = segment(0, 3, 8, 64, 64)
    assert readable([plain]) is not None and readable([]) is None
    assert readable([segment(0, 3, 8, 64, 40)]) is None
    assert readable([plain, LoraSegment(3, 4, plain.a.double(), plain.b.double(), 1.0)]) is None
    assert readable([LoraSegment(0, 3, plain.a, in_type(torch.randn(8, 64)).t(), 1.0)]) is None
    other = torch.bfloat16 if numbers.is_wide else torch.float32
    assert readable([plain, LoraSegment(3, 4, plain.a.to(other), plain.b.to(other), 1.0)]) is None
    assert computes(numbers.dtype, torch.device("cpu")) and not computes(torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("needs_x", [True, False])
@torch.no_grad()
def test_gradients_are_those_of_each_segments_rows(threads: int, needs_x: bool) -> None:
    """In float32; of ranks and rows that fill tiles and that do not, and of segments without rows."""
    if not numbers.is_wide:
        pytest.skip("the kernel is for float32")
    for _ in range(5):
        inputs, outputs, rows = DRAWS.choice([16, 48, 256]), DRAWS.choice([32, 96]), DRAWS.randint(4, 70)
        cuts = sorted(DRAWS.choices(range(rows + 1), k=DRAWS.choice([2, 4, 6])))
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))
        found = [segment(start, stop, DRAWS.randint(1, 12), inputs, outputs) for start, stop in spans]
        x, grad = torch.randn(rows, inputs + 5)[:, :inputs], torch.randn(rows, outputs)
        before = torch.randn(rows, inputs)
        of_x, own = before.clone() if needs_x else None, readable(found)
        assert own is not None and goes_back(x, grad, of_x, own)
        kept = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            of_a, of_b = lora_back(x, grad, own, of_x)
        finally:
            torch.set_num_threads(kept)
        want_x = before.double()
        for one, a, b in zip(found, of_a, of_b, strict=True):
            span = slice(one.start, one.stop)
            between = one.scale * grad[span].double() @ one.b.double()
            want_x[span] += between @ one.a.double()
            assert_near(a, between.t() @ x[span].double())
            assert_near(b, one.scale * grad[span].double().t() @ (x[span].double() @ one.a.double().t()))
        if of_x is not None:
            assert_near(of_x, want_x)


def assert_near(found: Tensor, want: Tensor) -> None:
    assert float((found - want).abs().max()) <= 1e-5 * float(want.abs().max())


@torch.no_grad()
def test_torchs_products_take_gradients_of_high_ranks() -> None:
    """They are faster there; and those of bottlenecks, which have biases."""
    x, grad = in_type(torch.randn(4, 32)), in_type(torch.randn(4, 32))
    for one, is_taken in [
        (segment(0, 4, 12, 32, 32), numbers.is_wide),
        (segment(0, 4, 13, 32, 32), False),
        (bottleneck(0, 4, 3, 32, 32), False),
    ]:
        own = readable([one])
        assert own is not None and goes_back(x, grad, None, own) is is_taken
