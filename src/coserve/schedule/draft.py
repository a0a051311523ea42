"""A plan that is being put together."""

from dataclasses import dataclass, field

from coserve.core.plan import Segment
from coserve.schedule.cost import Features


@dataclass(slots=True)
class Draft:
    """The segments chosen so far and what is in them; `now` is when the planning began, seconds."""

    now: float
    features: Features = field(default_factory=Features)
    inference: list[Segment] = field(default_factory=list)
    training: list[Segment] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        """Takes an inference segment in."""
        self.inference.append(segment)
        self.features.add(segment)
