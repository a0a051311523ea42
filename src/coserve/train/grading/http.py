"""A grader elsewhere: an answer is posted to a URL, whose reply has the reward.

A tenant's URL is a request that the server makes: it could reach what only the server can, such as services
on its own machine or a cloud's metadata. So the name is resolved here, addresses that are not public are
refused, the connection goes to the address that was checked, and no redirect is followed. The operator may
name hosts that are exempt.
"""

import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import httpcore
import msgspec

from coserve.errors import ConfigError, JobError
from coserve.train.grading.graders import checked_reward

_MOST_REPLY: Final = 1 << 16  # bytes
_MOST_SECONDS: Final = 60.0
_TRIES: Final = 3
_PAUSE: Final = 0.5  # seconds before the second try, twice as many before the third
_LONGEST_URL: Final = 2000
_CONTROL: Final = frozenset([*range(33), 127])
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address within
# The only one of the internet's hosts; others are unassigned, of one site, or have an IPv4 address within.
_GLOBAL: Final = ipaddress.ip_network("2000::/3")


class AddressRefused(Exception):
    """An address that is not public."""


class NoReply(Exception):
    """A try without a reply."""


class _TimedStream(httpcore.NetworkStream):
    """A stream that fails after a moment, however slowly bytes come: one that sent a byte now and then would
    hold a thread for days."""

    def __init__(self, inner: httpcore.NetworkStream, until: float) -> None:
        self._inner, self._until = inner, until

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Reads what has come."""
        return self._inner.read(max_bytes, self._left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Writes all bytes."""
        self._inner.write(buffer, self._left())

    def close(self) -> None:
        """Closes the connection."""
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """The stream under TLS."""
        return _TimedStream(self._inner.start_tls(ssl_context, server_hostname, self._left()), self._until)

    def get_extra_info(self, info: str) -> Any:
        """See httpcore."""
        return self._inner.get_extra_info(info)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("it takes too long")
        return left


class _PublicNetwork(httpcore.SyncBackend):
    """Connects to public addresses alone, and to those of the hosts in `exempt`, until a moment."""

    def __init__(self, exempt: Collection[str], until: float) -> None:
        self._exempt, self._until = exempt, until

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connects to the address that was checked: a name could mean another one a moment later."""
        try:
            found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            raise httpcore.ConnectError("the host cannot be resolved") from error
        if host not in self._exempt and not all(map(is_public, found)):
            raise AddressRefused(host)
        stream = super().connect_tcp(found[0], port, timeout, local_address, socket_options)
        return _TimedStream(stream, self._until)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """Refuses: no grader is a file."""
        raise AddressRefused(path)


@dataclass(frozen=True)
class HttpGrader:
    """The number `reward` (or `score`) in the JSON with which `url` replies to
    `{"sample": {"output_text": ...}, "item": ...}`. It has `timeout` seconds, and three tries.

    `allowed_hosts` may have addresses that are not public.
    """

    type: ClassVar[str] = "http"
    url: str
    timeout: float = 10.0
    name: str = ""
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        url = self.url if isinstance(self.url, str) else ""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"the grader's url cannot be read: {error}") from error
        if parts.scheme not in ("http", "https") or not host or not url.isascii() or len(url) > _LONGEST_URL:
            raise ConfigError(f"the grader's url must be an http or https one, not {str(self.url)[:80]!r}")
        if set(map(ord, url)) & _CONTROL:
            raise ConfigError("the grader's url has a space or a control character")
        if parts.username is not None:
            raise ConfigError("the grader's url may have no user and password: events would show them")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise ConfigError("the grader's timeout must be a number of seconds")
        if not 0.0 < self.timeout <= _MOST_SECONDS:
            raise ConfigError(f"the grader's timeout must be above 0 and at most {_MOST_SECONDS:g} seconds")
        if host not in self.allowed_hosts and _is_address(host) and not is_public(host):
            raise ConfigError(_refusal(host))

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        body = msgspec.json.encode({"sample": {"output_text": answer}, "item": dict(item)})
        problem = ""
        for number in range(_TRIES):
            if number:
                time.sleep(_PAUSE * number)
            try:
                reply = self._ask(body)
            except AddressRefused as error:
                raise JobError(_refusal(str(error))) from error
            except NoReply as error:
                problem = str(error)
            else:
                return _reward_in(reply)
        raise JobError(f"the grader at {self.url} failed {_TRIES} times: {problem}")

    def _ask(self, body: bytes) -> bytes:
        """The body of the reply. Raises NoReply."""
        status, reply = post(self.url, body, {}, self.timeout, self.allowed_hosts)
        if status != 200:  # no redirect is followed
            raise NoReply(f"it replied with status {status}")
        return reply


def post(
    url: str, body: bytes, headers: Mapping[str, str], timeout: float, exempt: Collection[str]
) -> tuple[int, bytes]:
    """Posts JSON to a public address, or one of the `exempt` hosts; the status and the body of the reply.
    Raises AddressRefused, and NoReply where there is none within `timeout` seconds."""
    network = _PublicNetwork(exempt, time.monotonic() + timeout)
    sent = [
        ("host", urlsplit(url).netloc.rpartition("@")[2]),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("accept-encoding", "identity"),
        *headers.items(),
    ]
    limits = dict.fromkeys(("connect", "read", "write", "pool"), timeout)
    try:
        with (
            httpcore.ConnectionPool(network_backend=network) as pool,
            pool.stream("POST", url, headers=sent, content=body, extensions={"timeout": limits}) as response,
        ):
            reply = b""
            for piece in response.iter_stream():
                reply += piece
                if len(reply) > _MOST_REPLY:
                    raise NoReply(f"its reply is longer than {_MOST_REPLY} bytes")
            return response.status, reply
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
        raise NoReply(str(error) or f"{type(error).__name__} within {timeout:g} s") from error


def is_public(address: str) -> bool:
    """Tells whether an IP address is one of the public internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is not None:
            return is_public(str(inner)) and (found.ipv4_mapped is not None or found.is_global)
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found not in _GLOBAL:
            return False
    return found.is_global and not found.is_multicast


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _refusal(host: str) -> str:
    return (
        f"the grader's host {host!r} has an address that is not public: the operator can allow it "
        "(engine.grader_hosts)"
    )


def _reward_in(reply: bytes) -> float:
    try:
        found = msgspec.json.decode(reply)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JobError("the grader's reply is not JSON") from error
    if not isinstance(found, dict) or not {"reward", "score"} & found.keys():
        raise JobError("the grader's reply must be an object with a number as its reward")
    return checked_reward(found.get("reward", found.get("score")), "the grader's reply")
