"""Opens an executor for a model: loads the base, checks it, and builds the executor."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from coserve.adapters.bypass import Bypasses
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.attention.backend import AttentionBackend
from coserve.attention.states import StateStore
from coserve.attention.store import Int8KVStore, KVStore
from coserve.config import EngineConfig
from coserve.core.plan import CopyKind
from coserve.core.size import read_memory
from coserve.errors import ConfigError
from coserve.executors.executor import Executor
from coserve.executors.local import BackgroundExecutor, LocalExecutor
from coserve.executors.remote import RemoteExecutor
from coserve.memory.budget import budget_of, process_capacity
from coserve.memory.fake_tensors import fake_tensors, is_fake
from coserve.memory.malloc import keep_freed_memory, private_bytes, resident_bytes, return_freed_memory
from coserve.memory.measured import device_capacity
from coserve.model.base import Base, is_without_data
from coserve.model.grammar import Grammars
from coserve.model.load import load_base, usable_device
from coserve.model.sampling_table import SamplingTable
from coserve.model.sharded.load import load_sharded
from coserve.model.staged.load import load_staged
from coserve.model.stitched import Stitch, StitchedBase
from coserve.model.together import linears_together
from coserve.parallel.ranks import ALONE, RankGrid, Ranks
from coserve.split.access import BaseAccess
from coserve.split.credentials import EXECUTOR_KEY, Credentials
from coserve.split.load import load_remote
from coserve.streamed.load import load_streamed
from coserve.streamed.planner import Streaming
from coserve.streamed.shapes import stream_shapes
from coserve.train.optimizer_offload import offload_for
from coserve.train.proof import prove_training
from coserve.worker.deterministic import DeterministicWorker
from coserve.worker.offloaded import OffloadedCache
from coserve.worker.page_store import open_store
from coserve.worker.sequence_table import SequenceTable
from coserve.worker.staged import StageWorker
from coserve.worker.stitched import StitchedWorker
from coserve.worker.swap_space import SwapSpace
from coserve.worker.worker import Worker

_log = logging.getLogger(__name__)

Model: TypeAlias = str | Path | PreTrainedModel
ReadTokenizer: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """An executor with the host's objects beside it. `base` is the executor's own or, where its weights are
    in another process, one of the same shapes without data; `slot_nbytes` computes the bytes of an adapter's
    slot on the device from shapes alone; `grammars` compiles for a tokenizer, None without one. `workers`
    tells what a cluster's workers do, where they have the blocks."""

    executor: Executor
    base: Base
    slot_nbytes: Callable[[Bypasses], int]
    grammars: Grammars | None
    workers: Callable[[], Sequence[str]] = tuple


def open_local(
    model: Model,
    config: EngineConfig,
    read_tokenizer: Callable[[], Any] = lambda: None,
    grid: RankGrid = RankGrid(),
) -> Opened:
    """Opens an executor on this process's device, for the whole model or what it has of it in a `grid` of
    ranks. `read_tokenizer` is called once the model is loaded; without a tokenizer there are no grammars.
    Raises its errors, ModelError, and ConfigError where the cache does not fit into memory."""
    if config.device == "cpu":
        keep_freed_memory()
    before, private = resident_bytes(), private_bytes()
    base, streaming = _load(model, config, grid)
    # One base is proved as it is loaded, another has nothing that could be compared.
    if not (config.base or config.pipeline_parallel > 1 or is_without_data(base)):
        prove_training(base)
    return_freed_memory()
    # A base that stays may lie in pages of its files, one that is streamed does not.
    taken = resident_bytes() - before if streaming is None else private_bytes() - private
    grown = max(taken - base.nbytes, 0)
    tokenizer = read_tokenizer()
    grammars = None if tokenizer is None else Grammars(tokenizer, base.vocabulary, eos_ids(base))
    kind = StageWorker if config.pipeline_parallel > 1 else Worker
    worker = _make(base, config, grammars, grown, streaming, kind)
    return Opened(_transport(worker), base, worker.slot_pools.slot_nbytes, grammars)


def open_loaded(
    base: Base, config: EngineConfig, kind: type[Worker] = Worker, tokenizer: Any = None
) -> Opened:
    """Opens an executor on this process's device for a base that is loaded, without grammars where there is
    no tokenizer. Raises ConfigError where the cache does not fit into memory."""
    grammars = None if tokenizer is None else Grammars(tokenizer, base.vocabulary, eos_ids(base))
    worker = _make(base, config, grammars, 0, None, kind)
    return Opened(_transport(worker), base, worker.slot_pools.slot_nbytes, grammars)


def open_remote(
    model: Model, config: EngineConfig, read_tokenizer: Callable[[], Any] = lambda: None
) -> Opened:
    """Opens an executor in a process of its own. A model or tokenizer object is passed through a folder.
    Raises the errors of `open_local`."""
    with TemporaryDirectory(prefix="coserve-") as folder:
        if isinstance(model, PreTrainedModel):
            model.save_pretrained(folder)
            own = str(model.dtype).removeprefix("torch.")  # its configuration may name another
            model, config = folder, replace(config, dtype=own)
        try:
            tokenizer = read_tokenizer()
        except ConfigError:
            RemoteExecutor(str(model), config).close()  # raises errors of the model first
            raise
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        executor = RemoteExecutor(str(model), config, None if tokenizer is None else folder)
    base, spec = executor.base, executor.spec
    with fake_tensors():
        slot_pools = LoraSlotPools(linears_together(base), spec.sequences, base.device)
    grammars = None if tokenizer is None else Grammars(tokenizer, base.vocabulary, spec.eos_ids)
    return Opened(executor, base, slot_pools.slot_nbytes, grammars)


def open_stitched(
    folder: Path, hosts: Sequence[Executor], config: EngineConfig, grammars: Grammars | None
) -> Opened:
    """Opens an executor for a chain of two bases, with the stitching block in `folder`. `hosts` are the
    executors of the two; `grammars` are the second one's. Raises ConfigError where they are no chain, or the
    cache does not fit."""
    if config.deterministic:
        raise ConfigError("an answer of a chain of two bases depends on load: engine.deterministic is set")
    legs: list[Worker] = [host.worker for host in hosts if isinstance(host, LocalExecutor)]
    if len(legs) != len(hosts):
        raise ConfigError("a chain of two bases needs both in one process: engine.executor = local")
    first, second = legs
    if any(leg.base.mixers for leg in legs):
        raise ConfigError("a chain of two bases has pages alone, and one of the two has recurrent layers")
    base = StitchedBase(first.base, second.base, Stitch.read(folder))
    worker = _make(base, config, grammars, 0, None, StitchedWorker)
    assert isinstance(worker, StitchedWorker)
    worker.join(legs)
    return Opened(_transport(worker), base, worker.slot_pools.slot_nbytes, grammars)


def _transport(worker: Worker) -> LocalExecutor[Worker]:
    """The way to a worker: in the background where it mostly waits for its device."""
    return (LocalExecutor if worker.base.device.type == "cpu" else BackgroundExecutor)(worker)


def open_executor(model: Model, config: EngineConfig, read_tokenizer: ReadTokenizer) -> Opened:
    """Opens the executor that the settings name."""
    is_elsewhere = config.executor == "remote" or config.ranks > 1
    return (open_remote if is_elsewhere else open_local)(model, config, read_tokenizer)


def dtype_of(config: EngineConfig) -> torch.dtype | str:
    """The type in which a model is loaded."""
    if config.dtype == "auto":
        return "auto"
    found: torch.dtype = getattr(torch, config.dtype)
    return found


def eos_ids(base: Base) -> tuple[int, ...]:
    """Tokens that end an answer, as the model says."""
    config = base.model.config
    told = (base.model.generation_config, config, config.get_text_config())  # some have no such field
    eos = next((own for one in told if (own := getattr(one, "eos_token_id", None)) is not None), None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _load(model: Model, config: EngineConfig, grid: RankGrid) -> tuple[Base, Streaming | None]:
    """The base; with how it is streamed, where it does not fit or its memory is limited."""
    if grid.every.count > 1:
        assert not isinstance(model, PreTrainedModel), "ranks read files"
        how = dtype_of(config), config.device, config.quantize
        if config.pipeline_parallel > 1:
            return load_staged(model, grid, *how, prove_training), None
        if (room := base_room(config)) is None:
            return load_sharded(model, grid.inside, *how), None
        return _streamed(model, room, config, grid.inside)
    if config.base:
        return load_remote(model, _access(config), dtype_of(config), config.device, prove_training), None
    room = base_room(config)
    if room is None:
        return load_base(model, dtype_of(config), config.device, config.quantize), None
    if isinstance(model, PreTrainedModel):
        if all(map(is_fake, model.parameters())):
            base = load_base(model, dtype_of(config), config.device, config.quantize)
            return base, stream_shapes(base, room)
        raise ConfigError("engine.base_memory: a model object is in memory already: give its folder")
    return _streamed(model, room, config)


def _streamed(
    model: str | Path, room: int, config: EngineConfig, ranks: Ranks = ALONE
) -> tuple[Base, Streaming]:
    how = dtype_of(config), config.device, config.quantize, config.scratch, host_room(config)
    base, streaming = load_streamed(model, room, *how, ranks)
    if streaming.plan.read_nbytes:
        _log.warning("%s", streaming)
    return base, streaming


def _access(config: EngineConfig) -> BaseAccess:
    credentials = Credentials(
        os.environ.get(EXECUTOR_KEY, ""),
        config.base_ca,
        config.base_pin,
        config.base_certificate,
        config.base_key,
    )
    return BaseAccess(config.base, credentials, config.base_patience, config.base_privacy)


def base_room(config: EngineConfig) -> int | None:
    """Bytes that limit the weights of a base; None where it is loaded as a whole."""
    asked = read_memory(config.base_memory, "base_memory")
    if asked is None or isinstance(asked, int):
        return asked
    sharing = config.ranks if usable_device(config.device).type == "cpu" else 1
    return int(asked * device_budget(config)) // sharing


def device_budget(config: EngineConfig) -> int:
    """Bytes of the device that the engine may have. Raises ConfigError for a share of one that is not
    there."""
    if isinstance(nbytes := read_memory(config.memory), int):
        return nbytes
    return budget_of(config.memory, device_capacity(usable_device(config.device)))


def host_room(config: EngineConfig) -> int:
    """Bytes of the host's memory, beside a GPU, for blocks of a base that do not stay on it."""
    asked = read_memory(config.host_memory, "host_memory", may_be_none=True)
    if isinstance(asked, int):
        return asked
    capacity = process_capacity()
    return capacity.free // 2 if asked is None else int(asked * capacity.total)


def _make(
    base: Base,
    config: EngineConfig,
    grammars: Grammars | None,
    grown: int,
    streaming: Streaming | None,
    kind: type[Worker] = Worker,
) -> Worker:
    kind = DeterministicWorker if config.deterministic else kind
    store = Int8KVStore if config.cache_dtype == "int8" else KVStore
    try:
        attention = kind.attention_type(
            base.caches, config.pages, config.page_size, base.dtype, base.device, store
        )
    except RuntimeError as error:  # torch is out of memory
        raise ConfigError(
            f"engine.cache_tokens: keys and values of {config.cache_tokens} tokens do not fit into memory"
        ) from error
    most = -(-min(config.cache_tokens, base.max_positions) // config.page_size)
    sampling = SamplingTable(config.max_running, base.vocabulary, eos_ids(base), base.device, grammars)
    table = SequenceTable(config.max_running, most, attention, sampling, _states(base, config))
    offload = offload_for(base.device, config.scratch) if config.offload else None
    elsewhere = _elsewhere(base, attention, config)
    return kind(base, attention, table, offload, grown, streaming, *elsewhere)


def _states(base: Base, config: EngineConfig) -> StateStore | None:
    """The states of recurrent layers, of as many sequences as run at once, and half as many of beginnings
    that prompts share and of preempted sequences; None without such layers."""
    if not base.mixers:
        return None
    try:
        shapes, slots = [mixer.shapes for mixer in base.mixers], state_slots(config)
        return StateStore(shapes, config.max_running, base.device, slots)
    except RuntimeError as error:  # torch is out of memory
        raise ConfigError(
            f"engine.max_running: states of {config.max_running} sequences do not fit into memory"
        ) from error


def state_slots(config: EngineConfig) -> int:
    """Room for states of beginnings that prompts share and of preempted sequences: half of those that run."""
    return -(-config.max_running // 2) if config.prefix_sharing or config.swap_nbytes else 0


def _elsewhere(
    base: Base, attention: AttentionBackend[Any], config: EngineConfig
) -> tuple[SwapSpace | None, OffloadedCache | None, str]:
    """Pages of preempted sequences and of longer ones in one page store; and why none of the latter."""
    on_device = "the states of its recurrent layers stay on the device"
    if not attention.page_nbytes:  # none of its layers attends
        return None, None, on_device
    if not config.swap_nbytes:
        return None, None, "engine.swap_space has no room for pages elsewhere"
    try:
        store = open_store(base.device, config.scratch, config.swap_nbytes)
    except ConfigError as error:
        _log.warning("preempted sequences are computed again, and longer prompts refused: %s", error)
        return None, None, str(error)
    swap_space = SwapSpace({CopyKind.PAGES: attention}, store, base.device)
    if base.mixers:
        return swap_space, None, on_device
    if config.deterministic:
        return swap_space, None, "the deterministic mode attends to pages alone"
    offloaded = OffloadedCache(base.caches, attention.page_size, base.dtype, store, base.device)
    return swap_space, offloaded, "" if offloaded.pages else "engine.swap_space has no room for one page"
