"""Keys, certificates and pins that clients present to several executors; loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coserve.errors import ConfigError
from coserve.split.tls import ClientTls

EXECUTOR_KEY: Final = "COSERVE_EXECUTOR_KEY"  # environment variable of the key that executors require
CLUSTER_KEY: Final = "COSERVE_CLUSTER_KEY"  # and of the key that all processes of a cluster have


@dataclass(frozen=True, slots=True)
class Credentials:
    """Identifies a client to executors, and these to it.

    `keys` and `pins` are separated by commas: one is for all executors, several are for the executors in
    order. `ca`, `certificate` and `certificate_key` are files in PEM (empty: none; see `ClientTls`).
    """

    keys: str = ""
    ca: str = ""
    pins: str = ""
    certificate: str = ""
    certificate_key: str = ""

    def of(
        self,
        addresses: Sequence[str],
        keys_are: str = f"the key in {EXECUTOR_KEY}",
        pins_are: str = "the pin",
    ) -> list[tuple[str, ClientTls]]:
        """The key and TLS settings for each of these addresses; `keys_are` and `pins_are` name the settings
        in errors. Raises ConfigError."""
        keys = _for_each(self.keys, addresses, keys_are)
        pins = _for_each(self.pins, addresses, pins_are)
        if self.certificate_key and not self.certificate:
            raise ConfigError("a private key is given without its certificate")
        tls = ClientTls(self.ca or None, "", self.certificate or None, self.certificate_key or None)
        is_encrypted = any(address.startswith("tls:") for address in addresses)
        if (self.pins or tls != ClientTls()) and not is_encrypted:
            shown = ", ".join(addresses) or "what is asked"
            raise ConfigError(
                f"certificates and pins are for tls:HOST:PORT: there is no such address in {shown}"
            )
        return [(key, replace(tls, pin=pin)) for key, pin in zip(keys, pins, strict=True)]


def _for_each(text: str, addresses: Sequence[str], what: str) -> list[str]:
    """One of the values for each address. Raises ConfigError."""
    values = [value.strip() for value in text.split(",")]
    if len(addresses) <= 1:
        return [text] * len(addresses)
    if len(values) == 1:
        return values * len(addresses)
    if len(values) != len(addresses):
        raise ConfigError(
            f"{what} has {len(values)} values for {len(addresses)} executors: one, or one for each"
        )
    return values
