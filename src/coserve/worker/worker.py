"""The worker owns a device: it runs plans, their passes and optimizer steps, and commands between them."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import torch

from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.attention.backend import AttentionBackend
from coserve.attention.paged import make_batched
from coserve.core.plan import (
    BasePlan,
    BaseResult,
    KernelLaunches,
    Moved,
    OffloadReads,
    Passes,
    TrainingSegment,
    WeightReads,
)
from coserve.core.step_trace import span
from coserve.errors import CoserveError, TogetherFailed
from coserve.executors.executor import (
    CloseSession,
    Command,
    DeviceMemory,
    ExecutorSpec,
    R,
    RestartStep,
    SetLimits,
)
from coserve.memory.exhausted import failing_alone
from coserve.model.base import Base
from coserve.model.together import linears_together
from coserve.streamed.planner import Streaming
from coserve.train.optimizer_offload import MakeOffload
from coserve.worker.compute_threads import ComputeThreads
from coserve.worker.fused_pass import FusedPass
from coserve.worker.held import HeldState
from coserve.worker.launched import LaunchedPlan, has_decode_rows_alone
from coserve.worker.offloaded import OffloadedCache
from coserve.worker.sequence_table import SequenceTable
from coserve.worker.streams import Streams
from coserve.worker.swap_space import SwapSpace
from coserve.worker.timer import DeviceTimer
from coserve.worker.training_graphs import TrainingGraphs
from coserve.worker.training_passes import TrainingPasses

_log = logging.getLogger(__name__)

_NAP: Final = 0.001  # seconds of idle time in one step, so that arrivals wait no longer


class Worker:
    """The owner of one device: runs plans on its caches and sequence rows, and makes no decisions.
    `executors/local.py` brings it plans."""

    pass_type: ClassVar[type[FusedPass]] = FusedPass
    attention_type: ClassVar[Callable[..., AttentionBackend[Any]]] = make_batched
    training_type: ClassVar[type[TrainingPasses]] = TrainingPasses
    is_deterministic: ClassVar[bool] = False  # bits may depend on the number of threads
    trains_apart: ClassVar[bool] = False  # never in an answers' pass, nor beside one

    def __init__(
        self,
        base: Base,
        attention: AttentionBackend[Any],
        table: SequenceTable,
        make_offload: MakeOffload | None = None,
        grown: int = 0,
        streaming: Streaming | None = None,
        swap_space: SwapSpace | None = None,
        offloaded: OffloadedCache | None = None,
        offload_refusal: str = "",
    ) -> None:
        """`grown` are the bytes that loading the base took, and keeps, beside its weights; `streaming` says
        how it is streamed. `swap_space` moves pages to the page store and back as plans say, `offloaded` has
        those of longer sequences there; `offload_refusal` says why it is None."""
        self.base, self.attention, self.table = base, attention, table
        self.slot_pools = LoraSlotPools(linears_together(base), table.capacity, base.device)
        self.loaded = LoadedAdapters(lambda version: self.slot_pools.forget(version.bypasses))
        self.held = HeldState(base, self.loaded, self.slot_pools, table.sampling.grammars, make_offload)
        self.sessions, self.arena = self.held.sessions, self.held.arena
        self._has_begun = False  # whether a plan has begun, and a pass of it has failed
        self._grown, self._streaming, self._swap_space = grown, streaming, swap_space
        self._offloaded, self._offload_refusal = offloaded, offload_refusal
        self._has_moved = False  # whether moves of the plan under way have begun
        self._unfilled: dict[str, CoserveError] = {}  # adapters whose virtual tokens it could not fill
        is_alone = base.shards.every.count == 1
        # Ranks that round alike decide alike: bits depend on the number of compute threads.
        is_free = self.base.device.type == "cpu" and is_alone and not self.is_deterministic
        self._threads = ComputeThreads(torch.get_num_threads() if is_free else 1)
        # Whether training may run beside answers. Where linears are computed elsewhere both would share
        # nothing of this device but Python; ranks call their collectives in one order.
        self._may_share = is_alone and not (base.makes_calls or self.trains_apart)
        self._failed: set[str] = set()  # jobs without training until their sessions close or restart
        self._pauses = 0  # results with paused training
        self._ahead: list[LaunchedPlan] = []  # whose results nobody may have asked for
        self.training = self.training_type(self.held)
        self._pause, self._short = self.training.pause, self.training.short
        self.fused = self.pass_type(self.held, attention, table, self.training, self._offloaded)
        by_graph = not (self.is_deterministic or self.trains_apart)
        if by_graph and (record := self.fused.recorder()) is not None:
            self.training.graphs = TrainingGraphs(base, self.fused.forward, record)
        self._streams = Streams(base.device, self.fused.run, self._train)
        self._prove()

    def _prove(self) -> None:
        """Raises UnsupportedModel if the executor cannot run the base."""

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return ExecutorSpec(
            sequences=self.table.capacity,
            eos_ids=self.table.sampling.eos_ids,
            cache_nbytes=self.attention.nbytes + (self.table.states.nbytes if self.table.states else 0),
            grown=self._grown,
            host_room=self.held.host_copies.room,
            fingerprint=self.base.fingerprint,
            parameters=self.base.parameters,
            dtype=str(self.base.dtype).removeprefix("torch."),
            row_buckets=self.base.row_buckets,
            sites=tuple(self.base.sites.values()),
            streaming=self._streaming,
            state_slots=self.table.states.slots if self.table.states else 0,
            swap_pages=0 if self._swap_space is None else self._swap_space.pages,
            offload_pages=0 if self._offloaded is None else self._offloaded.pages,
            offload_refusal=self._offload_refusal,
            elsewhere=frozenset(p for p, own in self.base.linears.items() if own.placement.is_elsewhere),
            graphs=self.fused.graphs is not None,
        )

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self.base.chain.on_layer = beat
        if self.base.reader is not None:
            self.base.reader.on_wait = beat

    def call(self, command: Command[R]) -> R:
        """See `DeviceWorker`."""
        if isinstance(command, CloseSession | RestartStep):
            self._streams.settle()
            self._failed.discard(command.job)
        with self._streams.step():
            if isinstance(command, SetLimits):
                self._limit_graphs(command.graph_store_nbytes)
            reply = self.held.do(command)
        return self._with_graphs(reply) if isinstance(reply, DeviceMemory) else reply

    def _limit_graphs(self, nbytes: int | None) -> None:
        if self.training.graphs is not None and nbytes is not None:
            self.training.graphs.set_limit(nbytes)

    def _with_graphs(self, held: DeviceMemory) -> Any:
        """The bytes with those of graphs."""
        windows, passes = self.training.graphs, self.fused.graphs
        stores = 0 if windows is None else windows.store_nbytes
        every = sum(graphs.nbytes for graphs in (windows, passes) if graphs is not None)
        return replace(held, graphs=every, graph_stores=stores)

    @torch.no_grad()
    def launch_ahead(self, plan: BasePlan) -> LaunchedPlan | None:
        """See `LaunchingWorker`. It launches plans of decode rows that a graph takes and samples."""
        if self.fused.graphs is None or self._streams.is_training or not has_decode_rows_alone(plan):
            return None
        with self._streams.queue(), self.computing():
            timer = DeviceTimer(self.base.device)
            if not self._has_moved:
                self._move(plan)
            if not self._has_begun:
                self._begin(plan)
            tokens = self.fused.launch(plan)
            if tokens is None:  # `run` goes on from here
                return None
            timer.stop()
        self._has_begun = self._has_moved = False
        outcome = BaseResult(0.0, moved=self._moved(plan), lost=self.fused.sampler.take_failed())
        self._ahead = [*self._ahead[-1:], LaunchedPlan(tokens, timer, outcome)]
        return self._ahead[-1]

    @torch.no_grad()
    def run(self, plan: BasePlan) -> BaseResult:
        """See `DeviceWorker`."""
        for launched in self._ahead:  # whose tokens the host has to know
            launched.result()
        self._ahead = []
        share = plan.share if self._may_share else None
        passes = Passes(windows_apart=True) if self.trains_apart else plan.passes
        if (share, passes) != (plan.share, plan.passes):
            plan = replace(plan, share=share, passes=passes)
        if plan.share is None:
            self._streams.settle()
        with self._streams.step(plan.share), self.computing():
            if self._has_moved:  # it runs again, which is no hang, and may have written into its pages
                self.base.chain.on_layer()
            else:
                self._move(plan)
            plan = plan.without_training(plan.jobs if plan.pauses < self._pauses else self._failed)
            self._pause.begin(plan.pausable, plan.abandons)
            timer, read = DeviceTimer(self.base.device), self._read
            if not (is_again := self._has_begun):
                self._begin(plan)
                self._has_begun = True
            with self._threads_for(plan):
                sampled, trained, is_paused, stream_seconds = self._streams.run(plan, is_again)
            # Training that is under way beside answers is not stopped, or has not told of it.
            failure = None if self._streams.is_training else self._pause.take_failure()
            if failure is not None:
                if not (plan.inference or trained or plan.share is not None):  # as if it had not run
                    raise failure
                _log.warning("training is paused: %s", failure)
            if plan.idle:
                time.sleep(min(plan.idle, _NAP))
            self.table.keep_states(plan.states, plan.inference)
            outputs = self.training.outputs(trained)
            with span("optimizer steps", len(plan.updates)) if plan.updates else nullcontext():
                updated, failed = self.training.update(plan.updates)
            if not self._streams.is_training:  # else rows of failed jobs may still run beside answers
                failed |= self._short.take()
            self._failed |= failed.keys()
            self._pauses += is_paused
            moved = self._moved(plan)
            timer.stop()
        seconds = timer.seconds - self._pause.lost  # nobody learns from what was lost
        self._has_begun = self._has_moved = False
        return BaseResult(
            seconds=seconds,
            sampled=sampled,
            updated=updated,
            failed=failed,
            trained=trained,
            paused=is_paused,
            stream_seconds=stream_seconds,
            reads=self._read - read,
            moved=moved,
            lost=self.fused.sampler.take_failed()
            | ({} if self._offloaded is None else self._offloaded.take_lost()),
            offload_reads=OffloadReads() if self._offloaded is None else self._offloaded.take_reads(),
            outputs=outputs,
            unfilled=self._unfilled,
            together_failed=isinstance(failure, TogetherFailed),
            launched=KernelLaunches(
                self.fused.is_launched,
                frozenset() if self._streams.is_training else self.training.take_launched(),
            ),
        )

    def _move(self, plan: BasePlan) -> None:
        """Begins the moves of a plan's pages, also into room that ended sequences had."""
        self._has_moved = True
        if self._offloaded is not None:
            for key in plan.released:
                self._offloaded.end(key)
        if self._swap_space is not None:
            self._swap_space.begin(plan)

    def computing(self) -> AbstractContextManager[None]:
        """Context of all that a plan computes."""
        return nullcontext()

    def _moved(self, plan: BasePlan) -> Moved:
        """Moves that have ended; a step without rows waits a little for the next one."""
        if self._swap_space is None:
            return Moved()
        return self._swap_space.take(0.0 if plan.has_rows or plan.others_wait else _NAP)

    def _threads_for(self, plan: BasePlan) -> AbstractContextManager[None]:
        """Context in which a step computes with the number of threads that suits the moment."""
        if plan.share is not None or not (plan.inference or plan.training):  # streams have their own numbers
            return nullcontext()
        reader = self.base.reader
        rows = sum([one.length for one in plan.inference]), sum([one.length for one in plan.training])
        is_reading = reader is not None and not reader.dry and not plan.training
        return self._threads.step((is_reading, *map(int.bit_length, rows)), is_reading)

    @property
    def _read(self) -> WeightReads:
        """Reads of a streamed base so far."""
        return WeightReads() if self.base.reader is None else self.base.reader.total

    def _begin(self, plan: BasePlan) -> None:
        """Takes up what a plan names for the first time."""
        self._begin_rows(plan)
        for micro_batch in plan.micro_batches:
            if micro_batch.job not in self._short:
                with self._short.of(micro_batch.job):
                    self.sessions[micro_batch.job].begin(micro_batch)

    def _begin_rows(self, plan: BasePlan) -> None:
        """Takes up the sequences that a plan names, and frees what has ended."""
        self._unfilled = {}
        for prefix in plan.prefixes:  # sequences that begin copy their rest of a page
            what = f"filling pages with the virtual tokens of adapter {prefix.adapter}"
            with failing_alone(what, partial(self._unfilled.__setitem__, prefix.adapter)):
                self.fused.fill(prefix)
        self.table.keep_states(plan.states, plan.inference, leaving=True)
        used = [self.table.release(key) for key in plan.released]
        fresh = (segment.request.adapter for segment in plan.inference if segment.request is not None)
        for adapter in (*used, *fresh):
            if adapter and adapter in self.loaded:  # else it was dropped after its sequences had ended
                self.slot_pools.use(self.loaded.find(adapter).bypasses)
        for key, error in self.table.extend(plan.inference).items():
            self.fused.sampler.fail(key, error)
        self.table.begin_states(plan.states)
        if self._offloaded is not None:
            for segment in plan.inference:
                if segment.offloaded and segment.new_pages:
                    self._offloaded.begin(segment.key, len(segment.new_pages))

    def pause_training(self) -> None:
        """See `Executor`."""
        self._pause.ask()

    def resume_training(self) -> None:
        """See `Executor`."""
        self._pause.withdraw()

    @torch.no_grad()  # a setting of the thread, and streams have their own
    def _train(self, plan: BasePlan) -> list[TrainingSegment]:
        """Runs the plan's other training in slices; returns what ran."""
        sliced = [segment for segment in plan.training if segment not in plan.fused]
        alone = bool(plan.alone) or self.is_deterministic
        is_free = not plan.inference  # nobody waits for a graph to be captured
        return self.training.run(sliced, plan.slice_layers, self.fused.forward, alone, captures=is_free)
