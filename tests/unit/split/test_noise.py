"""Noise values: asked about ahead, drawn for each row, replaced after their uses."""

import math
import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from coserve.errors import InternalError
from coserve.split.executor import BaseLinears
from coserve.split.messages import LinearCall
from coserve.split.privacy.modes import Noise, obfuscated
from coserve.split.privacy.noise import NoisyCalls
from coserve.split.remote_group import RemoteGroup
from models import tiny

VALUES, ROWS = 4, 50


class Direct:
    """An executor in this thread that keeps the rows of each call."""

    def __init__(self) -> None:
        self._linears = BaseLinears(tiny("llama"))
        self.base = self._linears.hello
        self.seen: list[tuple[LinearCall, Sequence[Tensor]]] = []
        self.failures = 0

    def submit(self, call: LinearCall, rows: Sequence[Tensor], widths: Sequence[int]) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        self.seen.append((call, rows))
        if self.failures:
            self.failures -= 1
            future.set_exception(InternalError("no product now"))
        else:
            future.set_result(self._linears.compute(call, rows))
        return future

    def close(self) -> None:
        pass

    def ahead(self) -> list[Tensor]:
        return [rows[0] for call, rows in self.seen if call.rows == VALUES + 1]


def a_group(calls: NoisyCalls) -> RemoteGroup:
    return RemoteGroup(calls, calls.base.groups[0])


def test_values_are_asked_about_ahead_and_replaced() -> None:
    executor = Direct()
    calls = NoisyCalls(executor, VALUES, 1.0, uses=3)
    assert len(executor.ahead()) == len(executor.seen) == len(calls.base.groups)
    group, x = a_group(calls), torch.randn(ROWS, 64)
    executor.seen.clear()
    for number in range(7):
        group.launch(x, list(group.outputs))
        assert len(executor.ahead()) == number // 3
    first, second = executor.ahead()
    assert not torch.equal(first, second) and not first[-1].any() and not second[-1].any()


def test_each_row_gets_one_of_the_values() -> None:
    executor = Direct()
    calls = NoisyCalls(executor, VALUES, 1.0, uses=9)
    noise = executor.ahead()[0][:-1]
    group, x = a_group(calls), torch.randn(ROWS, 64)
    executor.seen.clear()
    group.launch(x, list(group.outputs))
    added = executor.seen[0][1][0] - x
    own = torch.cdist(added, noise * x.norm() / ROWS**0.5).argmin(1)
    assert set(own.tolist()) == set(range(VALUES))
    size = x.norm() / ROWS**0.5  # of a row, so noise of 64 values is about 8 times as large
    torch.testing.assert_close(added, size * noise[own], rtol=1e-3, atol=1e-3)
    assert 5 < added.norm() / x.norm() < 12


@pytest.mark.parametrize("seed", range(8))
def test_the_level_says_how_much_larger_the_noise_is_than_the_rows(seed: int) -> None:
    """In both directions: each row gets one of the values, times the level and the norm of a row. Answers are
    those without noise."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    executor, level, rows = Direct(), draw.choice([0.25, 0.5, 3.0, 10.0, 30.0]), draw.randint(10, ROWS)
    calls = obfuscated(executor, Noise(VALUES, level))
    outputs = calls.base.groups[0].outputs
    values, paths = executor.ahead()[0][:-1], tuple(outputs)
    weights = [tiny("llama").get_submodule(path).weight.detach() for path in paths]
    size = draw.choice([0.01, 1.0, 100.0])

    x = size * torch.randn(rows, 64, generator=generator)
    executor.seen.clear()
    answers = a_group(calls).launch(x, list(paths)).result()
    assert misses(executor.seen[0][1][0] - x, values, level * x.norm() / rows**0.5) < 1e-3
    for answer, weight in zip(answers, weights, strict=True):
        assert (answer - x @ weight.t()).norm() < 1e-4 * (1 + level) * (x @ weight.t()).norm()

    executor.seen.clear()
    gradients = [size * torch.randn(rows, width, generator=generator) for width in outputs.values()]
    call = LinearCall(0, paths, "backward", rows, "float32", "training", 0)
    (answer,) = calls.submit(call, gradients, [64]).result()
    for part, gradient, values in zip(executor.seen[-1][1], gradients, executor.ahead(), strict=True):
        assert misses(part - gradient, values[:-1], level * gradient.norm() / rows**0.5) < 1e-3
    exact = torch.stack([one @ weight for one, weight in zip(gradients, weights, strict=True)]).sum(0)
    assert (answer - exact).norm() < 1e-4 * (1 + level) * exact.norm()


def misses(added: Tensor, values: Tensor, size: Tensor) -> float:
    """Returns the distance of added rows from the nearest of the values times `size`, relative to it."""
    apart = torch.cdist(added / size, values, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    return float(apart.max()) / math.sqrt(values.shape[1])


def test_effects_that_fail_are_asked_for_again() -> None:
    executor = Direct()
    calls = NoisyCalls(executor, VALUES, 1.0, uses=1)
    group, x = a_group(calls), torch.randn(ROWS, 64)
    paths = list(group.outputs)
    group.launch(x, paths).result()
    executor.failures = 1
    with pytest.raises(InternalError, match="no product now"):
        group.launch(x, paths)
    weight = tiny("llama").get_submodule(paths[0]).weight
    torch.testing.assert_close(group.launch(x, paths).result()[0], x @ weight.t(), rtol=1e-4, atol=1e-4)
