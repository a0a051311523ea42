"""What collectives take on the links between ranks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from coserve.errors import ConfigError
from coserve.parallel.states import Change


@dataclass(frozen=True, slots=True)
class Link:
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


# As vendors give them: bytes a second in one direction, and NCCL's latencies of small messages. What is
# between processes of one machine by gloo was measured on two cores (`measured_link`).
LINKS: Final[Mapping[str, Link]] = {
    link.name: link
    for link in (
        Link("nvlink4", 3e-6, 450e9),
        Link("pcie5", 8e-6, 50e9),
        Link("infiniband", 5e-6, 50e9),
        Link("ethernet", 25e-6, 3e9),
        Link("processes", 60e-6, 1e9),
    )
}


def link_named(name: str) -> Link:
    """The link of that name. Raises ConfigError."""
    if name not in LINKS:
        raise ConfigError(f"{name!r} is no link between ranks: expected one of {', '.join(LINKS)}")
    return LINKS[name]


def measured_link(group: dist.ProcessGroup, device: torch.device, repeats: int = 9) -> Link:
    """The link of a group, from all-reduces of few and of many bytes: every rank calls this, and all find the
    same. Medians, so that a rank that was late once does not count."""
    ranks, sizes = group.size(), (1 << 10, 1 << 22)
    taken = []
    for nbytes in sizes:
        x, times = torch.zeros(nbytes // 4, device=device), []
        for _ in range(repeats):
            dist.barrier(group)
            began = time.perf_counter()
            dist.all_reduce(x, group=group)
            x[:1].cpu()  # which waits for a device's stream
            times.append(time.perf_counter() - began)
        taken.append(median(times))
    found = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    few, many = found.tolist()
    rounds = 2 * (ranks - 1)
    rate = rounds * (sizes[1] - sizes[0]) / ranks / max(many - few, 1e-9)
    return Link("measured", max(few / rounds - sizes[0] / ranks / rate, 0.0), rate)
