"""Proxies whose word on a client's address counts."""

import ipaddress
from collections.abc import Sequence
from typing import Final, TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOPS: Final = 32  # proxies in a row that are looked at


class TrustedProxies:
    """Gives a request from a trusted proxy the address and the scheme of the proxy's own client.

    `X-Forwarded-For` is read from its end, where the nearest proxy has written: the first address that is no
    trusted proxy's is the client's. What stands before it is the client's own claim, and is not read. The
    headers of anybody else are ignored.
    """

    def __init__(self, app: ASGIApp, networks: Sequence[Network]) -> None:
        self.app, self._networks = app, networks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = address_in(scope["client"][0]) if scope["type"] == "http" and scope.get("client") else None
        if peer is not None and is_trusted(peer, self._networks):
            headers = Headers(scope=scope)
            scope = dict(scope)
            scope["client"] = (str(self._client(headers, peer)), 0)
            told = headers.getlist("x-forwarded-proto")
            scheme = told[-1].rpartition(",")[2].strip().lower() if told else ""
            if scheme in ("http", "https"):
                scope["scheme"] = scheme
        await self.app(scope, receive, send)

    def _client(self, headers: Headers, peer: Address) -> Address:
        found = peer
        hops = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for hop in hops[: -_HOPS - 1 : -1]:
            address = address_in(hop.strip())
            if address is None:
                break
            found = address
            if not is_trusted(address, self._networks):
                break
        return found


def address_in(written: str) -> Address | None:
    """The address that a proxy wrote, perhaps with a port; None for anything else."""
    if written.startswith("["):
        written = written[1:].partition("]")[0]
    elif written.count(":") == 1:
        written = written.partition(":")[0]
    try:
        address = ipaddress.ip_address(written.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_trusted(address: Address, networks: Sequence[Network]) -> bool:
    """Tells whether an address is in one of the networks."""
    return any(address.version == network.version and address in network for network in networks)


def networks_of(written: Sequence[str]) -> tuple[Network, ...]:
    """The networks of a setting. Raises ValueError."""
    return tuple(ipaddress.ip_network(one, strict=False) for one in written)
