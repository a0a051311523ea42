"""Memory and reads of streaming a base, known from shapes alone."""

from collections.abc import Mapping
from typing import Final

from coserve.model.base import Base
from coserve.model.block import Residence
from coserve.model.parameters import held_bytes
from coserve.streamed.files import PAGE
from coserve.streamed.planner import (
    RING,
    Streaming,
    held_in_host,
    least_bytes,
    pass_rate,
    plan_residence,
    refuse_too_little,
)
from coserve.streamed.stored import ALIGNED

ASSUMED_RATE: Final = 1e9  # bytes a second: disks gave 0.7 to 1.5 GB/s
ASSUMED_LINK: Final = 25e9  # bytes a second from the host's memory to a GPU: 0.8 of PCIe 4.0 with 16 lanes


class Elsewhere(Residence):
    """`Residence` of a block whose parameters have no data, and count as if they were read for each visit."""


def stream_shapes(
    base: Base, budget: int, disk: float = ASSUMED_RATE, link: float = float("inf"), host_memory: int = 0
) -> Streaming:
    """Has a base whose parameters are fake tensors count as one that is streamed within `budget` bytes, from
    a disk and over a GPU's link of these bytes a second. Raises ConfigError as `load_streamed` does."""
    sizes, ends = _sizes(base)
    refuse_too_little(sizes, ends, budget)
    plan = plan_residence(sizes, budget - ends)
    for place, block in enumerate(base.chain):
        if place not in plan.resident:
            block.stream(Elsewhere())
    base.buffer_nbytes = plan.buffers * plan.buffer_nbytes
    go = [nbytes for place, nbytes in enumerate(sizes) if place not in plan.resident]
    rate = pass_rate(go, held_in_host(go, host_memory), link, disk)
    return Streaming(plan, base.nbytes, rate)


def least_streamed(base: Base) -> int:
    """The smallest budget with which a base can be streamed."""
    sizes, ends = _sizes(base)
    return ends + least_bytes(sizes, RING)


def enough_to_stream(base: Base, stored: Mapping[str, int]) -> int:
    """A budget with which a base can be streamed whose blocks take the `stored` bytes of files, by path."""
    sizes, ends = _sizes(base)
    most = []
    for block, size in zip(base.chain, sizes, strict=True):
        count = sum(len(own.tensors) for own in block.parameters().values())
        most.append(max(size + -(-count * ALIGNED // PAGE) * PAGE, stored.get(block.path, 0)) + PAGE)
    return ends + least_bytes(most, RING)


def _sizes(base: Base) -> tuple[list[int], int]:
    """Bytes of the blocks in files, and of what is around them."""
    blocks = [held_bytes(block.parameters().values()) for block in base.chain]
    return [-(-nbytes // PAGE) * PAGE for nbytes in blocks], held_bytes(base.chain.ends.parameters().values())
