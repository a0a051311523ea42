"""The price of a mode of privacy: seconds of the same step with and without it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from torch import nn

from coserve.split.attach import attach
from coserve.split.privacy.modes import Noise, Privacy, Shares

Step = Callable[[nn.Module], object]  # such as one optimizer step, or one more token


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step in each round, of a plain client and of a private one."""

    plain: tuple[float, ...]
    private: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over rounds of private over plain."""
        return median(mine / usual for usual, mine in zip(self.plain, self.private, strict=True))


def noise_cost(
    make: Callable[[], nn.Module],
    step: Step,
    address: str,
    noise: Noise | None = None,
    key: str = "",
    rounds: int = 5,
) -> Cost:
    """`make` gives models that are the executor's at `address`. Raises as `attach`."""
    return _cost(make, step, address, key, noise or Noise(), rounds)


def shares_cost(
    make: Callable[[], nn.Module],
    step: Step,
    address: str,
    shares: Shares,
    key: str = "",
    rounds: int = 5,
) -> Cost:
    """As `noise_cost`, for shares between the executors at `address` and at `shares.address`."""
    return _cost(make, step, address, key, shares, rounds)


def _cost(
    make: Callable[[], nn.Module], step: Step, address: str, key: str, privacy: Privacy, rounds: int
) -> Cost:
    """Rounds of both in turn, after one that is not counted."""
    models = make(), make()
    clients = attach(models[0], address, key), attach(models[1], address, key, privacy=privacy)
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for model, found in zip(models, seconds, strict=True):
            begin = time.perf_counter()
            step(model)
            found.append(time.perf_counter() - begin)
    for client in clients:
        client.close()
    return Cost(tuple(seconds[0][1:]), tuple(seconds[1][1:]))
