"""Deviation of a machine's steps from their predictions."""

import random
from dataclasses import dataclass
from math import exp


@dataclass(frozen=True, slots=True)
class Jitter:
    """Steps take a lognormal factor of this standard `deviation` of what is predicted, and a `share` of them
    `longer` times as long."""

    deviation: float = 0.05
    share: float = 0.01
    longer: float = 1.6

    def __post_init__(self) -> None:
        ranges = {"deviation": (0.0, 1.0), "share": (0.0, 1.0), "longer": (0.1, 100.0)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"jitter's field `{name}` is from {least:g} to {most:g}, not {getattr(self, name):g}"
                )

    @property
    def mean(self) -> float:
        """The mean factor."""
        return exp(self.deviation**2 / 2) * (1.0 + self.share * (self.longer - 1.0))

    def draw(self, source: random.Random) -> float:
        """The factor of one step."""
        return exp(source.gauss(0.0, self.deviation)) * (self.longer if source.random() < self.share else 1.0)
