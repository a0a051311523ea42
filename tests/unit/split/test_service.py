"""Clients that do wrong, die or are strangers: each hurts its own connection alone."""

import os
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.errors import (
    AdapterMismatch,
    ConfigError,
    EngineLost,
    InternalError,
    RequestError,
    ServerError,
    Unreachable,
)
from coserve.split.address import Address
from coserve.split.attach import attach
from coserve.split.batching import BatchingConfig
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.linears import find_linears
from coserve.split.messages import VERSION, ClientHello, Limits, LinearCall, encode_header
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import MOST_CLIENTS, SplitService
from coserve.split.status import ask_status
from coserve.split.work import Work
from coserve.wire.frames import FrameReader, send_frame
from models import tiny
from split_served import DOWN, call
from waiting import wait_until

KEY = "a long secret"


class Served:
    """An executor in this process."""

    def __init__(self, address: Address, seed: int = 0, config: BatchingConfig | None = None) -> None:
        self.linears = BaseLinears(tiny("llama", seed=seed), Limits(rows=64, payload=1 << 20))
        self.executor = BaseExecutor(self.linears, config)
        self.service = SplitService(self.executor, address, KEY)
        self.address = self.service.address

    def connect(self, client: str = "test", **fields: Any) -> ExecutorConnection:
        return ExecutorConnection(
            self.address, ClientHello(VERSION, client, **{"key": KEY, **fields}), patience=0.0
        )

    def raw(self, *, greet: bool = True) -> socket.socket:
        """A socket, after a greeting of its own if wanted."""
        raw = self.address.connect()
        raw.settimeout(10)
        if greet:
            send_frame(raw, encode_header(ClientHello(VERSION, "raw", key=KEY)))
            assert FrameReader(raw).read() is not None
        return raw

    def close(self) -> None:
        self.service.close()
        self.executor.close()


@pytest.fixture(scope="module", params=["unix", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("split") / "executor.sock"
    served = Served(Address(path=str(path)) if request.param == "unix" else Address(host="127.0.0.1"))
    yield served
    served.close()


@pytest.fixture
def healthy(served: Served) -> Iterator[ExecutorConnection]:
    """A client beside, which is computed for after all."""
    connection = served.connect()
    check(connection)
    yield connection
    check(connection)
    connection.close()


def check(connection: ExecutorConnection) -> None:
    x = torch.randn(3, 96)
    weight = tiny("llama").get_submodule(DOWN).weight
    assert isinstance(weight, Tensor)
    group = RemoteGroup(connection, next(g for g in connection.base.groups if DOWN in g.outputs))
    torch.testing.assert_close(group.launch(x, [DOWN]).result()[0], x @ weight.T)
    grad = torch.randn(5, 64)
    torch.testing.assert_close(group.launch_backward({DOWN: grad}).result(), grad @ weight)


def has_ended(raw: socket.socket) -> bool:
    """The other end has closed, whatever it said before."""
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_another_base_version_or_key_is_refused(served: Served, healthy: ExecutorConnection) -> None:
    for key in ("", "a long secreT", KEY + "x", "ключ"):
        with pytest.raises(ConfigError, match="key"):
            served.connect(key=key)
    with pytest.raises(AdapterMismatch, match="base is 0123"):
        served.connect(fingerprint="0123")
    served.connect(fingerprint=healthy.base.fingerprint).close()
    with pytest.raises(ConfigError, match="version 99"):
        ExecutorConnection(served.address, ClientHello(99, "test", key=KEY))


def test_a_model_that_is_another_is_refused_and_left_as_it_is(
    served: Served, healthy: ExecutorConnection
) -> None:
    for other, changes in (("llama", {"seed": 1}), ("gpt2", {}), ("llama", {"intermediate_size": 80})):
        model = tiny(other, **changes)  # type: ignore[arg-type]
        linears = find_linears(model)
        with pytest.raises(AdapterMismatch):
            attach(model, str(served.address), KEY)
        assert find_linears(model) == linears
    with torch.device("meta"):
        shapes = type(tiny("llama"))(tiny("llama", intermediate_size=80).config)
    with pytest.raises(AdapterMismatch, match=r"gate_proj of the executor at .* is 96x64, here it is 80x64"):
        attach(shapes, str(served.address), KEY)


def garbage() -> Sequence[bytes]:
    draws = random.Random()
    greeting = encode_header(ClientHello(VERSION, "raw", key=KEY))
    deep = b"\x91" * 100_000
    too_long = encode_header(call(nbytes=(1 << 20) + 1))
    return [
        draws.randbytes(1000),
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", (1 << 20) + 1) + bytes(100),
        *(struct.pack(">I", len(body)) + body for body in (b"", b"\xc1", deep, too_long, greeting[:-1])),
    ]


@pytest.mark.parametrize("greet", [False, True])
def test_garbage_ends_its_connection_alone(served: Served, healthy: ExecutorConnection, greet: bool) -> None:
    for data in garbage():
        raw = served.raw(greet=greet)
        with suppress(OSError):  # it may be gone before all has been sent
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
        assert has_ended(raw)
        raw.close()
    raw = served.raw(greet=greet)
    send_frame(raw, encode_header(ClientHello(VERSION, "raw", key=KEY) if greet else call()))
    assert has_ended(raw)  # a second greeting, a call before the first
    raw.close()


def test_an_oversized_frame_ends_the_connection_at_once(served: Served, healthy: ExecutorConnection) -> None:
    for frame in (struct.pack(">I", 1 << 30), garbage()[-2]):
        raw = served.raw()
        raw.sendall(frame)
        assert has_ended(raw)  # without the bytes that it promises
        raw.close()


def test_a_wrong_call_is_refused_and_the_next_is_answered(served: Served) -> None:
    connection = served.connect()
    x = torch.randn(2, 96)
    good = call_of([DOWN], [x], "float32", direction="forward", work="inference")
    for wrong, reason in (
        (call_of([DOWN], [x[:, :90].contiguous()], "float32", direction="forward", work="training"), "bytes"),
        (call_of(["nothing"], [x], "float32", direction="forward", work="training"), "no linear"),
        (call_of([DOWN], [x.bfloat16()], "bfloat16", direction="forward", work="training"), "bfloat16"),
        (call_of([DOWN], [torch.randn(65, 96)], "float32", direction="forward", work="training"), "65 rows"),
    ):
        rows = [torch.zeros(wrong.nbytes // 4)]
        with pytest.raises(RequestError, match=reason):
            connection.submit(wrong, rows, [64]).result(10)
    assert connection.submit(good, [x], [64]).result(10)[0].shape == (2, 64)
    check(connection)
    connection.close()
    with pytest.raises(Unreachable, match="closed"):
        connection.submit(good, [x], [64])


def test_a_client_that_dies_in_a_call(served: Served, healthy: ExecutorConnection) -> None:
    body = encode_header(call())
    for left_out in (1, 300):
        raw = served.raw()
        send_frame(raw, body)
        raw.sendall(bytes(2 * 96 * 4 - left_out))
        raw.close()
    raw = served.raw()
    send_frame(raw, body)
    raw.sendall(bytes(2 * 96 * 4))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    raw.close()
    wait_until(lambda: served.service.clients == 1)


def test_a_client_that_reads_no_answers_holds_up_itself_alone(
    served: Served, healthy: ExecutorConnection
) -> None:
    raw = served.raw()
    raw.settimeout(0.3)
    sent = 0
    with pytest.raises(TimeoutError):
        for _ in range(2000):
            send_frame(raw, encode_header(call(rows=64)))
            raw.sendall(bytes(64 * 96 * 4))
            sent += 1
    assert sent < 2000  # it is not read any further
    check(healthy)
    raw.close()
    wait_until(lambda: served.service.clients == 1)


def test_a_client_has_few_rows_waiting_whatever_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its four calls of 40 rows, two are not read: 100 rows may wait."""
    served = Served(Address(path=str(tmp_path / "executor.sock")), config=BatchingConfig(client_rows=100))
    compute, may_go, begun = served.linears.compute, threading.Event(), threading.Event()

    def slow(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        begun.set()
        assert may_go.wait(20)
        return compute(call, tensors)

    monkeypatch.setattr(served.linears, "compute", slow)
    connection, other = served.connect(client="many"), served.connect(client="other")
    x = torch.randn(40, 96)
    good = call_of([DOWN], [x], "float32", direction="forward", work="inference")
    futures = [connection.submit(good, [x], [64]) for _ in range(4)]
    assert begun.wait(10)
    wait_until(lambda: waiting(served)["many"] == (2, 80))
    one = call_of([DOWN], [x[:1]], "float32", direction="forward", work="inference")
    last = other.submit(one, [x[:1]], [64])
    wait_until(lambda: waiting(served)["other"] == (1, 1))  # is not held up
    assert waiting(served)["many"] == (2, 80)
    may_go.set()
    for future in (*futures, last):
        future.result(10)
    wait_until(lambda: set(waiting(served).values()) == {(0, 0)})
    connection.close()
    other.close()
    served.close()


def waiting(served: Served) -> dict[str, tuple[int, int]]:
    """Calls and rows without an answer, by client."""
    clients = served.executor.status().clients
    return {client.name: (client.waiting_calls, client.waiting_rows) for client in clients}


def test_status_counts_what_crossed(tmp_path: Path) -> None:
    served, draws = Served(Address(path=str(tmp_path / "executor.sock"))), random.Random()
    connections = {name: served.connect(client=name) for name in ("one", "two")}
    calls = {name: [draws.randint(1, 64) for _ in range(draws.randint(1, 9))] for name in connections}
    for name, connection in connections.items():
        for rows in calls[name]:
            x = torch.randn(rows, 96)
            work = "training" if name == "two" else "inference"
            good = call_of([DOWN], [x], "float32", direction="forward", work=work)
            connection.submit(good, [x], [64]).result(10)
            with pytest.raises(RequestError):  # counts for nothing
                wrong = call_of([DOWN], [x], "float32", direction="backward", work=work)
                connection.submit(wrong, [x], [96]).result(10)
    found = ask_status(served.address, KEY)
    rows = {name: sum(counts) for name, counts in calls.items()}
    assert {(c.name, c.work, c.calls, c.rows, c.received_bytes, c.sent_bytes) for c in found.clients} == {
        (name, work, len(calls[name]), rows[name], rows[name] * 96 * 4, rows[name] * 64 * 4)
        for name, work in (("one", "inference"), ("two", "training"))
    }
    (product,) = found.products
    assert (product.direction, product.paths) == ("forward", (DOWN,))
    assert (product.calls, product.rows) == (sum(map(len, calls.values())), sum(rows.values()))
    assert product.batches == product.calls and product.seconds > 0
    assert (found.received_bytes, found.sent_bytes) == (product.rows * 96 * 4, product.rows * 64 * 4)
    assert 0 < found.received_a_second <= found.received_bytes
    assert found.fingerprint == served.linears.hello.fingerprint and found.process == os.getpid()
    assert found.weight_bytes == served.linears.nbytes
    connections["one"].close()
    wait_until(lambda: [client.name for client in ask_status(served.address, KEY).clients] == ["two"])
    with pytest.raises(ConfigError, match="key"):
        ask_status(served.address, "wrong")
    connections["two"].close()
    served.close()
    with pytest.raises(Unreachable, match="no executor answers"):
        ask_status(served.address, KEY)


def test_what_answers_a_status_request_otherwise_is_no_executor(tmp_path: Path) -> None:
    for said in (b"", b"HTTP/1.1 400 Bad Request", struct.pack(">I", 1) + b"\xc1", b"silence"):
        address = Address(path=str(tmp_path / "other.sock"))
        listening, _ = address.listen()

        def answer(listening: socket.socket = listening, said: bytes = said) -> None:
            with listening.accept()[0] as connected:
                if said != b"silence":
                    connected.sendall(said)
                    return
                assert has_ended(connected)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unreachable, match="no executor"):
            ask_status(address, KEY, patience=0.3)
        thread.join(10)
        listening.close()
        address.remove()


def test_too_many_clients(served: Served, healthy: ExecutorConnection) -> None:
    others = [served.raw() for _ in range(MOST_CLIENTS - 1)]
    wait_until(lambda: served.service.clients == MOST_CLIENTS)
    with pytest.raises(Unreachable, match="64 clients"):
        served.connect()
    for other in others:
        other.close()
    wait_until(lambda: served.service.clients == 1)


def test_bytes_of_a_call_are_counted_both_ways(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They bound what is joined to one product."""
    submit, found = served.executor.submit, list[int]()

    def noted(work: Work) -> None:
        found.append(work.nbytes)
        submit(work)

    monkeypatch.setattr(served.executor, "submit", noted)
    own, x = served.connect(), torch.randn(3, 96)
    for direction, rows, width in (("forward", x, 64), ("backward", torch.randn(3, 64), 96)):
        call = call_of([DOWN], [rows], "float32", direction=direction, work="training")
        own.submit(call, [rows], [width]).result(10)
    own.close()
    assert found == [3 * (96 + 64) * 4] * 2


def test_nothing_is_kept_between_calls(
    served: Served, healthy: ExecutorConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Tensor]] = []
    compute = served.linears.compute

    def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        answer = compute(call, tensors)
        seen.extend(map(weakref.ref, (*tensors, *answer)))
        return answer

    monkeypatch.setattr(served.linears, "compute", noted)
    check(healthy)
    assert len(seen) == 4
    wait_until(lambda: not any(tensor() is not None for tensor in seen))


def test_a_bug_fails_its_call_alone(
    served: Served, healthy: ExecutorConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise ZeroDivisionError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(served.linears, "compute", broken)
        with pytest.raises(InternalError, match="nobody foresaw"):
            check(healthy)


def test_an_executor_that_goes_and_one_of_another_base(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "executor.sock"))
    first, ids = Served(address), torch.ones(1, 3, dtype=torch.long)
    brief, patient = tiny("llama"), tiny("llama")
    attach(brief, str(address), KEY, patience=0.0)
    attach(patient, str(address), KEY)
    first.close()
    with pytest.raises(Unreachable, match="no executor answers"):
        brief(ids)
    second = Served(address)
    torch.testing.assert_close(patient(ids).logits, tiny("llama")(ids).logits)
    second.close()
    third = Served(address, seed=1)
    for _ in range(2):
        with pytest.raises(
            AdapterMismatch, match=r"base is at .* linears with other weights, of 22 \(model.layers.0"
        ):
            patient(ids)
    third.close()


def test_a_call_that_ends_connections_is_not_repeated_for_ever(
    served: Served, healthy: ExecutorConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def deadly(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        sent.append(call.number)
        for client in list(served.service._clients):
            client.close()
        raise ZeroDivisionError("whose answer nobody gets")

    with monkeypatch.context() as patch:
        patch.setattr(served.linears, "compute", deadly)
        with pytest.raises(EngineLost, match="4 times"):
            check(healthy)
    assert len(sent) == 4 and len(set(sent)) == 1


def test_closing_waits_for_who_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends within a product aborts. The thread that has read a call may compute it."""
    served, computing = Served(Address(path=str(tmp_path / "a.sock"))), threading.Event()
    ended: list[str] = []

    def held(work: Work) -> None:
        computing.set()
        served.service._closing.wait(60)
        time.sleep(0.2)  # less would be over before `close` is
        ended.append(threading.current_thread().name)

    monkeypatch.setattr(served.executor, "submit", held)
    connection = served.connect()
    x = torch.randn(2, 96)
    connection.submit(call_of([DOWN], [x], "float32", direction="forward", work="inference"), [x], [64])
    assert computing.wait(60)
    served.close()
    assert ended == ["split-client"]
    connection.close()


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name, before anything is loaded."""
    for name, reason in (("gpu", "is none of"), ("meta", "is none of"), ("cuda:99", "cannot be used")):
        with pytest.raises(ConfigError, match=f"--device '{name}' {reason}"):
            BaseLinears.load(tmp_path / "none", device=name)
    tiny("llama").save_pretrained(tmp_path)
    assert BaseLinears.load(tmp_path, device="cpu").device == torch.device("cpu")
    assert BaseLinears.load(tmp_path, device="auto").device.type == (
        "cuda" if torch.cuda.is_available() else "cpu"
    )


def test_addresses(tmp_path: Path) -> None:
    for text in ("unix:/run/a:b.sock", "tcp:localhost:80", "tcp:[::1]:8000", "tcp:10.0.0.1:0"):
        assert str(Address.parse(text)) == text
    for text in ("", "unix:", "tcp:", "tcp:host", "tcp::80", "tcp:host:65536", "tcp:host:-1", "http://a:1"):
        with pytest.raises(ConfigError, match="address"):
            Address.parse(text)
    local = {"unix:a": True, "tcp:127.0.0.2:1": True, "tcp:[::1]:1": True, "tcp:0.0.0.0:1": False}
    assert {text: Address.parse(text).is_local for text in local} == local
    with pytest.raises(ConfigError, match="a key is needed"):
        SplitService(BaseExecutor(BaseLinears(tiny("llama"))), Address.parse("tcp:0.0.0.0:0"))
    path = tmp_path / "a.sock"
    address = Address(path=str(path))
    listening, _ = address.listen()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ServerError, match="another process"):
        address.listen()
    listening.close()  # and leaves the file
    address.listen()[0].close()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ServerError, match="no socket"):
        Address(path=str(tmp_path / "file")).listen()
    with pytest.raises(Unreachable, match="no executor answers"):
        ExecutorConnection(Address(path=str(tmp_path / "none")), ClientHello(VERSION, "test"))
