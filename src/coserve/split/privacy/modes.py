"""The modes of privacy that a client can choose, for `attach(..., privacy=...)`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coserve.errors import ConfigError
from coserve.split.address import is_seconds
from coserve.split.calls import Calls, Source
from coserve.split.privacy.noise import NoisyCalls
from coserve.split.privacy.shares import SharedCalls
from coserve.split.tls import ClientTls


@dataclass(frozen=True, slots=True)
class Noise:
    """Additive noise (Symbiosis, 3.8): obfuscation, as the executor has seen the noise.

    Each linear has `values` noise values, of which each row gets one at random; after `uses` calls they are
    replaced. They are `level` times the square root of the width larger than the rows: smaller noise does not
    hide which of many rows is the nearest one. It costs as many digits, so the base must have float32.
    """

    values: int = 4
    level: float = 1.0
    uses: int = 256

    def __post_init__(self) -> None:
        numbers = (self.values, self.uses)
        if any(type(number) is not int or number < 1 for number in numbers) or not (
            isinstance(self.level, int | float) and 0 < self.level < 100
        ):
            raise ConfigError("noise needs at least one value and one use, and a level above 0 and below 100")


@dataclass(frozen=True, slots=True)
class Shares:
    """Secret shares between the attached executor and a second one at `address`, of the same base. The two
    must not tell each other their shares.

    `key` is the second one's, and `tls` its settings where they differ from the first one's. Where the second
    party has shards, all three are as `attach` takes them. An executor that has not answered after `timeout`
    seconds is given up.
    """

    address: str | Sequence[str]
    key: str | Sequence[str] = ""
    timeout: float = 300.0
    tls: ClientTls | Sequence[ClientTls] | None = None

    def __post_init__(self) -> None:
        if not is_seconds(self.timeout):
            raise ConfigError(f"timeout must be seconds from 0 on, not {self.timeout!r}")


Privacy = Noise | Shares


def mode_of(given: object) -> Privacy | None:
    """The mode that an argument names. Raises ConfigError."""
    if given is None or isinstance(given, Noise | Shares):
        return given
    if given in ("none", "noise"):
        return Noise() if given == "noise" else None
    raise ConfigError(
        f'privacy must be None, "noise", Noise(...) or, with the second executor\'s address, Shares(...) of '
        f"coserve.split.privacy.modes, not {given!r}"
    )


def private(first: Source, privacy: Privacy, connect: Callable[[Shares], Source]) -> Calls:
    """Calls in a mode of privacy, given those of an executor; `connect` connects to a second one. What is
    connected is closed where the mode cannot be set up. Raises CoserveError."""
    if isinstance(privacy, Noise):
        return obfuscated(first, privacy)
    second = connect(privacy)
    try:
        return shared(first, second, (first.address, second.address), privacy.timeout)
    except BaseException:
        second.close()
        raise


def obfuscated(calls: Calls, noise: Noise) -> NoisyCalls:
    """Calls with noise on their rows. Raises ConfigError, and what calls raise."""
    if calls.base.dtype != "float32":
        raise ConfigError(f"noise needs a base in float32: in {calls.base.dtype} it would destroy the rows")
    return NoisyCalls(calls, noise.values, noise.level, noise.uses)


def shared(first: Calls, second: Calls, names: tuple[str, str], timeout: float) -> SharedCalls:
    """Calls of two parties, named as their executors' addresses are. Raises as `SharedCalls` does, and
    ConfigError for one address twice."""
    if names[0] == names[1]:
        raise ConfigError(
            f"one executor, at {names[0]}, would see both shares: two that are not in touch are needed"
        )
    return SharedCalls((first, second), names, timeout)
