"""Hostile frames at every transport: each ends its connection or is refused, and a client beside is answered.

Attacks are made of a good conversation: frames that lie in one field, that are cut at any byte, that come
twice, with another payload, with slots of shared memory that are not there.
"""

import random
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from torch import Tensor

from certificates import Authority
from coserve.split.address import Address
from coserve.split.channel import SocketChannel
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import (
    VERSION,
    Beat,
    ClientHello,
    Limits,
    LinearAnswer,
    LinearCall,
    ToClient,
    decode_to_client,
    encode_header,
)
from coserve.split.service import SplitService
from coserve.split.shared_memory import FileStream, Slots
from coserve.split.tls import ClientTls, TlsFiles
from coserve.split.transport import SocketTransport, greet
from coserve.wire.frames import ByteStream, send_views
from coserve.wire.messages import Fault
from models import tiny

KEY: Final = "a long secret"
DOWN: Final = "model.layers.0.mlp.down_proj"  # [64, 96]
ROWS: Final = 2
PAYLOAD: Final = ROWS * 96 * 4
KINDS: Final = ("shared", "socket", "tls")
HELLO: Final = ClientHello(VERSION, "hostile", key=KEY)
CALL: Final = LinearCall(1, (DOWN,), "forward", ROWS, "float32", "inference", PAYLOAD)


class Target:
    """An executor at a transport, with a healthy client beside the attacker."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.executor = BaseExecutor(BaseLinears(tiny("llama"), Limits(rows=64, payload=1 << 20)))
        context, self._tls = None, ClientTls()
        address = Address(path=str(folder / "a.sock"))
        if kind == "tls":
            authority = Authority(folder / "authority")
            own = authority.sign("executor")
            context = TlsFiles(own.certificate, own.key).context()
            self._tls = ClientTls(ca=authority.certificate)
            address = Address.parse("tls:127.0.0.1:0")
        # Who says half of a sentence and waits is left after 0.2 s, so that cuts can be told at once.
        self.service = SplitService(self.executor, address, KEY, tls=context, slot_bytes=1 << 14, silence=0.2)
        transport = SocketTransport(self.service.address, kind == "shared", self._tls)
        self.healthy = ExecutorConnection(transport, HELLO, patience=0.0)
        weight = tiny("llama").get_submodule(DOWN).weight
        assert isinstance(weight, Tensor)
        self._weight = weight.detach()

    def check(self) -> None:
        """The healthy client is answered, over the connection that it had."""
        x = torch.randn(3, 96)
        call = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        answer = self.healthy.submit(call, [x], [64])
        torch.testing.assert_close(answer.result(20)[0], x @ self._weight.T)
        assert answer.sent == 1

    def raw(self) -> "Line":
        raw = self.service.address.connect()
        raw.settimeout(10)
        return Line(raw, self._tls.connect(raw, "127.0.0.1") if self.kind == "tls" else raw)

    def greeted(self) -> "tuple[Line, SocketChannel[ToClient], Slots | None]":
        """An attacker's connection, with its slots where there are any."""
        raw = self.raw()
        files = FileStream(raw.socket) if self.kind == "shared" else None
        channel = SocketChannel(raw.socket, decode_to_client, files or raw.stream)
        base = greet(channel, msgspec.structs.replace(HELLO, shared_memory=files is not None), "it")
        slots = None
        if files is not None and base.slots is not None and files.file is not None:
            slots = Slots(files.file, base.slots)
            files.close()
        return raw, channel, slots

    def close(self) -> None:
        self.healthy.close()
        self.service.close()
        self.executor.close()


class Line:
    """An attacker's bytes, encrypted where that has to be."""

    def __init__(self, sock: socket.socket, stream: ByteStream) -> None:
        self.socket, self.stream = sock, stream

    def sendall(self, data: bytes) -> None:
        send_views(self.stream, [memoryview(data)] if data else [])

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def ended(self) -> None:
        """Waits until the other end has closed, and closes; raises TimeoutError where it does not."""
        try:
            while self.stream.recv(1 << 16):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        self.socket.close()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(request.param, tmp_path_factory.mktemp("split"))
    yield target
    target.close()


def frame(message: ClientHello | LinearCall | bytes) -> bytes:
    body = message if isinstance(message, bytes) else encode_header(message)
    return struct.pack(">I", len(body)) + body


def received(channel: SocketChannel[ToClient]) -> ToClient | None:
    """The next message but for beats, which come between answers on a loaded machine."""
    while isinstance(message := channel.receive(), Beat):
        pass
    return message


def test_a_conversation_cut_at_every_byte(target: Target) -> None:
    """The greeting and a call with its rows end after each of their bytes, by closing or by silence."""
    whole = frame(HELLO) + frame(CALL) + bytes(PAYLOAD)
    own = len(frame(HELLO)) + len(frame(CALL))
    draws = random.Random(secrets.randbits(32))
    # Every byte of the headers where that is cheap; of a TLS connection, which is the same beneath, some.
    places = list(range(own + 2)) if target.kind != "tls" else draws.sample(range(own), 12)
    for place in [*places, len(whole) - 1, len(whole)]:
        raw = target.raw()
        raw.sendall(whole[:place])
        raw.socket.close()
    for place in draws.sample(range(len(frame(HELLO)) + 1, len(whole) - 1), 3):
        raw = target.raw()
        raw.sendall(whole[:place])
        raw.ended()  # though it has closed nothing
    target.check()


def lies() -> list[dict[str, Any]]:
    """Fields of a call that are not as they should be."""
    return [
        *({"nbytes": nbytes} for nbytes in (0, 1, PAYLOAD - 4, PAYLOAD + 4, 1 << 14, 1 << 20, (1 << 20) + 1)),
        *({"rows": rows} for rows in (0, 1, 3, 64, 65, 1 << 31, -1, (1 << 64) - 1, 2.5, None)),
        *({"dtype": dtype} for dtype in ("bfloat16", "float16", "float64", "", None)),
        *({"direction": direction} for direction in ("backward", "both", 3)),
        *({"paths": paths} for paths in ((), ("x",), (DOWN, DOWN), ("a" * 513,), (DOWN,) * 65, None, DOWN)),
        *({"work": work} for work in ("none", None)),
        *({"deadline": deadline} for deadline in (-1.0, float("inf"), float("nan"), "soon", 0.0)),
        *({"slot": slot} for slot in (0, 3, 4, 1 << 31, -1, 1 << 63, "0", 1.5)),
        *({"slot": 1, "nbytes": nbytes} for nbytes in (0, PAYLOAD + 4, (1 << 14) + 4, 1 << 20)),
        {"slot": 1, "rows": 64, "nbytes": 64 * 96 * 4},  # right, and larger than a slot
        {"number": -1},
        {"number": 1 << 63},
        {"type": "ClientHello"},
        {"type": "LinearAnswer"},
        {"type": "Beat"},
        {"type": None},
    ]


def test_frames_that_lie(target: Target) -> None:
    """Each is refused, or ends the connection; after a refusal the next call is answered."""
    refused = 0
    truths = [{"deadline": float("inf")}, {"number": 1 << 63}, {"slot": 0}, {"slot": 3}]
    for lie in lies():
        raw, channel, _ = target.greeted()
        fields = msgspec.msgpack.decode(encode_header(CALL)) | lie
        slot, nbytes = fields.get("slot"), fields["nbytes"]
        try:
            raw.sendall(frame(msgspec.msgpack.encode(fields)))
            if slot is None and 0 <= nbytes <= 1 << 20:
                raw.sendall(bytes(nbytes))
            answer = received(channel)
        except (ConnectionError, ssl.SSLError):
            answer = None
        if isinstance(answer, LinearAnswer):
            is_right = answer.fault is None
            assert is_right == (lie in truths), (lie, answer)
            assert answer.slot == (slot if is_right else None)
            if is_right and slot is None:
                channel.receive_tensors(answer, ROWS, [64], "float32")
            channel.send(CALL, [torch.zeros(ROWS, 96)])
            again = received(channel)
            assert isinstance(again, LinearAnswer) and again.fault is None, lie
            refused += 1
        else:
            assert answer is None or isinstance(answer, Fault), lie
        raw.socket.close()
    assert refused > 15
    target.check()


def test_frames_with_a_byte_changed(target: Target) -> None:
    """300 times: nothing but an answer, a refusal or the end."""
    seed = secrets.randbits(32)
    draws = random.Random(seed)
    good = frame(CALL)
    for _ in range(300 if target.kind != "tls" else 60):
        place, value = draws.randrange(len(good)), draws.randrange(256)
        raw, channel, _ = target.greeted()
        raw.sendall(good[:place] + bytes([value]) + good[place + 1 :] + bytes(PAYLOAD))
        raw.end()
        try:
            while (answer := received(channel)) is not None:
                assert isinstance(answer, LinearAnswer | Fault), f"seed {seed}"
                if isinstance(answer, LinearAnswer) and answer.slot is None:
                    channel.skip_tensors(answer)
        except (ConnectionError, ssl.SSLError):
            pass
        raw.socket.close()
    target.check()


def test_strangers(target: Target) -> None:
    """No key or a wrong one, another version or base: refused with a reason. Another protocol: left."""
    for fields in ({"key": ""}, {"key": KEY[:-1]}, {"version": 1}, {"fingerprint": "0123"}):
        raw = target.raw()
        channel = SocketChannel[ToClient](raw.socket, decode_to_client, raw.stream)
        channel.send(msgspec.structs.replace(HELLO, **fields))
        answer = received(channel)
        assert isinstance(answer, Fault) and answer.kind in ("ConfigError", "AdapterMismatch")
        raw.ended()
    other = "tls" if target.kind != "tls" else "tcp"
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" if other == "tls" else frame(HELLO)
    for data in (hello, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4, b"\xff" * 1000):
        sock = target.service.address.connect()
        sock.settimeout(10)
        raw = Line(sock, sock)
        raw.sendall(data)
        raw.end()
        raw.ended()
    target.check()


def flooded(raw: Line, channel: SocketChannel[ToClient], slots: Slots | None) -> None:
    """The same slot in all calls at once, and no answer read; then gone."""
    for number in range(4):
        call = msgspec.structs.replace(CALL, number=number, slot=None if slots is None else 2)
        raw.sendall(frame(call) + (bytes(PAYLOAD) if slots is None else b""))


def twice(raw: Line, channel: SocketChannel[ToClient], slots: Slots | None) -> None:
    """The same number again, and a second greeting."""
    raw.sendall((frame(CALL) + bytes(PAYLOAD)) * 3 + frame(HELLO))


@pytest.mark.parametrize("act", [flooded, twice])
def test_calls_that_disturb_each_other(target: Target, act: Callable[..., None]) -> None:
    for _ in range(5):
        raw, channel, slots = target.greeted()
        act(raw, channel, slots)
        if act is twice:
            raw.ended()
        raw.socket.close()
    target.check()


def test_files_that_come_unasked_are_not_kept(target: Target, tmp_path: Path) -> None:
    """An executor takes no descriptors from clients: they cannot fill its table."""
    if target.kind == "tls":
        pytest.skip("descriptors pass unix sockets only")
    import os

    files = [os.open(tmp_path, os.O_RDONLY) for _ in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    raw, channel, _ = target.greeted()
    for _ in range(20):
        socket.send_fds(raw.socket, [frame(CALL) + bytes(PAYLOAD)], files)
        answer = received(channel)
        assert isinstance(answer, LinearAnswer) and answer.fault is None
        channel.skip_tensors(answer)
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # both ends of one connection, and its memory
    raw.socket.close()
    for file in files:
        os.close(file)
    target.check()
