"""Accepts clients of a base executor at an address, and tells those that wait that it is alive."""

import hmac
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from coserve.errors import ConfigError, CoserveError, Unreachable
from coserve.memory.malloc import keep_freed_memory, return_freed_memory
from coserve.split.address import Address
from coserve.split.batching import BatchingConfig
from coserve.split.channel import SocketChannel
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.greeting import Arrival, Greeter
from coserve.split.layers import LayerChoice
from coserve.split.messages import ClientHello, Limits, ToExecutor, decode_to_executor
from coserve.split.payload import DTYPES
from coserve.split.rank_processes import load_over_ranks
from coserve.split.session import SILENT_SECONDS, ClientSession
from coserve.split.shard import Shard
from coserve.split.shared_memory import SLOT_BYTES
from coserve.split.tls import TlsFiles, TlsStream

_log = logging.getLogger(__name__)
MOST_CLIENTS: Final = 64
_MOST_BEFORE: Final = 1 << 16  # bytes of TLS before a greeting is accepted, certificates of a client included
BEAT_SECONDS: Final = 1.0  # between signs of life to clients that wait
# A product that takes longer hangs: the executor gives no further sign of life.
_STUCK_SECONDS: Final = 120.0
_KEYS_SECONDS: Final = 5.0  # seconds between two checks of connected clients' keys
# Threads are waited for as long: a process whose interpreter ends while one computes in torch aborts.
_CLOSE_SECONDS: Final = 2.0
_HEARING_SECONDS: Final = 0.2  # between two looks for a signal that another thread got
KeyCheck = Callable[[str], bool]  # tells whether a key is valid; called on threads of clients


def shared_key(key: str) -> KeyCheck:
    """Accepts one key, compared in constant time."""
    return lambda given: hmac.compare_digest(given.encode(), key.encode())


def check_access(address: Address, has_keys: bool, has_certificate: bool) -> None:
    """Raises ConfigError for an address that other hosts can reach, without a key, and for TLS elsewhere."""
    if not has_keys and not address.is_local:
        raise ConfigError(f"{address} can be reached from other hosts, so a key is needed")
    if address.is_encrypted and not has_certificate:
        raise ConfigError(f"{address} needs a certificate")
    if has_certificate and not address.is_encrypted:
        raise ConfigError(f"a certificate is for tls:HOST:PORT, not for {address}")


class SplitService:
    """Accepts clients at an address. `key` is the one that they must present, empty for none; `key_check` may
    accept others."""

    def __init__(
        self,
        executor: BaseExecutor,
        address: Address,
        key: str = "",
        key_check: KeyCheck | None = None,
        tls: ssl.SSLContext | None = None,
        slot_bytes: int = SLOT_BYTES,
        silence: float = SILENT_SECONDS,
    ) -> None:
        """Listens. `tls` is for `tls:` addresses (`TlsFiles.context`). `slot_bytes` are those of a slot
        of shared memory, which clients at a unix socket are offered; 0 for none. A client that stops for
        `silence` seconds within a message, or before it has taken an answer, is dropped. Raises ServerError,
        and as `check_access`."""
        check_access(address, bool(key) or key_check is not None, tls is not None)
        if not address.is_local and tls is None:
            _log.warning("keys and tensors are readable on the network to %s: tls:HOST:PORT is not", address)
        self._executor, self._tls = executor, tls
        self._slot_bytes, self._silence = slot_bytes, silence
        checks = [*([shared_key(key)] if key else ()), *([key_check] if key_check else ())]
        self._accepts: KeyCheck = lambda given: not checks or any(check(given) for check in checks)
        self._clients: set[ClientSession] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listening, self.address = address.listen()
        self._threads = [threading.Thread(target=self._beat, name="split-beats", daemon=True)]
        if key_check is not None:
            self._threads.append(threading.Thread(target=self._check_keys, name="split-keys", daemon=True))
        self._greeter = Greeter(self._listening, self._channel, self._begin)
        for thread in self._threads:
            thread.start()
        self._greeter.start()

    @property
    def clients(self) -> int:
        """Connections now that have been greeted."""
        return len(self._clients)

    @property
    def ungreeted(self) -> int:
        """Connections now that have not been greeted."""
        return len(self._greeter)

    def close(self) -> None:
        """Ends all connections, and waits for `_CLOSE_SECONDS` in all for their threads."""
        with self._lock:
            self._closing.set()
            clients = list(self._clients)
        self._greeter.close()
        for client in clients:
            client.close()
        until = time.monotonic() + _CLOSE_SECONDS
        joins = [own.join for own in clients] + [own.join for own in self._threads]
        for join in joins:
            join(max(until - time.monotonic(), 0.0))
        self._listening.close()
        self.address.remove()

    def _begin(self, arrival: Arrival, hello: ClientHello) -> None:
        """Answers a greeting, on a thread of its own."""

        def left(client: ClientSession) -> None:
            self._greeter.leave(arrival)
            arrival.close = None  # which holds the session
            with self._lock:
                self._clients.discard(client)

        client = ClientSession(
            arrival.channel,
            self._executor,
            partial(self._is_accepted, arrival),
            left,
            self._slot_bytes,
            self._silence,
            partial(self._admit, arrival),
        )
        arrival.close = client.close
        client.start(hello)

    def _is_accepted(self, arrival: Arrival, key: str) -> bool:
        arrival.refused = not self._accepts(key)
        return not arrival.refused

    def _admit(self, arrival: Arrival, client: ClientSession) -> None:
        """Gives a client whose key is right its place. Raises Unreachable."""
        with self._lock:
            if len(self._clients) >= MOST_CLIENTS:
                raise Unreachable(f"the executor has {MOST_CLIENTS} clients, which is all it takes")
            if self._closing.is_set():
                raise Unreachable("the executor is ending")
            self._clients.add(client)
        if not self._greeter.leave(arrival):
            raise Unreachable("the executor has too many connections now")
        arrival.close = None  # which holds the session
        if isinstance(arrival.channel.stream, TlsStream):
            arrival.channel.stream.most = None

    def _channel(self, connected: socket.socket) -> SocketChannel[ToExecutor]:
        stream = None if self._tls is None else TlsStream(connected, self._tls, most=_MOST_BEFORE)
        return SocketChannel(connected, decode_to_executor, stream, self._silence, self._silence)

    def _beat(self) -> None:
        """Sends signs of life, unless a product hangs."""
        while not self._closing.wait(BEAT_SECONDS):
            if self._executor.busy_seconds < _STUCK_SECONDS:
                self._for_each(ClientSession.beat)

    def _check_keys(self) -> None:
        """Ends connections whose key is no longer valid."""
        while not self._closing.wait(_KEYS_SECONDS):
            self._for_each(self._check_key)

    def _check_key(self, client: ClientSession) -> None:
        try:
            if client.key is not None and not self._accepts(client.key):
                _log.info("a client's key is no longer accepted: its connection ends")
                client.close()
        except CoserveError as error:
            _log.warning("keys cannot be looked up now: %s", error)

    def _for_each(self, act: Callable[[ClientSession], None]) -> None:
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            act(client)


def run_service(
    model: str,
    listen: str,
    key: str,
    dtype: str,
    config: BatchingConfig,
    choice: LayerChoice,
    shared_memory: bool = True,
    key_check: KeyCheck | None = None,
    tls: TlsFiles | None = None,
    shard: Shard | None = None,
    device: str = "auto",
    ranks: int = 1,
    placement: str = "cut",
) -> None:
    """Loads a model and serves its linears, or a shard of each, until SIGTERM or SIGINT. With `tls`, `tcp:`
    addresses are `tls:` ones. `device` is as in `BaseLinears.load`; several `ranks` have parts of the linears
    as `placement` says. Raises ConfigError, ModelError, ServerError."""
    if ranks > 1 and shard is not None:
        raise ConfigError("--shard does not go with --tensor-parallel: ranks have parts of whole linears")
    address = Address.parse(listen)
    if tls is not None and not address.path:  # a unix socket is refused
        address = replace(address, is_encrypted=True)
    context = None if tls is None else tls.context()
    check_access(address, bool(key) or key_check is not None, tls is not None)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"type {dtype!r} is none of auto, {', '.join(DTYPES)}")
    heard = list[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: heard.append(number))
    limits = Limits(rows=min(Limits().rows, config.client_rows))
    keep_freed_memory()  # in one arena: each client has threads, whose own would grow to its largest call
    linears: BaseLinears
    if ranks > 1:
        linears, _ = load_over_ranks(model, ranks, placement, dtype, limits, choice, device)
        config = replace(config, products=1)  # ranks compute one call at a time
    else:
        linears = BaseLinears.load(model, dtype, limits, choice, shard, device)
    return_freed_memory()
    executor = BaseExecutor(linears, config)
    service = SplitService(executor, address, key, key_check, context, SLOT_BYTES if shared_memory else 0)
    count = sum(len(group.outputs) for group in linears.hello.groups)
    part = "" if shard is None else f"shard {shard.shape} of "
    each = "" if ranks == 1 else f" on each of {ranks} ranks ({placement})"
    print(
        f"executor of {linears.hello.fingerprint}: {part}{count} linears, {linears.nbytes / 2**20:.1f} MiB "
        f"on {linears.device}{each}, at {service.address}"
        f"{'' if tls is None else f', certificate {tls.fingerprint()}'}",
        flush=True,
    )
    # Handlers run on this thread alone. A wait for a lock goes on where the system gave the signal to another
    # thread: so some executors that were at work, one of twelve in a test under load, did not end.
    while not heard:
        time.sleep(_HEARING_SECONDS)
    service.close()
    executor.close(_CLOSE_SECONDS)
