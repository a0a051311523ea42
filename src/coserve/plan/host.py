"""The host's memory of an engine on a GPU: blocks of its base that the device has no room for, pages of
answers that wait, and the moments of optimizers between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coserve.adapters.bypass import exact_type
from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.model.base import Base
from coserve.plan.stages import Program, System
from coserve.train.fresh import sketch_adapter
from coserve.train.optimizer_offload import KINDS


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes in the host's memory: the `room` for blocks (`engine.host_memory`), those of the base that are
    there, `pages` of the second tier (`engine.swap_space`) with room for so many `tokens`, and with
    `engine.offload` the `moments` of each program's job, by its name."""

    room: int
    blocks: int
    pages: int
    tokens: int
    moments: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `total` is the most that an engine with one of the jobs takes there."""
        most = max(self.moments.values(), default=0)
        return {
            "room": self.room,
            "blocks": self.blocks,
            "pages": self.pages,
            "tokens": self.tokens,
            "moments": self.moments,
            "total": self.blocks + self.pages + most,
        }


def plan_host(
    base: Base, config: EngineConfig, room: int, held: int | None, programs: Sequence[Program]
) -> HostPlan:
    """The bytes of an engine with these settings on the host, of which `held` are blocks. `base` may be on
    tensors without data."""
    token = sum(cache.width for cache in base.caches) * base.dtype.itemsize
    pages = config.swap_nbytes
    moments = {
        program.name: moment_bytes(base, program)
        for program in programs
        if program.system is System.COSERVE and program.trains
    }
    return HostPlan(room, held or 0, pages, pages // token if token else 0, moments)


def moment_bytes(base: Base, program: Program) -> int:
    """Bytes of AdamW's moments of a program's adapter, which are in the type of master weights."""
    adapter = sketch_adapter(base, program.name, settings_of(program.parts), 0)
    numbers = sum(tensor.numel() for tensor in adapter.parameters().values())
    return len(KINDS) * numbers * exact_type(base.dtype).itemsize
