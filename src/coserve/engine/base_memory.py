"""Decides how many bytes of an engine's memory its base may have, by trying it on tensors without data.

Pages, a step's workspace, adapters and libraries are there whether the base is in memory as a whole or not.
What they leave decides: a base that fits beside them is loaded as a whole, one of which a part fits is
streamed, and anything less is refused with the bytes that are enough.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from coserve.config import EngineConfig
from coserve.core.size import read_memory, read_size, show_size
from coserve.errors import ConfigError
from coserve.executors.executor import Executor, ExecutorSpec
from coserve.memory.compiled import built_bytes
from coserve.memory.fake_tensors import fake_tensors
from coserve.memory.ledger import Ledger
from coserve.model.base import Base
from coserve.model.dequantized.forms import quantized_fields
from coserve.model.foreign import folder_of, read_config
from coserve.model.load import model_of_shapes
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.overlap import Overlap
from coserve.schedule.step_costs import RARE_DELAY
from coserve.streamed.model_files import saved_bytes, stored_bytes
from coserve.streamed.shapes import enough_to_stream
from coserve.train.needs import step_bytes
from coserve.train.states import STATE_ROWS
from coserve.worker.offloaded import WORKSPACE as OFFLOAD_WORKSPACE
from coserve.worker.opening import Opened, dtype_of, open_loaded, open_local

# Bytes that loading a base as a whole takes beside it in a process of the engine's own: 57 MiB for one of 342
# MiB. One that is streamed takes none.
_LOADING: Final = 96 << 20
_PLENTY: Final = 2 << 30  # what a step, libraries and loading take of most models
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes of an engine that are there beside its base: of its pages and of a step's workspace."""

    pages: int
    workspace: int

    @staticmethod
    def of(executor: Executor, base: Base, settings: SchedulerConfig) -> "Fixed":
        pages = executor.spec.cache_nbytes
        offloaded = OFFLOAD_WORKSPACE * (executor.spec.offload_pages > 0)
        return Fixed(pages, step_bytes(base, settings, pages) + offloaded)


@dataclass(frozen=True, slots=True)
class BaseNeeds:
    """Bytes of a base in memory as a whole, and of one that is streamed with the `least`; of what is `fixed`
    beside it, of adapters with a limit of their own, and of libraries where they count."""

    whole: int
    least: int
    fixed: Fixed
    adapters: int
    libraries: int

    @staticmethod
    def of(
        model: PreTrainedModel, folder: Path | None, config: EngineConfig, adapters: int, libraries: int
    ) -> "BaseNeeds":
        """The needs of a model without data, which is taken over, and whose files are in a folder. To be
        called among tensors without data."""
        return BaseNeeds._of(open_local(model, _as_a_whole(config)), folder, config, adapters, libraries)

    @staticmethod
    def of_base(
        base: Base, folder: Path | None, config: EngineConfig, adapters: int, libraries: int
    ) -> "BaseNeeds":
        """`of` a base that is loaded already."""
        return BaseNeeds._of(open_loaded(base, _as_a_whole(config)), folder, config, adapters, libraries)

    @staticmethod
    def _of(
        opened: Opened, folder: Path | None, config: EngineConfig, adapters: int, libraries: int
    ) -> "BaseNeeds":
        base, executor = opened.base, opened.executor
        fixed = Fixed.of(executor, base, scheduler_config(config, base, executor.spec))
        stored = {} if folder is None else stored_bytes(folder, [block.path for block in base.chain])
        return BaseNeeds(base.nbytes, enough_to_stream(base, stored), fixed, adapters, libraries)

    @property
    def beside(self) -> int:
        """Bytes of all but the base."""
        return self.fixed.pages + self.fixed.workspace + self.adapters + self.libraries

    def room(self, free: int, taken: int = 0) -> int | None:
        """Bytes that limit the base's weights in an engine that has `free` ones beside those `taken` by other
        bases; None where it fits as a whole. Raises ConfigError, with the smallest budget that is enough,
        where not even a part of it fits."""
        whole = self.whole + _LOADING * (self.libraries > 0)
        enough = read_size(show_size(min(self.least, whole) + self.beside, up=True))
        if free < enough:
            wanted = show_size(taken + enough, up=True)
            raise ConfigError(
                f"engine.memory: {show_size(taken + free)} are too few for this model: set it to {wanted} or "
                f"more, of which are {self._told(taken)}"
            )
        if whole + self.beside <= free:
            return None
        # Not more than half, where that is enough: adapters and jobs need room, too.
        return max(min(free - self.beside, free // 2), min(self.least, whole))

    def _told(self, taken: int) -> str:
        parts = {
            "for other bases": taken,
            "for the base, streamed": min(self.least, self.whole),
            "for the cache (engine.cache_tokens)": self.fixed.pages,
            "for a step (scheduler.max_prefill_rows)": self.fixed.workspace,
            "for adapters (engine.adapter_memory)": self.adapters,
            "for libraries": self.libraries,
        }
        largest = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{show_size(nbytes)} {what}" for what, nbytes in largest if nbytes)


def _as_a_whole(config: EngineConfig) -> EngineConfig:
    """The settings of an engine of this process whose base is in memory as a whole."""
    alone = replace(config, executor="local", tensor_parallel=1, pipeline_parallel=1)
    return replace(alone, memory="auto", base_memory="auto")


def scheduler_config(config: EngineConfig, base: Base, spec: ExecutorSpec) -> SchedulerConfig:
    """Settings of the scheduler, with the limits of a base and of its executor. Raises ConfigError."""
    scheduler = config.scheduler_settings
    if torch.device(config.device).type != "cpu":
        scheduler = {"rare_delay": RARE_DELAY, **scheduler}
    if base.is_recurrent and config.speculation is not None:
        _log.warning(
            "speculative decoding is off: states of recurrent layers cannot go back behind tokens that do "
            "not hold"
        )
    try:
        return SchedulerConfig(
            layers=base.depth,
            max_positions=base.max_positions,
            eos_token_ids=spec.eos_ids,
            max_running=config.max_running,
            prefix_sharing=config.prefix_sharing,
            kept_states=spec.state_slots,
            state_rows=STATE_ROWS if base.mixers else None,
            row_buckets=base.row_buckets,
            overlap=Overlap(spec.plans, spec.plan_rate, spec.trains_apart),
            speculation=None if base.is_recurrent else config.speculation,
            sequence_pages=config.cluster_pages,
            **scheduler,
        )
    except TypeError as error:
        raise ConfigError(f"engine.scheduler: {error}") from error


def adapter_limit(config: EngineConfig, budget: int) -> int | None:
    """Configured limit of stored adapters in bytes; None without one."""
    match read_memory(config.adapter_memory, "adapter_memory"):
        case float() as share:
            return int(share * budget)
        case limit:
            return limit


def base_memory(
    model: str | Path | PreTrainedModel, config: EngineConfig, ledger: Ledger, counts_libraries: bool
) -> int | None:
    """Bytes that limit the weights of a base, of those free in the engine's ledger, where the settings leave
    that to it; None where the base is loaded as a whole. A process of the engine's own `counts_libraries`.

    Raises ConfigError, with the smallest budget that is enough, where not even a part of the base fits.
    """
    if config.base or config.base_memory != "auto" or isinstance(model, PreTrainedModel):
        return None
    if config.ranks > 1:  # it is not streamed
        return None
    if config.memory == "auto":
        return None
    found, free = read_config(model), ledger.free
    adapters = 0 if ledger.used else adapter_limit(config, ledger.budget) or 0  # of all bases together
    libraries = built_bytes() if counts_libraries else 0
    saved = saved_bytes(model, config.quantize, quantized_fields(found.to_dict()))
    text = found.get_text_config()
    widths = getattr(text, "hidden_size", 0) * getattr(text, "num_hidden_layers", 0)
    if saved and widths and 1.1 * saved + 32 * config.cache_tokens * widths + adapters + _PLENTY <= free:
        return None  # keys and values of a token have at most two widths in each layer
    try:
        with fake_tensors(), torch.device(config.device):  # tensors without data cannot move to it
            shapes = model_of_shapes(model, found, dtype_of(config))
            needs = BaseNeeds.of(shapes, folder_of(model), config, adapters, libraries)
    except Exception as error:  # loading says what is wrong, or that nothing is
        _log.info("%s cannot be tried without data: %s: %s", model, type(error).__name__, error)
        return free // 2 if saved > free else None
    return needs.room(free, ledger.used)
