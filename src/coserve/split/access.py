"""An engine's access to the base executors of its linears: addresses, keys, TLS and privacy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from coserve.errors import ConfigError, CoserveError
from coserve.split.address import Address
from coserve.split.calls import Source
from coserve.split.credentials import Credentials
from coserve.split.endpoint import Endpoint, HiddenRows
from coserve.split.gather import assembled
from coserve.split.privacy.modes import Noise, obfuscated, shared

_SHARE_SECONDS: Final = 300.0  # seconds that one of two parties may take for an answer


@dataclass(frozen=True, slots=True)
class BaseAccess:
    """Addresses of executors, with the credentials that these require.

    `addresses` are separated by commas. `patience` is the seconds that a call waits for an executor that went
    away. `privacy` is "none", "noise" or "shares": with shares the first half of the executors belongs to one
    party and the second half to the other, in the same order.
    """

    addresses: str
    credentials: Credentials = field(default_factory=Credentials)
    patience: float = 5.0
    privacy: str = "none"

    def endpoints(self) -> list[Endpoint]:
        """Connects to all executors. Raises ConfigError and Unreachable."""
        addresses = [Address.parse(text.strip()) for text in self.addresses.split(",")]
        known = self.credentials.of([str(address) for address in addresses], pins_are="engine.base_pin")
        found: list[Endpoint] = []
        with _closing_on_error(found):
            for address, (key, tls) in zip(addresses, known, strict=True):
                found.append(Endpoint(address, key, self.patience, tls))
        return found

    def sources(self, endpoints: Sequence[Endpoint]) -> list[Source]:
        """The sources of linears, given the executors; all shards of the same linears are one source. Raises
        ConfigError and AdapterMismatch, and WeightsUnreadable where a mode of privacy cannot be set up."""
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


@contextmanager
def _closing_on_error(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    try:
        yield
    except CoserveError:
        for endpoint in endpoints:
            endpoint.close()
        raise
