"""Noise values: asked about ahead, drawn for each row, replaced after their uses."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from coserve.errors import InternalError
from coserve.split.executor import BaseLinears
from coserve.split.messages import LinearCall
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
