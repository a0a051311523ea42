"""The modes of privacy that a client can choose, for `attach(..., privacy=...)`."""

from collections.abc import Callable
from dataclasses import dataclass

from coserve.errors import ConfigError
from coserve.split.address import Address
from coserve.split.calls import Calls
from coserve.split.privacy.noise import NoisyCalls
from coserve.split.privacy.shares import SharedCalls


@dataclass(frozen=True, slots=True)
class Noise:
    """Additive noise (Symbiosis, 3.8): obfuscation, as the executor has seen the noise. Each linear has
    `values` noise values, of which each row gets one at random; after `uses` calls there are new ones. They
    are `level` times the square root of the width larger than the rows: less does not hide which of many
    rows is the nearest one. That costs as many digits, so the base must have float32."""

    values: int = 4
    level: float = 1.0
    uses: int = 256

    def __post_init__(self) -> None:
        if self.values < 1 or self.uses < 1 or not 0 < self.level < 100:
            raise ConfigError("noise needs at least one value and one use, and a level above 0 and below 100")


@dataclass(frozen=True, slots=True)
class Shares:
    """Secret shares between the executor that is attached to and a second one at `address`, of the same base,
    which must not tell each other what they get. `key` is the second one's. An executor that has not answered
    after `timeout` seconds is given up."""

    address: str
    key: str = ""
    timeout: float = 300.0


Privacy = Noise | Shares


def private(first: Calls, where: str, privacy: Privacy, connect: Callable[[str, str], Calls]) -> Calls:
    """Calls in a mode of privacy, given those of the executor at `where`; `connect` connects to another one,
    with a key. What is connected is closed where the mode cannot be set up. Raises CoserveError."""
    if isinstance(privacy, Noise):
        if first.base.dtype != "float32":
            raise ConfigError(
                f"noise needs a base in float32: in {first.base.dtype} it would destroy the rows"
            )
        return NoisyCalls(first, privacy.values, privacy.level, privacy.uses)
    second_at = str(Address.parse(privacy.address))
    if second_at == where:
        raise ConfigError(
            f"one executor, at {where}, would see both shares: two that are not in touch are needed"
        )
    second = connect(second_at, privacy.key)
    try:
        return SharedCalls((first, second), (where, second_at), privacy.timeout)
    except BaseException:
        second.close()
        raise
