"""An engine's access to the base executors of its linears: addresses, keys, TLS and privacy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from coserve.errors import ConfigError, CoserveError
from coserve.split.address import Address
from coserve.split.calls import Source
from coserve.split.endpoint import Endpoint, HiddenRows
from coserve.split.gather import assembled
from coserve.split.privacy.modes import Noise, obfuscated, shared
from coserve.split.tls import ClientTls

_SHARE_SECONDS: Final = 300.0  # that one of two parties may take for an answer


@dataclass(frozen=True, slots=True)
class BaseAccess:
    """Names executors, and what they ask their clients for.

    `addresses`, `keys` and `pins` are separated by commas: one key or pin is for all executors, several are
    for the executors in order. `patience` is how long a call waits for an executor that went away, in
    seconds. `ca`, `certificate` and `certificate_key` are files in PEM (empty: none; see `ClientTls`).
    `privacy` is "none", "noise" or "shares": with shares the first half of the executors is one party's, the
    second half the other's, in the same order.
    """

    addresses: str
    keys: str = ""
    patience: float = 5.0
    ca: str = ""
    pins: str = ""
    certificate: str = ""
    certificate_key: str = ""
    privacy: str = "none"

    def endpoints(self) -> list[Endpoint]:
        """Connects to all executors. Raises ConfigError and Unreachable."""
        addresses = [Address.parse(text.strip()) for text in self.addresses.split(",")]
        keys = _for_each(self.keys, addresses, f"the key in {EXECUTOR_KEY}")
        pins = _for_each(self.pins, addresses, "engine.base_pin")
        tls = ClientTls(self.ca or None, "", self.certificate or None, self.certificate_key or None)
        if (self.pins or tls != ClientTls()) and not any(address.is_encrypted for address in addresses):
            raise ConfigError(
                "certificates and pins are for tls:HOST:PORT, and engine.base has no such address"
            )
        found: list[Endpoint] = []
        with _closing_on_error(found):
            for address, key, pin in zip(addresses, keys, pins, strict=True):
                found.append(Endpoint(address, key, self.patience, replace(tls, pin=pin)))
        return found

    def sources(self, endpoints: Sequence[Endpoint]) -> list[Source]:
        """The sources of linears, given the executors; shards together are one. Raises ConfigError and
        AdapterMismatch, and WeightsUnreadable where a mode of privacy cannot be set up."""
        if self.privacy == "none":
            return assembled(endpoints)
        if self.privacy == "noise":
            plain = assembled(endpoints)
            return [HiddenRows(obfuscated(source, Noise()), source.address, source) for source in plain]
        half, odd = divmod(len(endpoints), 2)
        if odd:
            raise ConfigError(
                f"engine.base_privacy shares needs executors of two parties: engine.base has {len(endpoints)}"
            )
        ours, theirs = assembled(endpoints[:half]), assembled(endpoints[half:])
        if len(ours) != len(theirs):
            raise ConfigError(
                "engine.base_privacy shares needs executors of the same linears for both parties"
            )
        return [
            HiddenRows(shared(one, other, (one.address, other.address), _SHARE_SECONDS), one.address)
            for one, other in zip(ours, theirs, strict=True)
        ]


EXECUTOR_KEY: Final = "COSERVE_EXECUTOR_KEY"  # in the environment: what executors ask for


@contextmanager
def _closing_on_error(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    try:
        yield
    except CoserveError:
        for endpoint in endpoints:
            endpoint.close()
        raise


def _for_each(text: str, addresses: Sequence[Address], what: str) -> list[str]:
    """One of the values for each address. Raises ConfigError."""
    values = [value.strip() for value in text.split(",")]
    if len(addresses) == 1:
        return [text]
    if len(values) == 1:
        return values * len(addresses)
    if len(values) != len(addresses):
        raise ConfigError(
            f"{what} has {len(values)} values for {len(addresses)} executors: one, or one for each"
        )
    return values
