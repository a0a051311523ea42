"""Connections that never greet an executor: they hold no place, and clients with the right key are served."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from certificates import Authority
from coserve.errors import ConfigError, Unreachable
from coserve.split import greeting
from coserve.split.address import Address
from coserve.split.connection import ExecutorConnection, call_of
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.greeting import MOST_OF_ADDRESS, MOST_UNGREETED
from coserve.split.messages import VERSION, ClientHello, encode_header
from coserve.split.service import SplitService
from coserve.split.tls import ClientTls, TlsFiles
from coserve.split.transport import SocketTransport
from models import tiny
from split_served import DOWN
from waiting import wait_until

KEY: Final = "a long secret"
KINDS: Final = ("unix", "tcp", "tls")
CROWD: Final = 200  # connections at once, more than there are places of any kind
SHORT, LONG = 1, 20 * int(os.environ.get("COSERVE_ATTACK", "1"))
HELLO: Final = ClientHello(VERSION, "stranger", key="a long guess")
CLIENT_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def manner(draws: random.Random) -> Sequence[bytes]:
    """Pieces that a stranger sends, with pauses between them; then it is silent."""
    whole = framed(encode_header(HELLO))
    cut = draws.randrange(1, len(whole))
    return draws.choice(
        [
            [],
            [whole[:cut]],
            [whole],  # a wrong key
            [CLIENT_HELLO[: draws.randrange(1, len(CLIENT_HELLO))]],
            [bytes([byte]) for byte in whole],
            [bytes([byte]) for byte in CLIENT_HELLO],
            [draws.randbytes(draws.randrange(1, 2000))],
            [struct.pack(">I", 1 << 13) + bytes(100)] + [b"\0"] * 1000,
        ]
    )


class Crowd:
    """Strangers that stay, and come again where they are sent away, until `close`."""

    def __init__(self, address: Address, seed: int) -> None:
        self._address, self._draws = address, random.Random(seed)
        self._open: dict[socket.socket, list[bytes]] = {}
        self._over = threading.Event()
        self.came = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)
        for raw in self._open:
            raw.close()

    def _run(self) -> None:
        while not self._over.is_set():
            while len(self._open) < CROWD and not self._over.is_set():
                with suppress(OSError):
                    raw = self._address.connect()
                    raw.setblocking(False)
                    self._open[raw] = list(manner(self._draws))
                    self.came += 1
            for raw, pieces in list(self._open.items()):
                if not self._goes_on(raw, pieces):
                    del self._open[raw]
                    raw.close()
            time.sleep(0.005)

    def _goes_on(self, raw: socket.socket, pieces: list[bytes]) -> bool:
        try:
            if pieces:
                raw.send(pieces.pop(0))
            return bool(raw.recv(1000))
        except BlockingIOError:
            return True
        except OSError:
            return False


class Target:
    """An executor, and clients that have its key."""

    def __init__(self, kind: str, folder: Path) -> None:
        own = Authority(folder / "authority").sign("executor") if kind == "tls" else None
        files = None if own is None else TlsFiles(own.certificate, own.key)
        self.tls = None if files is None else ClientTls(pin=files.fingerprint())
        self.executor = BaseExecutor(BaseLinears(tiny("llama")))
        address = Address(path=str(folder / "a.sock")) if kind == "unix" else Address(host="127.0.0.1")
        address = Address(host="127.0.0.1", is_encrypted=True) if kind == "tls" else address
        self.service = SplitService(self.executor, address, KEY, tls=files and files.context())

    def ask(self) -> float:
        """Connects with the right key, has a product computed, and leaves; returns the seconds."""
        began = time.monotonic()
        transport = SocketTransport(self.service.address, tls=self.tls)
        connection = ExecutorConnection(transport, ClientHello(VERSION, "friend", key=KEY), patience=0.0)
        x = torch.randn(2, 96)
        asked = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        assert connection.submit(asked, [x], [64]).result(20)[0].shape == (2, 64)
        connection.close()
        return time.monotonic() - began

    def close(self) -> None:
        self.service.close()
        self.executor.close()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(request.param, tmp_path_factory.mktemp("ungreeted"))
    yield target
    target.close()


def seeds() -> Iterator[Any]:
    for seed in range(max(SHORT, LONG)):
        yield pytest.param(seed, marks=() if seed < SHORT else pytest.mark.slow)


@pytest.mark.parametrize("seed", seeds())
def test_clients_with_the_key_are_served_beside_a_crowd(target: Target, seed: int) -> None:
    crowd, threads = Crowd(target.service.address, seed), threading.active_count()
    try:
        wait_until(lambda: crowd.came > CROWD and target.service.ungreeted > MOST_UNGREETED / 2)
        for _ in range(5):
            assert target.ask() < 10
            assert target.service.ungreeted <= MOST_UNGREETED
        assert threading.active_count() <= threads + MOST_UNGREETED
    finally:
        crowd.close()
    wait_until(lambda: target.service.ungreeted == target.service.clients == 0)


def test_silence_takes_no_place_and_ends_in_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 connections that say nothing: the first of them go, the last ones after their seconds."""
    silent = [target.service.address.connect() for _ in range(CROWD)]
    wait_until(lambda: target.service.ungreeted == MOST_UNGREETED)
    for raw in silent:
        raw.settimeout(20)
    assert [raw.recv(1) for raw in silent[: CROWD - MOST_UNGREETED]] == [b""] * (CROWD - MOST_UNGREETED)
    monkeypatch.setattr(target.service._greeter, "_seconds", 1.0)
    target.ask()
    assert [raw.recv(1) for raw in silent] == [b""] * CROWD
    assert target.service.ungreeted == 0
    for raw in silent:
        raw.close()


def test_one_address_has_few_and_another_is_served(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address elsewhere has fewer than this machine; where all are taken, those of the address with the
    most go."""
    owners = iter([*["far"] * 50, *["away"] * 50, *[f"place {n}" for n in range(150)]])
    monkeypatch.setattr(greeting, "owner_of", lambda _: next(owners, "friend"))
    count = target.service._greeter._count
    silent = [target.service.address.connect() for _ in range(50)]
    wait_until(lambda: count == {"far": MOST_OF_ADDRESS})
    silent += [target.service.address.connect() for _ in range(50)]
    wait_until(lambda: count == {"far": MOST_OF_ADDRESS, "away": MOST_OF_ADDRESS})
    silent += [target.service.address.connect() for _ in range(150)]
    wait_until(lambda: sum(count.values()) == MOST_UNGREETED == len(count))
    target.ask()
    for raw in silent:
        raw.close()
    wait_until(lambda: target.service.ungreeted == 0)


def test_wrong_keys_are_refused_with_a_reason_and_wait_in_nobodys_way(target: Target) -> None:
    def refused() -> None:
        transport = SocketTransport(target.service.address, tls=target.tls)
        with pytest.raises((ConfigError, Unreachable), match=r"key|too many connections"):
            ExecutorConnection(transport, HELLO, patience=0.0)

    threads = [threading.Thread(target=refused) for _ in range(12)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        target.ask()
    for thread in threads:
        thread.join(20)
    wait_until(lambda: target.service.ungreeted == 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_that_comes_while_an_executor_starts_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once found a service without the part that counts it."""
    start, answers = threading.Thread.start, list[Any]()

    def ask() -> None:
        found, hello = list[ExecutorConnection](), ClientHello(VERSION, "early", key=KEY)

        def is_connected() -> bool:
            with suppress(Unreachable):  # the socket is not there yet, or nobody listens
                found.append(ExecutorConnection(address, hello, patience=20.0))
            return bool(found)

        wait_until(is_connected)
        connection = found[0]
        x = torch.randn(2, 96)
        asked = call_of([DOWN], [x], "float32", direction="forward", work="inference")
        answers.extend(connection.submit(asked, [x], [64]).result(20))
        connection.close()

    def slow(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "split-greet":
            time.sleep(0.3)  # for the greeting to come meanwhile

    address = Address(path=str(tmp_path / "a.sock"))
    client = threading.Thread(target=ask)
    executor = BaseExecutor(BaseLinears(tiny("llama")))
    client.start()
    time.sleep(0.1)
    monkeypatch.setattr(threading.Thread, "start", slow)
    service = SplitService(executor, address, KEY)
    client.join(30)
    service.close()
    executor.close()
    assert [tuple(answer.shape) for answer in answers] == [(2, 64)]
