"""However calls are batched, each is answered once, with what it gives alone."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from coserve.split.address import Address
from coserve.split.batching import Batching, BatchingConfig
from coserve.split.connection import ExecutorConnection
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import VERSION, ClientHello, Direction, LinearCall
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import SplitService
from models import tiny

TOLERANCE = 2e-6  # relative and absolute: sums of 64 to 192 products in float32, in another order
CLIENTS, PASSES = 5, 4
Asked = tuple[Direction, tuple[str, ...], list[Tensor], list[Tensor]]  # with the answer


@pytest.fixture(
    scope="module",
    params=[BatchingConfig(mode) for mode in get_args(Batching)]
    + [BatchingConfig(mode, products=3) for mode in ("opportunistic", "none")],
    ids=lambda config: f"{config.mode}-{config.products or 1}",
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Served"]:
    served = Served(request.param, tmp_path_factory.mktemp("modes") / "executor.sock")
    yield served
    served.service.close()
    served.executor.close()


class Served:
    """An executor with few rows in a product, and the rows of each product that it computed."""

    def __init__(self, config: BatchingConfig, path: Path) -> None:
        self.mode, self.model = config.mode, tiny("llama")
        linears = BaseLinears(tiny("llama"))
        self.products: list[int] = []
        compute = linears.compute

        def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            self.products.append(len(tensors[0]))
            return compute(call, tensors)

        linears.compute = noted  # type: ignore[method-assign]
        self.executor = BaseExecutor(linears, config)
        self.service = SplitService(self.executor, Address(path=str(path)))

    def passed(self, name: str, asked: list[Asked]) -> None:
        """A client's passes through all groups, every second one back as well."""
        hello = ClientHello(VERSION, name)
        connection, draws = ExecutorConnection(self.service.address, hello, patience=0.0), random.Random()
        groups = [(shape, RemoteGroup(connection, shape)) for shape in connection.base.groups]
        for _ in range(PASSES):
            is_training, rows = draws.random() < 0.5, draws.choice((1, 1, 3, 17))
            with torch.set_grad_enabled(is_training):
                for shape, group in groups:
                    x = torch.randn(rows, shape.inputs)
                    paths = tuple(shape.outputs)
                    asked.append(("forward", paths, [x], list(group.launch(x, paths).result())))
            for shape, group in reversed(groups) if is_training else ():
                grads = {path: torch.randn(rows, out) for path, out in shape.outputs.items()}
                answer = group.launch_backward(grads).result()
                asked.append(("backward", tuple(grads), list(grads.values()), [answer]))
        connection.close()

    def alone(self, direction: Direction, paths: Sequence[str], given: Sequence[Tensor]) -> list[Tensor]:
        weights = [self.model.get_submodule(path).weight.detach() for path in paths]
        if direction == "forward":
            return [given[0] @ weight.T for weight in weights]
        return [sum(grad @ weight for grad, weight in zip(given, weights, strict=True))]  # type: ignore[list-item]


def test_each_call_gets_what_it_gives_alone(served: Served) -> None:
    asked: list[list[Asked]] = [[] for _ in range(CLIENTS)]
    threads = [
        threading.Thread(target=served.passed, args=(f"client {number}", own), daemon=True)
        for number, own in enumerate(asked)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    groups = len(served.executor.hello.groups)
    for own in asked:
        assert len(own) >= PASSES * groups
        for direction, paths, given, got in own:
            for tensor, wanted in zip(got, served.alone(direction, paths, given), strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    calls, rows = sum(map(len, asked)), sum(len(given[0]) for own in asked for _, _, given, _ in own)
    status = served.executor.status()
    assert sum(served.products) == rows == sum(product.rows for product in status.products)
    assert sum(product.calls for product in status.products) == calls
    assert sum(product.batches for product in status.products) == len(served.products)
    if served.mode == "none":
        assert len(served.products) == calls
    if served.mode == "lockstep":
        assert len(served.products) < calls * 0.9
