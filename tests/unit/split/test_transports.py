"""Every way from a client to an executor carries the same bits; the plain socket says which."""

import fcntl
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from certificates import Authority
from coserve.errors import EngineLost
from coserve.split import connection as connections
from coserve.split import remote_group
from coserve.split import service as services
from coserve.split.address import Address
from coserve.split.batching import BatchingConfig
from coserve.split.channel import SocketChannel, Transport
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import (
    VERSION,
    ClientHello,
    Limits,
    LinearCall,
    SlotShape,
    ToClient,
    ToExecutor,
    decode_to_client,
    decode_to_executor,
)
from coserve.split.remote_group import RemoteGroup
from coserve.split.service import SplitService
from coserve.split.shared_memory import ClientSharedChannel, FileStream, Slots, make_slots
from coserve.split.tls import ClientTls, TlsFiles
from coserve.split.transport import SocketTransport, greet
from coserve.wire.messages import Fault
from models import tiny
from split_in_process import InProcess
from waiting import wait_until

SLOT = 16 << 10  # bytes: 42 rows of width 96, so that some calls and answers do not fit
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]  # 64 to 64, 32, 32
DOWN = "model.layers.0.mlp.down_proj"  # 96 to 64
WIDTHS = {QKV[0]: 64, QKV[1]: 32, QKV[2]: 32, DOWN: 64}
KINDS = ("in-process", "shared", "socket", "tcp", "tls")
HELLO = ClientHello(VERSION, "test")


class Ways:
    """One executor, and every transport to it."""

    def __init__(self, folder: Path) -> None:
        self.linears = BaseLinears(tiny("llama"), Limits(rows=256, payload=1 << 20))
        self.executor = BaseExecutor(self.linears, BatchingConfig("none", client_rows=300))
        authority = Authority(folder / "authority")
        own = authority.sign("executor")
        context = TlsFiles(own.certificate, own.key).context()
        unix = Address(path=str(folder / "executor.sock"))
        self.services = {
            "unix": SplitService(self.executor, unix, slot_bytes=SLOT),
            "tcp": SplitService(self.executor, Address.parse("tcp:127.0.0.1:0")),
            "tls": SplitService(self.executor, Address.parse("tls:127.0.0.1:0"), tls=context),
        }
        self.transports: dict[str, Transport] = {
            "in-process": InProcess(self.executor),
            "shared": SocketTransport(self.services["unix"].address),
            "socket": SocketTransport(self.services["unix"].address, shared_memory=False),
            "tcp": SocketTransport(self.services["tcp"].address),
            "tls": SocketTransport(self.services["tls"].address, tls=ClientTls(ca=authority.certificate)),
        }

    def connect(self, kind: str) -> ExecutorConnection:
        return ExecutorConnection(self.transports[kind], HELLO, patience=0.0)

    def close(self) -> None:
        for service in self.services.values():
            service.close()
        self.executor.close()


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "BEAT_SECONDS", 0.1)
        ways = Ways(tmp_path_factory.mktemp("split"))
        yield ways
        ways.close()


@pytest.fixture(params=KINDS)
def connection(request: pytest.FixtureRequest, ways: Ways) -> Iterator[ExecutorConnection]:
    connection = ways.connect(request.param)
    yield connection
    connection.close()


def drawn_call(generator: torch.Generator) -> tuple[LinearCall, list[Tensor], list[int]]:
    """A call of any size, with its rows and the widths of its answer."""
    rows = int(torch.randint(1, 200, (), generator=generator))
    paths = [[DOWN], QKV, QKV[1:], QKV[:1]][int(torch.randint(4, (), generator=generator))]
    is_forward = bool(torch.randint(2, (), generator=generator))
    inputs, outputs = [96 if paths == [DOWN] else 64], [WIDTHS[path] for path in paths]
    given = [torch.randn(rows, width, generator=generator) for width in (inputs if is_forward else outputs)]
    call = call_of(
        paths, given, "float32", direction="forward" if is_forward else "backward", work="inference"
    )
    return call, given, outputs if is_forward else inputs


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "socket"])
def test_bits_are_those_of_the_plain_socket(ways: Ways, kind: str) -> None:
    """Calls of 1 to 199 rows, many under way at once, with slots that most do not fit into."""
    seed = secrets.randbits(32)
    generator = torch.Generator().manual_seed(seed)
    calls = [drawn_call(generator) for _ in range(40)]
    one, twin = ways.connect(kind), ways.connect("socket")
    answers = [(one.submit(*call), twin.submit(*call)) for call in calls]
    for (call, given, widths), (got, wanted) in zip(calls, answers, strict=True):
        found, expected = got.result(30), wanted.result(30)
        assert [tuple(tensor.shape) for tensor in found] == [(call.rows, width) for width in widths]
        assert all(map(torch.equal, found, expected)), f"seed {seed}"
        assert all(tensor.is_contiguous() for tensor in found)
        own = ways.linears.compute(call, given)
        assert all(map(torch.equal, found, own)), f"seed {seed}"
    one.close()
    twin.close()


def test_answers_stay_what_they_are_when_their_slot_is_used_again(ways: Ways) -> None:
    connection = ways.connect("shared")
    assert isinstance(connection._channel, ClientSharedChannel)
    group = RemoteGroup(connection, next(g for g in connection.base.groups if DOWN in g.outputs))
    kept = [(x, group.launch(x, [DOWN]).result()[0]) for x in torch.randn(9, 3, 96)]
    for x, answer in kept:
        call = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        assert torch.equal(answer, ways.linears.compute(call, [x])[0])
    connection.close()


def test_many_threads_share_a_connection(connection: ExecutorConnection, ways: Ways) -> None:
    """Each receives its own answer, whoever of them reads it."""
    wrong: list[str] = []

    def ask(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(15):
            call, given, widths = drawn_call(generator)
            answer = connection.submit(call, given, widths)
            found = answer.result(30)
            if answer.sent != 1 or not all(map(torch.equal, found, ways.linears.compute(call, given))):
                wrong.append(f"seed {seed}")

    threads = [threading.Thread(target=ask, args=(secrets.randbits(32),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_an_answer_that_does_not_come_in_time(
    connection: ExecutorConnection, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compute = ways.linears.compute

    def slow(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert go_on.wait(30)
        return compute(call, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(ways.linears, "compute", slow)
        call, given, widths = drawn_call(torch.Generator())
        answer = connection.submit(call, given, widths)
        with pytest.raises(TimeoutError):
            answer.result(0.01)
        threading.Timer(0.2, go_on.set).start()
        assert all(map(torch.equal, answer.result(30), compute(call, given)))


def test_no_more_rows_are_under_way_than_the_executor_takes(
    connection: ExecutorConnection, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls with 100, 150, 250, 20 and 30 rows, at most 300: in their order, others wait at the client."""
    go_on, seen = threading.Event(), list[int]()
    compute = ways.linears.compute

    def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert go_on.wait(30)
        seen.append(connection._rows_under_way)
        return compute(call, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(ways.linears, "compute", noted)
        given = [torch.randn(rows, 96) for rows in (100, 150, 250, 20, 30)]
        calls = [call_of([DOWN], [x], "float32", direction="forward", work="inference") for x in given]
        answers = [connection.submit(call, [x], [64]) for call, x in zip(calls, given, strict=True)]
        assert [answer.sent for answer in answers] == [1, 1, 0, 0, 0]
        go_on.set()
        for call, x, answer in zip(calls, given, answers, strict=True):
            assert torch.equal(answer.result(30)[0], compute(call, [x])[0])
        assert len(seen) == 5 and max(seen) <= 300


def test_an_interrupt_within_an_answer_costs_a_reconnect(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = ExecutorConnection(ways.transports["tcp"], HELLO, patience=10.0)
    calls = [drawn_call(torch.Generator().manual_seed(seed)) for seed in range(3)]
    answers = [connection.submit(*call) for call in calls]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection._channel, "receive_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers[1].result(10)
        with pytest.raises(OSError):  # which has bytes that mean nothing now
            connection._channel.send(HELLO)
    for (call, given, _), answer in zip(calls, answers, strict=True):
        assert all(map(torch.equal, answer.result(10), ways.linears.compute(call, given)))
    connection.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "is_stuck"), [("shared", False), ("tls", False), ("socket", True)])
def test_a_long_product_is_waited_for_unless_it_takes_for_ever(
    ways: Ways, monkeypatch: pytest.MonkeyPatch, kind: str, is_stuck: bool
) -> None:
    connection = ways.connect(kind)
    go_on = threading.Event()
    compute = ways.linears.compute

    def slow(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert go_on.wait(30)
        return compute(call, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(ways.linears, "compute", slow)
        patch.setattr(connection, "_silence", 0.5)
        patch.setattr(services, "_STUCK_SECONDS", 0.0 if is_stuck else 100.0)
        call, given, widths = drawn_call(torch.Generator())
        answer = connection.submit(call, given, widths)
        timer = threading.Timer(1.5, go_on.set)
        timer.start()
        if is_stuck:
            with pytest.raises(EngineLost, match=r"no sign of life for 0\.5 s"):
                answer.result(30)
            with pytest.raises(EngineLost, match="no sign of life"):
                connection.submit(call, given, widths)
        else:
            assert all(map(torch.equal, answer.result(30), compute(call, given)))
        timer.join()


def test_shared_memory_is_agreed_on(ways: Ways, tmp_path: Path) -> None:
    def slots_of(transport: Transport) -> object:
        connection = ExecutorConnection(transport, HELLO)
        connection.close()
        return connection.base.slots

    assert slots_of(ways.transports["shared"]) == SlotShape(4, SLOT)
    for kind in KINDS:
        if kind != "shared":
            assert slots_of(ways.transports[kind]) is None
    without = SplitService(ways.executor, Address(path=str(tmp_path / "a.sock")), slot_bytes=0)
    assert slots_of(SocketTransport(without.address)) is None
    without.close()
    tcp = ways.services["tcp"].address.connect()  # proposed where a file cannot be passed
    channel = SocketChannel[ToClient](tcp, decode_to_client)
    assert greet(channel, msgspec.structs.replace(HELLO, shared_memory=True), "tcp").slots is None
    channel.close()


def test_slots_cannot_be_resized_and_have_no_name(ways: Ways) -> None:
    shown = set(os.listdir("/dev/shm"))
    connection = ways.connect("shared")
    file = received_file(ways)
    for size in (0, SLOT, 5 * SLOT):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(file).st_size == 4 * SLOT and os.fstat(file).st_nlink == 0
    os.close(file)
    assert set(os.listdir("/dev/shm")) == shown
    connection.close()


def received_file(ways: Ways) -> int:
    """The shared memory of a client that is gone at once."""
    raw = ways.services["unix"].address.connect()
    files = FileStream(raw)
    channel = SocketChannel[ToClient](raw, decode_to_client, files)
    assert greet(channel, msgspec.structs.replace(HELLO, shared_memory=True), "").slots is not None
    raw.close()
    assert files.file is not None and not os.get_inheritable(files.file)
    return files.file


def test_memory_that_can_be_shortened_is_not_mapped() -> None:
    shape = SlotShape(4, 4096)
    file = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4 * 4096)
    with pytest.raises(OSError, match="not sealed"):
        Slots(file, shape)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    Slots(file, shape)
    with pytest.raises(OSError, match="too small"):
        Slots(file, SlotShape(5, 4096))
    os.close(file)
    made = make_slots(4096)
    assert made is not None
    with pytest.raises(ValueError, match="larger than a slot"):
        made[1].write(3, [torch.zeros(1024), torch.zeros(1)])
    os.close(made[0])


def test_large_calls_are_pieces_of_which_two_are_under_way(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of 2,000 rows takes no more of the executor's memory, while it waits, than two pieces."""
    piece = SLOT // 2
    monkeypatch.setattr(remote_group, "PIECE", piece)
    monkeypatch.setattr(connections, "_MOST_BYTES", 2 * piece)
    one = ways.connect("shared")
    assert isinstance(one._channel, ClientSharedChannel)
    channel, sent = one._channel, [0]
    send = channel.send

    def counted(message: ToExecutor | ToClient, tensors: Sequence[Tensor] = ()) -> None:
        send(message, tensors)
        calls = [one._open[number].call for number in channel._of_call]
        sent.append(sum(call.nbytes for call in calls))  # inputs, 96 wide, are larger than outputs, 64

    monkeypatch.setattr(channel, "send", counted)
    shape = next(group for group in one.base.groups if DOWN in group.outputs)
    twin, x = ways.connect("socket"), torch.randn(2000, 96)
    (found,), (expected,) = (RemoteGroup(own, shape).launch(x, [DOWN]).result() for own in (one, twin))
    assert found.shape == (2000, 64) and torch.allclose(found, expected, atol=1e-5)
    assert piece < max(sent) <= 2 * piece
    assert channel._slots._whole.view(-1, SLOT)[:, piece:].count_nonzero() == 0
    one.close()
    twin.close()


def test_a_client_that_changes_its_slot_meanwhile_hurts_itself_alone(ways: Ways) -> None:
    """It scribbles over all its slots while they are computed on and answered."""
    victim, hostile = ways.connect("shared"), ways.connect("shared")
    assert isinstance(hostile._channel, ClientSharedChannel)
    whole = hostile._channel._slots._whole
    over = threading.Event()

    def scribble() -> None:
        while not over.is_set():
            whole.random_()

    thread = threading.Thread(target=scribble)
    thread.start()
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    try:
        for _ in range(30):
            call, given, widths = drawn_call(generator)
            theirs = hostile.submit(call, given, widths)
            found = victim.submit(call, given, widths).result(30)
            assert all(map(torch.equal, found, ways.linears.compute(call, given)))
            theirs.result(30)  # anything, in time
    finally:
        over.set()
        thread.join()
    victim.close()
    hostile.close()


def test_memory_goes_with_its_connection(ways: Ways) -> None:
    """Fifty leave no file and no mapping."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("coserve-split")

    files = len(os.listdir("/proc/self/fd"))
    before = mappings()
    for _ in range(50):
        connection = ways.connect("shared")
        call, given, widths = drawn_call(torch.Generator())
        connection.submit(call, given, widths).result(30)
        connection.close()
        del connection
    wait_until(lambda: ways.services["unix"].clients == 0)
    wait_until(lambda: mappings() <= before and len(os.listdir("/proc/self/fd")) <= files)


def test_an_executor_without_memory_to_share_goes_on_without(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        connection = ways.connect("shared")
    assert connection.base.slots is None
    call, given, widths = drawn_call(torch.Generator())
    assert all(
        map(torch.equal, connection.submit(call, given, widths).result(30), ways.linears.compute(call, given))
    )
    connection.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_client_that_stops_is_dropped_and_others_go_on(ways: Ways, tmp_path: Path, is_shared: bool) -> None:
    address, slot_bytes = Address(path=str(tmp_path / "a.sock")), SLOT if is_shared else 0
    service = SplitService(ways.executor, address, slot_bytes=slot_bytes, silence=0.3)
    other = ExecutorConnection(SocketTransport(service.address), HELLO)
    call, given, widths = drawn_call(torch.Generator().manual_seed(1))

    def within_a_header(channel: SocketChannel[ToClient]) -> None:
        channel.socket.sendall(b"\0\0")

    def within_rows(channel: SocketChannel[ToClient]) -> None:
        channel.send(call)  # without them

    def before_answers(channel: SocketChannel[ToClient]) -> None:
        channel.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            while True:
                channel.send(call, given)

    acts: list[Callable[[SocketChannel[ToClient]], None]] = [within_a_header, within_rows, before_answers]
    for act in acts:
        raw = service.address.connect()
        channel = SocketChannel[ToClient](raw, decode_to_client)
        greet(channel, HELLO, "")
        assert service.clients == 2
        act(channel)
        found = other.submit(call, given, widths).result(30)
        assert all(map(torch.equal, found, ways.linears.compute(call, given)))
        wait_until(lambda: service.clients == 1)
        raw.close()
    other.close()
    service.close()


def test_who_is_refused_cannot_hold_up_who_refuses() -> None:
    """It sends a byte every now and then, for ever."""
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def dribble() -> None:
        with suppress(OSError):
            while not over.wait(0.01):
                theirs.sendall(b"x")

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    channel = SocketChannel[ToExecutor](ours, decode_to_executor)
    refusing = threading.Thread(target=channel.refuse, args=(Fault("ConfigError", "no"),), daemon=True)
    refusing.start()
    refusing.join(10)
    over.set()
    dribbling.join()
    assert not refusing.is_alive()
    theirs.close()
