"""Attention of chunks by tile registers against its plain twin, on fresh random inputs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coserve.kernels import blocked, reference
from coserve.kernels.attention import causal_mask
from coserve.kernels.native import ops
from coserve.kernels.native.build import library, torch_only

pytestmark = pytest.mark.skipif(
    library() is None or not library().attends_chunks(32, 32),  # type: ignore[union-attr]
    reason="there is no C compiler, or a processor without tile registers",
)

DRAWS = random.Random()
# Results may be as far from exact ones as so many times those of torch, which rounds in another order; the
# others cover results that torch happens to get right.
AS_FAR, AT_LEAST, OWED = 1.5, 3e-3, 1e-2


@pytest.fixture(autouse=True)
def _without_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True, slots=True)
class Case:
    """Queries that are the last rows of their keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None

    @staticmethod
    def draw() -> "Case":
        batch, groups, share = (DRAWS.randint(1, 3) for _ in range(3))
        rows = DRAWS.choice([2, DRAWS.randint(1, 90), DRAWS.randint(1, 300)])
        length = rows + DRAWS.choice([0, DRAWS.randint(0, 600)])
        widths = DRAWS.choice([32, 64, 96, 128]), DRAWS.choice([16, 32, 48, 64])
        return Case(
            placed(batch, groups * share, rows, widths[0]),
            placed(batch, groups, length, widths[0]),
            placed(batch, groups, length, widths[1]),
            DRAWS.choice([0.1, 0.3]),
            DRAWS.choice([None, 1, DRAWS.randint(1, length + 5)]),
        )

    def allowed(self) -> Tensor:
        return causal_mask(self.q.shape[2], self.k.shape[2], self.window, self.q.device)

    def run(self) -> tuple[Tensor, Tensor]:
        assert ops.attends_chunks(self.q, self.k, self.v)
        return blocked.forward(self.q, self.k, self.v, self.scale, self.window, with_lse=True)


def placed(batch: int, heads: int, rows: int, width: int) -> Tensor:
    """A random [batch, heads, rows, width], with heads or rows outermost in memory, perhaps with gaps."""
    gap = DRAWS.choice([0, 8])
    if DRAWS.random() < 0.5:
        return torch.randn(batch, heads, rows, width + gap).bfloat16()[..., :width]
    return torch.randn(batch, rows, heads, width + gap).bfloat16()[..., :width].transpose(1, 2)


def test_outputs_and_sums_are_as_near_as_torchs() -> None:
    for _ in range(60):
        case = Case.draw()
        out, lse = case.run()
        with torch_only():
            twin, twin_lse = blocked.forward(case.q, case.k, case.v, case.scale, case.window, with_lse=True)
        exact = (tensor.double() for tensor in (case.q, case.k, case.v))
        wanted, wanted_lse = reference.attention_forward(*exact, case.scale, case.allowed())
        for found, plain, want in ((out, twin, wanted), (lse, twin_lse, wanted_lse)):
            assert found.shape == want.shape
            bound = AS_FAR * (plain - want).norm() + AT_LEAST * want.norm()
            assert (found - want).norm() <= bound, case


def test_gradients_are_as_near_as_torchs() -> None:
    """But for what a row owes, which is made of the output as it was rounded."""
    for _ in range(40):
        case = Case.draw()
        q, k, v, scale, window = case.q, case.k, case.v, case.scale, case.window
        if v.shape[-1] % 32:
            assert not ops.goes_back_chunks(q[..., :16], q, k, v, q[..., :16])
            continue
        grad = placed(*q.shape[:3], v.shape[-1])
        out, lse = case.run()
        assert ops.goes_back_chunks(grad, q, k, v, out)
        found = blocked.backward(grad, q, k, v, out, lse, scale, window)
        with torch_only():
            twin = blocked.forward(q, k, v, scale, window, with_lse=True)
            plain = blocked.backward(grad, q, k, v, *twin, scale, window)
        with torch.enable_grad():
            exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
            through = reference.attention(*exact, scale, case.allowed())
            wanted = torch.autograd.grad(through, exact, grad.double())
        for own, other, want in zip(found, plain, wanted, strict=True):
            assert own.shape == want.shape
            bound = AS_FAR * (other - want).norm() + OWED * want.norm() + OWED
            assert (own - want).norm() <= bound, case


def test_bits_do_not_depend_on_threads_or_other_sequences() -> None:
    before = torch.get_num_threads()
    for _ in range(10):
        case = Case.draw()
        found = []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(case.run())
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, *found))
        for i in range(len(case.q)):
            some = slice(i, i + 1)
            alone = Case(case.q[some], case.k[some], case.v[some], case.scale, case.window).run()
            assert torch.equal(alone[0], found[0][0][some]) and torch.equal(alone[1], found[0][1][some])


def test_a_nan_stays_with_its_query_or_its_head() -> None:
    for _ in range(10):
        case = Case.draw()
        right, _ = case.run()
        batch, head, row = (DRAWS.randrange(size) for size in case.q.shape[:3])
        case.q[batch, head, row, 0] = float("nan")
        found, _ = case.run()
        assert found[batch, head, row].isnan().all()
        found[batch, head, row] = right[batch, head, row]
        assert torch.equal(found, right)
        group = DRAWS.randrange(case.k.shape[1])
        case.q[batch, head, row, 0] = 0
        clean, _ = case.run()
        case.v[batch, group] = float("nan")
        found, _ = case.run()
        share = case.q.shape[1] // case.k.shape[1]
        hit = torch.zeros(found.shape[:2], dtype=torch.bool)
        hit[batch, group * share : (group + 1) * share] = True
        assert found[hit].isnan().all() and torch.equal(found[~hit], clean[~hit])


def test_only_what_the_kernel_reads_is_taken() -> None:
    q, k, v = (torch.zeros(1, 2, 40, width).bfloat16() for width in (64, 64, 16))
    assert ops.attends_chunks(q, k, v)
    assert not ops.attends_chunks(q[..., :48], k[..., :48], v)
    assert not ops.attends_chunks(q, k, v[..., :8])
    assert not ops.attends_chunks(q.float(), k, v)
    assert not ops.attends_chunks(q.transpose(2, 3), k, v)
    with torch.enable_grad():
        assert not ops.attends_chunks(q, k, v)
    with torch_only():
        assert not ops.attends_chunks(q, k, v)
