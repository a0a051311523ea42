"""The owner of an address, by which connections and wrong keys are counted."""

import functools
import ipaddress
from typing import Final

LOOPBACK: Final = "loopback"  # all addresses of this machine's own
_MOST_OWNERS: Final = 4096  # addresses whose owner is cached: finding it takes 40 us


@functools.lru_cache(_MOST_OWNERS)
def owner_of(host: str | None) -> str:
    """Key under which an address's connections are counted: `LOOPBACK`, also for None as at a unix socket,
    the IPv4 address, or the /64 network of an IPv6 address, as one host has 2^64 of these."""
    try:
        address = ipaddress.ip_address((host or "127.0.0.1").partition("%")[0])
    except ValueError:
        return str(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
