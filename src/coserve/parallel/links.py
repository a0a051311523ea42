"""Links between ranks, and the seconds of collectives on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coserve.errors import ConfigError
from coserve.parallel.states import Change


@dataclass(frozen=True, slots=True)
class RankLink:
    """A link between ranks: `latency` seconds of a message from one rank to the next, and `rate`, the bytes a
    second that a rank sends."""

    name: str
    latency: float
    rate: float

    def seconds(self, change: Change, nbytes: float, ranks: int) -> float:
        """Seconds of one change of a whole tensor's bytes, in a ring: each rank sends a share of it to the
        next in turn, twice as often where it is both summed and handed out."""
        rounds = (ranks - 1) * {Change.COMBINE: 1, Change.REDUCE_PARTITION: 1, Change.REDUCE: 2}.get(
            change, 0
        )
        return rounds * (self.latency + nbytes / ranks / self.rate)


# As vendors give them: bytes a second in one direction, and NCCL's latencies of small messages. Processes of
# one machine by gloo: the least of three measurements on two busy cores (0.13 to 1.4 ms, 0.9 to 1.5 GB/s).
LINKS: Final[Mapping[str, RankLink]] = {
    link.name: link
    for link in (
        RankLink("nvlink4", 3e-6, 450e9),
        RankLink("pcie5", 8e-6, 50e9),
        RankLink("infiniband", 5e-6, 50e9),
        RankLink("ethernet", 25e-6, 3e9),
        RankLink("processes", 130e-6, 1.1e9),
    )
}


MEASURED: Final = "measured"  # in place of a name: between processes of this machine (`plan/link_trial.py`)


def link_named(name: str) -> RankLink:
    """The link of that name. Raises ConfigError."""
    if name not in LINKS:
        known = ", ".join((*LINKS, MEASURED))
        raise ConfigError(f"{name!r} is no link between ranks: expected one of {known}")
    return LINKS[name]
