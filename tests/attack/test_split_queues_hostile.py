"""Clients that misuse the queues of a base executor: others are answered, and memory stays bounded."""

import itertools
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from coserve.errors import RequestError
from coserve.split.address import Address
from coserve.split.batching import Batching, BatchingConfig
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import (
    VERSION,
    ClientHello,
    Direction,
    Limits,
    LinearAnswer,
    LinearCall,
    StatusRequest,
    decode_to_client,
    encode_header,
)
from coserve.split.queues import MOST_COMPUTING
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import MOST_CLIENTS, SplitService
from coserve.wire.frames import FrameReader, send_frame
from models import tiny
from split_clock import LAYERS, Caller, SplitWorld
from split_served import DOWN, call
from waiting import wait_until

MARK = re.compile(b"LinearAnswer|ExecutorStatus")
LAYER = "model.layers.0"
MLP = f"{LAYER}.mlp"
QKV = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


class Served:
    def __init__(self, folder: Path, mode: Batching) -> None:
        self.model = tiny("llama")
        linears = BaseLinears(tiny("llama"), Limits(rows=64, payload=1 << 20))
        self.executor = BaseExecutor(linears, BatchingConfig(mode, client_rows=128))
        self.service = SplitService(self.executor, Address(path=str(folder / "executor.sock")))

    def connect(self, name: str = "healthy") -> ExecutorConnection:
        return ExecutorConnection(self.service.address, ClientHello(VERSION, name), patience=0.0)

    def raw(self) -> socket.socket:
        raw = self.service.address.connect()
        raw.settimeout(0.3)
        send_frame(raw, encode_header(ClientHello(VERSION, "hostile")))
        assert FrameReader(raw).read() is not None
        raw.settimeout(0.3)
        return raw

    def check(self, connection: ExecutorConnection) -> None:
        """A pass of products of a healthy client, answered rightly and soon."""
        began = time.monotonic()
        for shape in connection.base.groups:
            x = torch.randn(2, shape.inputs)
            got = RemoteGroup(connection, shape).launch(x, list(shape.outputs)).result()
            for path, tensor in zip(shape.outputs, got, strict=True):
                weight = self.model.get_submodule(path).weight
                torch.testing.assert_close(tensor, x @ weight.T, rtol=1e-5, atol=1e-5)
        assert time.monotonic() - began < 60  # lockstep waits a second for each that calls nothing else


@pytest.fixture(scope="module", params=get_args(Batching))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("hostile"), request.param)
    yield served
    served.service.close()
    served.executor.close()


@pytest.fixture
def healthy(served: Served) -> Iterator[ExecutorConnection]:
    connection = served.connect()
    served.check(connection)
    yield connection
    served.check(connection)
    connection.close()


def flood(raw: socket.socket, data: bytes, most: int = 20_000) -> int:
    """Sends without reading, until nothing more is taken."""
    for number in range(most):
        try:
            raw.sendall(data)
        except TimeoutError:
            return number
    return most


def framed(message: Any) -> bytes:
    body = encode_header(message)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.sample(2)
def test_who_floods_and_does_not_read_is_not_read(served: Served, healthy: ExecutorConnection) -> None:
    attackers = [served.raw() for _ in range(3)]
    call_data = framed(call(rows=64)) + bytes(64 * 96 * 4)
    for raw, data in zip(attackers, (framed(StatusRequest()), call_data, call_data), strict=True):
        assert flood(raw, data) < 20_000
    served.check(healthy)
    for client in served.executor.status().clients:
        assert client.waiting_calls <= 4 and client.waiting_rows <= 128
    for raw in attackers:
        raw.close()
    wait_until(lambda: served.service.clients == 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("whole", [MLP, LAYER])
def test_who_floods_spans_and_does_not_read_is_not_read(
    served: Served, healthy: ExecutorConnection, whole: str, direction: Direction
) -> None:
    """On the way back a feed-forward layer and a whole one take the most seconds of all calls."""
    rows, lengths = (64, ()) if whole == MLP else (16, (3, 13))
    widths = 64 * (1 + (direction == "backward"))
    nbytes = rows * widths * 4
    asked = LinearCall(1, (whole,), direction, rows, "float32", "inference", nbytes, lengths=lengths)
    attackers = [served.raw() for _ in range(3)]
    for raw in attackers:
        assert flood(raw, framed(asked) + bytes(nbytes)) < 20_000
    served.check(healthy)
    for client in served.executor.status().clients:
        assert client.waiting_calls <= 4 and client.waiting_rows <= 128
    for raw in attackers:
        raw.close()
    wait_until(lambda: served.service.clients == 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"nbytes": 64 * 4}, "bytes came for 2 rows"),
        ({"nbytes": 2 * 64 * 8, "dtype": "field"}, "is no linear, so shares cannot be added"),
        ({"nbytes": 2 * 64 * 4, "direction": "backward"}, "bytes came for 2 rows"),
        ({"nbytes": 65 * 64 * 4, "rows": 65}, "65 rows in one call"),
        ({"nbytes": 2 * 64 * 4, "paths": (MLP, DOWN)}, "is a call of its own"),
        ({"nbytes": 2 * 64 * 4, "paths": (DOWN, MLP)}, "is no linear of this base"),
    ],
)
def test_a_span_that_is_asked_for_wrongly_is_an_error(
    served: Served, healthy: ExecutorConnection, fields: dict[str, Any], reason: str
) -> None:
    asked = LinearCall(**{
        "number": 7, "paths": (MLP,), "direction": "forward", "rows": 2, "dtype": "float32",
        "work": "inference", **fields,
    })  # fmt: skip
    raw = served.raw()
    raw.sendall(framed(asked) + bytes(asked.nbytes))
    data = FrameReader(raw, 5.0).read()
    assert data is not None
    answer = decode_to_client(data, Limits())
    assert isinstance(answer, LinearAnswer) and answer.fault is not None and reason in answer.fault.text, (
        answer
    )
    raw.close()


def test_threads_that_compute_are_few_however_many_clients_there_are(
    served: Served, healthy: ExecutorConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that computes gets OpenMP threads of its own: here one for each product would be 64."""
    compute, threads = served.executor._linears.compute, set[int]()

    def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        threads.add(threading.get_ident())
        return compute(call, tensors)

    monkeypatch.setattr(served.executor._linears, "compute", noted)
    crowd = [served.connect(f"client {number}") for number in range(MOST_CLIENTS - 1)]
    x = torch.randn(2, 96)
    asked = call_of([DOWN], [x], "float32", direction="forward", work="inference")
    is_lockstep = served.executor.config.mode == "lockstep"  # where each would wait a second for all others
    at_once = [crowd, crowd] if is_lockstep else [crowd, *([connection] for connection in crowd)]
    for group in at_once:
        for answer in [connection.submit(asked, [x], [64]) for connection in group]:
            (got,) = answer.result(20)
            wanted = x @ served.model.get_submodule(DOWN).weight.T
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert 1 <= len(threads) <= MOST_COMPUTING + served.executor.config.products
    for connection in crowd:
        connection.close()
    wait_until(lambda: served.service.clients == 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["wrong", "status"])
def test_what_waits_in_no_queue_is_read_slowly(
    served: Served, healthy: ExecutorConnection, kind: str
) -> None:
    """Wrong calls and questions for the status count towards no share of seconds, but for reading them."""
    asked = framed(StatusRequest()) if kind == "status" else framed(call(nbytes=5)) + bytes(5)
    raw, answers = served.raw(), 0
    raw.setblocking(False)
    sent, until = memoryview(asked * 4000), time.monotonic() + 0.5
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            sent = sent[raw.send(sent[:65536]) :]
        with suppress(BlockingIOError):
            answers += len(MARK.findall(raw.recv(1 << 20)))
        time.sleep(0.001)
    served.check(healthy)
    assert answers <= 0.6 / 0.005
    raw.close()
    wait_until(lambda: served.service.clients == 1)


def test_who_stops_in_the_middle_of_a_call_holds_nobody_up(
    served: Served, healthy: ExecutorConnection
) -> None:
    attackers = [served.raw() for _ in range(5)]
    for number, raw in enumerate(attackers):
        raw.sendall((framed(call(rows=64)) + bytes(64 * 96 * 4))[: -1 - 1000 * number])
    served.check(healthy)
    for raw in attackers:
        raw.close()


def test_who_leaves_takes_its_calls_along(
    served: Served, healthy: ExecutorConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears, may_go, begun = served.executor._linears, threading.Event(), threading.Event()
    compute, rows = linears.compute, list[int]()

    def slow(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        begun.set()
        assert may_go.wait(20)
        rows.append(len(tensors[0]))
        return compute(call, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(linears, "compute", slow)
        x = torch.randn(5, 96)
        good = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        answer = healthy.submit(good, [x], [64])
        assert begun.wait(10)
        raw = served.raw()
        raw.sendall((framed(call(rows=32)) + bytes(32 * 96 * 4)) * 3)
        wait_until(lambda: [c.waiting_rows for c in served.executor.status().clients] == [5, 96])
        raw.close()
        wait_until(lambda: served.service.clients == 1)
        may_go.set()
        answer.result(10)
        served.check(healthy)
    assert 32 not in rows and 96 not in rows


def test_whatever_is_asked_for_accounts_stay_small(served: Served, healthy: ExecutorConnection) -> None:
    """Every order of every choice among siblings is a product of its own, and counts for its group."""
    connection = served.connect("inventive")
    x = torch.randn(1, 64)
    for paths in (p for count in (1, 2, 3) for p in itertools.permutations(QKV, count)):
        asked = call_of(paths, [x], "float32", direction="forward", work="training")
        widths = [len(served.model.get_submodule(path).weight) for path in paths]
        got = connection.submit(asked, [x], widths).result(10)
        for path, tensor in zip(paths, got, strict=True):
            weight = served.model.get_submodule(path).weight
            torch.testing.assert_close(tensor, x @ weight.T, rtol=1e-5, atol=1e-5)
    connection.close()
    products = served.executor.status().products
    assert len(products) <= 2 * len(served.executor.hello.groups)
    assert [product.paths for product in products if QKV[0] in product.paths] == [QKV]
    assert not served.executor._queues._queues


def test_a_deadline_of_nothing_is_an_error_or_kept(served: Served, healthy: ExecutorConnection) -> None:
    connection, x = served.connect("hasty"), torch.randn(64, 96)
    asked = call_of([DOWN], [x], "float32", direction="forward", work="inference", deadline=0.0)
    for future in [connection.submit(asked, [x], [64]) for _ in range(50)]:
        with pytest.raises(RequestError, match="deadline of 0"):
            future.result(10)
    served.check(healthy)
    connection.close()


@pytest.mark.parametrize("mode", get_args(Batching))
def test_one_that_is_active_and_never_comes_costs_others_a_bounded_time(mode: Batching) -> None:
    """It teaches that it comes to each product soon, and calls the first one alone ever after."""

    class Liar(Caller):
        def products(self) -> Iterator[tuple[Any, int]]:
            for _ in range(3):
                yield from (("forward", layer) for layer in range(LAYERS))
            while healthy.ended == float("inf"):
                yield "forward", 0

    draws, passes = random.Random(), 20
    factor, cap = draws.choice((0.5, 1.0, 4.0)), 0.002
    world = SplitWorld(BatchingConfig(mode, factor, cap))
    healthy = Caller("healthy", draws.choice((1, 100)), 0.1, passes)
    world.play(healthy, Liar("liar", 1, draws.choice((0.05, 0.3, 2.0))))
    assert len(healthy.answers) == passes * LAYERS
    # Each of its products comes behind one of the other's.
    alone = passes * LAYERS * (1.0 + 0.01 * healthy.rows + 0.1)
    other = passes * LAYERS * (1.0 + 0.01 * (1 + healthy.rows)) + alone
    bounds = {"opportunistic": other + passes * cap * 1e3 + 100, "lockstep": other + passes * LAYERS * 1e3}
    assert healthy.ended <= bounds.get(mode, other + 100)
