"""State of a local device between steps: adapters' weights and training sessions, changed by commands."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.paging.cache import AdapterTier
from coserve.adapters.paging.host import host_copies
from coserve.adapters.paging.stored import Outline
from coserve.adapters.settings import settings_of
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.errors import NotOffered, OutOfMemory
from coserve.executors.executor import (
    CloseSession,
    Command,
    CompileGrammar,
    DeviceMemory,
    DropAdapters,
    EmbedTokens,
    FetchAdapter,
    FreshAdapter,
    LoadAdapter,
    MarkState,
    OpenSession,
    R,
    ReadAdapter,
    ReadMemory,
    ReadParameter,
    ReadState,
    RestartStep,
    SetLimits,
    SkipReads,
    StateMark,
    TraceLayers,
)
from coserve.memory.arena import Arena
from coserve.memory.exhausted import is_out_of_memory
from coserve.model.base import Base
from coserve.model.grammar import Grammars
from coserve.train.fresh import fresh_adapter, sketch_adapter
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.pruning.plan import foresee
from coserve.train.save_policy import SavePolicy
from coserve.train.session import TrainingSession
from coserve.train.state import TrainingState


class HeldState:
    """Adapters, sessions and the arena of one device, for an executor that runs plans on them."""

    def __init__(
        self,
        base: Base,
        adapters: LoadedAdapters,
        slot_pools: LoraSlotPools,
        grammars: Grammars | None = None,
        make_offload: MakeOffload | None = None,
    ) -> None:
        self.base, self.adapters, self.slot_pools = base, adapters, slot_pools
        self.arena = Arena()
        self.host_copies = host_copies(base.frame, base.dtype, base.device)
        self.sessions: dict[str, TrainingSession] = {}
        self.window_group_rows = 0  # most in one group
        self._snapshots: dict[int, Callable[[], TrainingState]] = {}  # that are not read yet
        self._next_snapshot = count()
        self._grammars, self._make_offload = grammars, make_offload

    @torch.no_grad()
    def do(self, command: Command[R]) -> R:
        """Executes a command and returns its reply."""
        return cast(R, self._do(command))

    def _do(self, command: Command[Any]) -> Any:
        match command:
            case LoadAdapter():
                return self._hold(command.adapter.in_type(self.base.dtype))
            case ReadAdapter():
                return self._hold(self.host_copies.load(command.stored))
            case DropAdapters(tier=AdapterTier.HOST):
                return self.host_copies.drop(command.keys)
            case DropAdapters():
                return self.adapters.drop(command.keys)
            case FetchAdapter():
                return self.base.shards.whole(self.adapters.find(command.key))
            case OpenSession():
                return self._open(command)
            case RestartStep():
                return self._restart(command)
            case CloseSession():
                if (session := self.sessions.pop(command.job, None)) is not None:
                    session.abandon()
                return None
            case MarkState():
                return self._mark(command.job)
            case ReadState():
                return self._whole(self._snapshots.pop(command.snapshot)())
            case TraceLayers():
                return foresee(self.base, self._shapes(command.start, command.fresh), command.keep)
            case ReadParameter():
                return self._parameter(command.path, command.what)
            case EmbedTokens():
                return self.base.frame.frozen.embedded(torch.tensor(command.tokens, dtype=torch.long))
            case CompileGrammar():
                if self._grammars is not None:
                    self._grammars.compile(command.text)
                return None
            case SetLimits():
                return self._limit(command)
            case SkipReads():
                if (reader := self.base.reader) is not None:
                    reader.dry = command.skip
                return None
            case ReadMemory():
                return self._memory()
        raise NotImplementedError(f"{type(command).__name__} is no command of an executor")

    def drop_activations(self, job: str) -> None:
        """Frees the activations of a failed job."""
        self.sessions[job].drop_activations()
        self.arena.empty()

    def _hold(self, adapter: AdapterVersion) -> Outline:
        own = self.base.shards.cut(adapter)
        _ = own.bypasses, own.virtual  # computed here, not in the first step with its rows
        self.adapters.add(own)
        return Outline.of(adapter)

    def _open(self, command: OpenSession) -> Outline:
        shards, reference = self.base.shards, command.reference
        if command.config.keep is not SavePolicy.INPUTS:
            self._expect_alone(f"job {command.job} with keep={command.config.keep}")
        try:
            start = replace(self._first(command), name=command.adapter, version=command.version)
            session = TrainingSession(
                self.base,
                self.adapters,
                command.job,
                shards.trained(start),
                command.config,
                self.arena,
                command.identity,
                None if command.resume is None else self._own(command.resume),
                self._make_offload,
                None if reference is None else shards.cut(reference),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"job {command.job}: there is no memory for its adapter") from error
        self.sessions[command.job] = session
        return Outline.of(start.in_type(self.base.dtype))

    def _own(self, state: TrainingState) -> TrainingState:
        """This rank's part of a state."""
        shards = self.base.shards
        moments = shards.cut_moments(state.adapter, state.moments)
        return replace(state, adapter=shards.trained(state.adapter), moments=moments)

    def _whole(self, state: TrainingState) -> TrainingState:
        """The state of all ranks together."""
        shards = self.base.shards
        moments = shards.whole_moments(state.adapter, state.moments)
        return replace(state, adapter=shards.whole(state.adapter), moments=moments)

    def _expect_alone(self, what: str) -> None:
        """Raises NotOffered for what several ranks do not do."""
        if self.base.shards.every.count > 1:
            raise NotOffered(f"{what}: not offered with engine.{self.base.shards.setting}")

    def _first(self, command: OpenSession) -> AdapterVersion:
        if command.resume is not None:
            return command.resume.adapter
        if command.start is not None:
            return command.start
        assert command.fresh is not None, "a session starts from something"
        self.base.shards.expect([str(method["type"]) for method in command.fresh.methods])
        methods = settings_of(command.fresh.methods)
        return fresh_adapter(self.base, command.adapter, methods, command.fresh.seed)

    def _shapes(self, start: AdapterVersion | None, fresh: FreshAdapter | None) -> AdapterVersion:
        if start is not None:
            return start
        assert fresh is not None, "an adapter has shapes"
        return sketch_adapter(self.base, "sketch", settings_of(fresh.methods), fresh.seed)

    def _parameter(self, path: str, what: str) -> Tensor | None:
        frozen = self.base.frame.frozen
        match what:
            case "weight":
                return frozen.dense(path).weight
            case "bias":
                return frozen.bias(path)
            case "gain":
                return frozen.gain(path)
        return frozen.weights(path).row_norms()

    def _mark(self, job: str) -> StateMark:
        session, number = self.sessions[job], next(self._next_snapshot)
        self._snapshots[number] = session.snapshot()
        return StateMark(number, session.step)

    def _restart(self, command: RestartStep) -> None:
        session = self.sessions[command.job]
        session.abandon(command.pass_number)
        session.change(command.config)
        self.arena.empty()

    def _limit(self, limits: SetLimits) -> None:
        if limits.window_group_rows is not None:
            self.window_group_rows = limits.window_group_rows
        if limits.activation_nbytes is not None:
            self.arena.set_limit(limits.activation_nbytes)

    @cached_property
    def _base_bytes(self) -> tuple[int, int]:
        """Bytes of the base, and of the backward of one linear; counting takes milliseconds."""
        return self.base.nbytes, self.base.backward_nbytes

    def _memory(self) -> DeviceMemory:
        base, backward = self._base_bytes
        return DeviceMemory(
            base=base,
            base_backward=backward,
            adapters=self.adapters.nbytes,
            slots=self.slot_pools.nbytes,
            # A thread may be opening one meanwhile.
            sessions={job: session.held for job, session in list(self.sessions.items())},
        )
