"""Runs a plan on the local device: one fused forward, sampling, backward, optimizer steps."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.lora_batch import AdapterRows
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.attention.backend import AttentionBackend, CommonAttentionMetadata, InferenceRows
from coserve.attention.offloaded import OffloadedSegment, SplitRows
from coserve.attention.paged import make_batched
from coserve.core.plan import (
    InferenceSegment,
    Lane,
    MicroBatchOutput,
    OffloadReads,
    OptimStep,
    Plan,
    Prefix,
    Sampled,
    StepResult,
    TrainingSegment,
    Updated,
    WeightReads,
)
from coserve.core.sequence import Direction
from coserve.errors import CoserveError, LossNotFinite, WeightsUnreadable
from coserve.executors.compute_threads import ComputeThreads
from coserve.executors.executor import (
    CloseSession,
    Command,
    Executor,
    ExecutorSpec,
    R,
    ReadMemory,
    RestartStep,
)
from coserve.executors.held import HeldState
from coserve.executors.inference import InferenceBatch, adapter_ranges, outside_layers
from coserve.executors.lanes import LaneRunner
from coserve.executors.offload_space import OffloadSpace
from coserve.executors.sampler import Sampler
from coserve.executors.sequence_table import SequenceTable
from coserve.executors.swap_space import SwapSpace
from coserve.memory.exhausted import is_out_of_memory
from coserve.model.base import Base
from coserve.model.batch import BatchPart, FusedRows, LayerCalls
from coserve.model.together import linears_together
from coserve.streamed.planner import Streaming
from coserve.train.backward import BackwardWindow, backward_windows
from coserve.train.micro_batch import MicroBatchState
from coserve.train.optimizer_offload import MakeOffload
from coserve.train.pause import LayerAbandoned, TrainingPause
from coserve.train.session import TrainingSession
from coserve.train.shortage import Shortages
from coserve.train.updating import update_all
from coserve.train.window import Window
from coserve.train.window_group import ForwardWindow, KeptRows

_log = logging.getLogger(__name__)

_NAP: Final = 0.001  # seconds of idle time in one step, so that arrivals wait no longer

Swapped = tuple[tuple[int, ...], tuple[float, float]]  # copies that failed, seconds of writing and of reading
_NO_SWAPS: Final[Swapped] = (), (0.0, 0.0)


class LocalExecutor(Executor):
    """The `Executor` of one device: runs plans on its caches and sequence rows, and makes no decisions."""

    sampler_type: ClassVar[type[Sampler]] = Sampler
    attention_type: ClassVar[Callable[..., AttentionBackend[Any]]] = make_batched
    is_deterministic: ClassVar[bool] = False  # bits may depend on the number of threads

    def __init__(
        self,
        base: Base,
        attention: AttentionBackend[Any],
        table: SequenceTable,
        make_offload: MakeOffload | None = None,
        grown: int = 0,
        streaming: Streaming | None = None,
        swap_space: SwapSpace | None = None,
        offload_space: OffloadSpace | None = None,
    ) -> None:
        """`grown` are the bytes that loading the base took, and keeps, beside its weights; `streaming` says
        how it is streamed, `swap_space` where pages move to as plans say, `offload_space` where those of
        longer sequences are."""
        self.base, self.attention, self.table = base, attention, table
        self.slot_pools = LoraSlotPools(linears_together(base), table.capacity, base.device)
        self.loaded = LoadedAdapters(lambda version: self.slot_pools.forget(version.bypasses))
        self.held = HeldState(base, self.loaded, self.slot_pools, table.sampling.grammars, make_offload)
        self.sessions, self.arena = self.held.sessions, self.held.arena
        self.sampler = self.sampler_type(base, self.loaded, table)
        self._launched: deque[Plan] = deque()
        self._begun: Plan | None = None  # the first of these, where weights that it needs could not be read
        self._is_stuck = False  # weights that the oldest plan needs could not be read
        self._results: deque[StepResult] = deque()  # not collected yet
        self._grown, self._streaming, self._swap_space = grown, streaming, swap_space
        self._offload_space = offload_space
        self._offloaded = None if offload_space is None else offload_space.cache
        self._swapped: Swapped | None = None  # what came of moving the pages of the oldest plan
        self._lanes = LaneRunner(base.device)
        is_free = self.base.device.type == "cpu" and not self.is_deterministic
        self._threads = ComputeThreads(torch.get_num_threads() if is_free else 1)
        self._has_lanes = not base.makes_calls  # whether lanes may be side by side
        self._short = Shortages(self.held.drop_activations)
        self._failed: set[str] = set()  # jobs without training until their sessions close or restart
        self._pauses = 0  # results with paused training
        self._pause = TrainingPause()
        self._prove()

    def _prove(self) -> None:
        """Raises UnsupportedModel if the executor cannot run the base."""

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`."""
        return ExecutorSpec(
            sequences=self.table.capacity,
            eos_ids=self.table.sampling.eos_ids,
            cache_nbytes=self.attention.nbytes,
            grown=self._grown,
            host_room=self.held.host_copies.room,
            fingerprint=self.base.fingerprint,
            parameters=self.base.parameters,
            dtype=str(self.base.dtype).removeprefix("torch."),
            row_buckets=self.base.row_buckets,
            sites=tuple(self.base.sites.values()),
            streaming=self._streaming,
            swap_pages=0 if self._swap_space is None else self._swap_space.pages,
            offload_pages=0 if self._offload_space is None else self._offload_space.pages,
            offload_refusal="" if self._offload_space is None else self._offload_space.refusal,
            elsewhere=frozenset(p for p, own in self.base.linears.items() if own.placement.is_elsewhere),
        )

    def launch(self, plan: Plan) -> None:
        """See `Executor`. A plan runs on the thread that collects its result: a thread of its own would
        compete with the planning of the next. Where linears are computed elsewhere two lanes would share
        nothing of this device but Python, so there is one."""
        self._launched.append(plan if self._has_lanes else replace(plan, split=None))

    def collect(self, wait: bool = True) -> StepResult | None:
        """See `Executor`."""
        if wait and not self._results:
            self._run_next()
        return self._results.popleft() if self._results else None

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        self.base.chain.on_layer = beat
        if self.base.reader is not None:
            self.base.reader.on_wait = beat

    def call(self, command: Command[R]) -> R:
        """See `Executor`."""
        if not command.beside:
            self._run_all(waits=not isinstance(command, ReadMemory))
        if isinstance(command, CloseSession | RestartStep):
            self._lanes.settle()
            self._failed.discard(command.job)
        return self.held.do(command)

    def _run_all(self, waits: bool) -> None:
        """Runs all plans before a command. One that does not wait for plans that cannot run does not raise
        WeightsUnreadable."""
        while self._launched and (waits or not self._is_stuck):
            with suppress(*(() if waits else (WeightsUnreadable,))):
                self._run_next()

    def _run_next(self) -> None:
        """Runs the oldest plan. Where weights of the base cannot be read it stays the oldest, and runs again
        next time: what of it has run computes the same once more."""
        if self._launched:
            self._swapped = self._swapped or self._swap(self._launched[0])
            if self._is_stuck:
                self.base.chain.on_layer()  # a plan that is tried again and again is no hang
            self._is_stuck = True
            result = self._run(self._launched[0])
            self._is_stuck = False
            self._launched.popleft()
            self._begun = self._swapped = None
            self._results.append(result)

    @torch.no_grad()
    def _swap(self, plan: Plan) -> Swapped:
        """Moves the pages of a plan; once, as what runs again may have written into them."""
        return _NO_SWAPS if self._swap_space is None else self._swap_space.run(plan)

    @torch.no_grad()
    def _run(self, plan: Plan) -> StepResult:
        plan = plan.without_training(plan.jobs if plan.pauses < self._pauses else self._failed)
        if plan.split is None:
            self._lanes.settle()
        self._pause.begin(plan.pausable, alone=not plan.inference)
        started, read = time.perf_counter(), self._read
        is_again = self._begun is not None
        if not is_again:
            for prefix in plan.prefixes:  # sequences that begin copy their rest of a page
                self._fill(prefix)
            self._begin(plan)
            self._begun = plan
        with self._threads_for(plan):
            sampled, trained, is_paused, lanes = self._lanes.run(plan.lanes, self._run_lane, is_again)
        if (failure := self._pause.failure) is not None:
            if not plan.inference and not trained and plan.split is None:  # the plan is as if it had not run
                raise failure
            _log.warning("training is paused: %s", failure)
        if plan.idle:
            time.sleep(min(plan.idle, _NAP))
        outputs = self._outputs(trained)
        updated, failed = self._update(plan.updates)
        if not self._lanes.is_training:  # else rows of failed jobs may still run in the lane
            failed |= self._short.take()
        if self.base.device.type == "cuda" and plan.split is None:  # lanes wait for their own streams
            torch.cuda.synchronize(self.base.device)
        self._failed |= failed.keys()
        self._pauses += is_paused
        seconds = time.perf_counter() - started - self._pause.lost  # nobody learns from what was lost
        copies_failed, moving = self._swapped or _NO_SWAPS
        return StepResult(
            seconds + sum(moving),
            sampled,
            updated,
            failed,
            trained,
            is_paused,
            lanes,
            self._read - read,
            copies_failed,
            moving,
            {} if self._offloaded is None else self._offloaded.take_lost(),
            OffloadReads() if self._offloaded is None else self._offloaded.take_reads(),
            outputs,
        )

    def _threads_for(self, plan: Plan) -> AbstractContextManager[None]:
        """Context in which a step that only answers may leave a core to the reading of weights."""
        reader = self.base.reader
        if reader is None or reader.dry or plan.training or plan.split or not plan.inference:
            return nullcontext()
        return self._threads.step(sum(segment.length for segment in plan.inference).bit_length())

    @property
    def _read(self) -> WeightReads:
        """Reads of a streamed base so far."""
        return WeightReads() if self.base.reader is None else self.base.reader.total

    def _begin(self, plan: Plan) -> None:
        used = [self.table.release(key) for key in plan.released]
        self.table.start(plan.sequences)
        for adapter in (*used, *(sequence.adapter for sequence in plan.sequences)):
            if adapter and adapter in self.loaded:  # else it was dropped after its sequences had ended
                self.slot_pools.use(self.loaded.find(adapter).bypasses)
        for micro_batch in plan.micro_batches:
            self.sessions[micro_batch.job].begin(micro_batch)
        self.table.extend(plan.inference)
        if self._offloaded is not None:
            for key in plan.released:
                self._offloaded.end(key)
            for segment in plan.inference:
                if segment.offloaded and segment.new_pages:
                    self._offloaded.begin(segment.key, len(segment.new_pages))

    def pause_training(self) -> None:
        """See `Executor`."""
        self._pause.ask()

    def resume_training(self) -> None:
        """See `Executor`."""
        self._pause.withdraw()

    @torch.no_grad()  # a setting of the thread, and lanes have their own
    def _run_lane(self, lane: Lane) -> tuple[dict[int, Sampled], list[TrainingSegment]]:
        """Returns the tokens, and the training that ran."""
        sampled, kept = self._pass(lane)
        forward = {segment for segment in lane.training if segment.direction is Direction.TRAIN_FORWARD}
        if not forward <= {*kept}:  # stopped
            return sampled, kept
        return sampled, kept + self._backward_all(lane)

    def _backward_all(self, lane: Lane) -> list[TrainingSegment]:
        """Takes windows through the tail, then others back through layers; returns the segments that ran."""
        trained: list[TrainingSegment] = []
        for segment in lane.training:
            if segment.direction.is_tail and not self._pause.is_due:
                try:
                    if (job := segment.job) not in self._short:
                        with self._short.of(job):
                            self._through_tail(segment)
                except WeightsUnreadable as error:
                    self._pause.failure = error
                    return trained
                self._pause.passed()
                trained.append(segment)
        if self._pause.is_due:
            return trained
        backward = [segment for segment in lane.training if segment.direction is Direction.BACKWARD]
        return trained + self._backward(backward)

    def _fill(self, prefix: Prefix) -> None:
        """Writes virtual tokens into their pages: given ones as they are, then prompts in a pass of their
        own."""
        version = self.loaded.find(prefix.adapter)
        self.attention.clean(prefix.pages)
        for layer, (k, v) in enumerate(version.virtual.caches()):
            self.attention.fill(layer, prefix.pages, k, v)
        for start, count in self._prompt_windows(prefix.rows):
            bypasses = version.virtual.embedded(version.bypasses, start, count)
            first = prefix.tokens - prefix.rows + start
            self._forward(self._prompt_rows(prefix.pages, first, count, bypasses), [])

    def _prompt_windows(self, rows: int) -> list[tuple[int, int]]:
        """(start, count) of each pass of a prompt's rows."""
        return [(0, rows)] if rows else []

    def _prompt_rows(
        self, pages: Sequence[int], first: int, count: int, bypasses: Bypasses
    ) -> InferenceBatch:
        """`count` rows of an adapter's prompt from position `first`; the prompt replaces their embeddings."""
        positions = torch.arange(first, first + count, device=self.base.device)
        table = torch.tensor([pages], device=self.base.device)
        common = CommonAttentionMetadata(table, positions, [count], [first + count])
        return self._batch((), torch.zeros_like(positions), common, [(slice(0, count), bypasses)])

    def _pass(self, lane: Lane) -> tuple[dict[int, Sampled], list[TrainingSegment]]:
        """Runs all forward rows in one fused pass; returns the tokens, and the training that ran.

        Where memory runs out inference and each window pass again alone, and overwrite their own results.
        """
        inference = self._inference_rows(lane.inference) if lane.inference else None
        kept = [segment for segment in lane.training if segment.direction is Direction.TRAIN_FORWARD]
        trained = self._together(inference, kept)
        if trained is None:
            inference = self._inference_rows(lane.inference) if lane.inference else None
            self._forward(inference, [])
            trained = [done for segment in kept for done in self._keep_alone(segment)]
        return (self.sampler.sample(inference) if inference is not None else {}), trained

    def _together(
        self, inference: InferenceBatch | None, kept: Sequence[TrainingSegment]
    ) -> list[TrainingSegment] | None:
        """As `_forward`; None where memory runs out, as the cause may be any of the rows."""
        try:
            return self._forward(inference, kept)
        except (RuntimeError, MemoryError) as error:
            if not kept or not is_out_of_memory(error):
                raise
            return None

    def _keep_alone(self, segment: TrainingSegment) -> list[TrainingSegment]:
        """Runs a window forward by itself; returns the part that ran before a pause."""
        if self._pause.is_due:
            return []
        if (job := segment.job) in self._short:
            return [segment]  # its job has failed
        trained = [segment]
        with self._short.of(job):
            trained = self._forward(None, [segment])
        return trained

    def _forward(
        self, inference: InferenceBatch | None, kept: Sequence[TrainingSegment]
    ) -> list[TrainingSegment]:
        """Runs all rows through the layers: a window joins at its span's first layer and leaves after its
        last, at a pause, or where weights cannot be read and no answer waits for them. Returns the windows
        with the layers they passed."""
        kept = self._by_batch_key(kept)
        windows = [self._forward_window(segment) for segment in kept]
        through = 0  # layers that windows have passed

        def stop() -> None:
            for window in windows:
                window.stop(through)

        def passed(layer: int, there: Sequence[InferenceBatch | ForwardWindow]) -> None:
            nonlocal through
            if isinstance(there[-1], ForwardWindow):
                through = layer + 1
                self._pause.passed()
                if self._pause.is_due:
                    stop()

        travellers: list[InferenceBatch | ForwardWindow] = [*windows]
        if inference is not None:
            travellers.insert(0, inference)
        try:
            self.base.chain.forward(travellers, self._compose, passed)
        except LayerAbandoned:
            stop()
        except WeightsUnreadable as error:
            if inference is not None:
                raise
            self._pause.failure = error
            stop()
        pairs = zip(kept, windows, strict=True)
        return [replace(segment, span=window.span) for segment, window in pairs if window.layers]

    def _forward_window(self, segment: TrainingSegment) -> ForwardWindow:
        micro_batch, window = self._window(segment)
        layers = range(segment.span.first, segment.span.last)
        calls = micro_batch.store.calls_for(window)
        return ForwardWindow(layers, micro_batch.store, window, micro_batch.bypasses(window), calls)

    def _compose(self, there: Sequence[InferenceBatch | ForwardWindow]) -> tuple[FusedRows, LayerCalls]:
        inference = next((one for one in there if isinstance(one, InferenceBatch)), None)
        windows = [one for one in there if isinstance(one, ForwardWindow)]
        parts: list[BatchPart] = [] if inference is None else [inference.part]
        training: list[AdapterRows] = []
        calls = [] if inference is None else [inference.calls]
        start = 0 if inference is None else inference.hidden.shape[1]
        if windows:
            parts.append(KeptRows([(window.store, window.window) for window in windows], self._pause.check))
        calls += [window.calls for window in windows]
        for window in windows:
            training.append((slice(start, start + window.window.rows), window.bypasses))
            start += window.window.rows
        lora = self.slot_pools.batch([] if inference is None else inference.adapters).with_rows(training)
        padding = slice(0, 0) if inference is None else inference.padding
        rows = FusedRows(parts, lora.rest, lora, inference is None, padding)
        return rows, self.base.arguments.concat(calls)

    def _inference_rows(self, segments: Sequence[InferenceSegment]) -> InferenceBatch:
        """Decode rows first, then prefill chunks, then rows of offloaded sequences, all ordered so that rows
        of an adapter are adjacent."""
        decodes: list[InferenceSegment] = []
        chunks: list[InferenceSegment] = []
        offloaded: list[InferenceSegment] = []
        for segment in segments:
            group = offloaded if segment.offloaded else decodes if self._decodes(segment) else chunks
            group.append(segment)
        ordered = [segment for group in (decodes, chunks, offloaded) for segment in self._by_kind(group)]
        tokens, common = self.table.batch(ordered, len(decodes))
        return self._batch(ordered, tokens, common, adapter_ranges(self.loaded, ordered, common.query_lens))

    def _batch(
        self,
        segments: Sequence[InferenceSegment],
        tokens: Tensor,
        common: CommonAttentionMetadata,
        adapters: list[tuple[slice, Bypasses]],
    ) -> InferenceBatch:
        hidden, calls = self._embed(tokens, common.positions, adapters)
        part = self._part(segments, common, hidden.shape[1])
        layers = range(self.base.depth)
        return InferenceBatch(part, segments, common.query_lens, hidden, calls, adapters, layers)

    def _part(
        self, segments: Sequence[InferenceSegment], common: CommonAttentionMetadata, count: int
    ) -> BatchPart:
        """The rows' attention: to pages on the device, and elsewhere for the last segments if they are
        offloaded."""
        elsewhere = [s for s in segments if s.offloaded]
        if not elsewhere or self._offloaded is None:
            return InferenceRows(self.attention, common, count)
        here = len(segments) - len(elsewhere)
        lens, resident = common.query_lens[:here], None
        if here:
            rows = sum(lens)
            table, positions = common.block_table[:here], common.positions[:rows]
            own = CommonAttentionMetadata(table, positions, lens, common.seq_lens[:here], common.num_decodes)
            resident = InferenceRows(self.attention, own, rows)
        parts = [OffloadedSegment(s.key, s.context, s.length) for s in elsewhere]
        return SplitRows(resident, self._offloaded, parts, count)

    def _embed(
        self, tokens: Tensor, positions: Tensor, adapters: Sequence[tuple[slice, Bypasses]]
    ) -> tuple[Tensor, LayerCalls]:
        """`Base.prologue` of rows padded to one of the device's row buckets."""
        if missing := self.base.row_buckets.pad_rows(len(tokens)) - len(tokens):
            tokens, positions = (F.pad(each, (0, missing)) for each in (tokens, positions))
        return self.base.prologue(tokens, positions, outside_layers(self.base.early_sites, adapters))

    def _by_kind(self, segments: list[InferenceSegment]) -> list[InferenceSegment]:
        if all(segment.adapter is None for segment in segments):
            return segments
        return sorted(segments, key=lambda segment: self._kind(segment.adapter))

    def _kind(self, adapter: str | None) -> tuple[int, str]:
        """Sort key of an adapter's rows, so that rows multiplied together are adjacent."""
        return (
            (-1, "")
            if adapter is None
            else (self.slot_pools.order(self.loaded.find(adapter).bypasses), adapter)
        )

    def _through_tail(self, segment: TrainingSegment) -> None:
        micro_batch, window = self._window(segment)
        tail, bypasses = micro_batch.tail, micro_batch.bypasses(window)
        (tail.logprobs if segment.direction is Direction.LOGPROBS else tail.loss)(window, bypasses)
        if micro_batch.start.forward_only and window.span.stop == micro_batch.store.rows:
            micro_batch.finish()

    def _outputs(self, trained: Sequence[TrainingSegment]) -> dict[int, MicroBatchOutput]:
        """Outputs of the micro-batches that report and have ended with these segments."""
        found: dict[int, MicroBatchOutput] = {}
        for segment in trained:
            if segment.job in self._short or (session := self.sessions.get(segment.job)) is None:
                continue
            micro_batch = session.micro_batches.get(segment.key)
            if micro_batch is not None and micro_batch.start.reports and micro_batch.loss is not None:
                with self._short.of(segment.job):
                    found[segment.key] = session.take_output(segment.key)
        return found

    def _backward(self, segments: Sequence[TrainingSegment]) -> list[TrainingSegment]:
        """Takes windows back through layers; returns them with the layers they passed before a pause."""
        windows: list[tuple[TrainingSegment, BackwardWindow]] = []
        for segment in self._by_batch_key(segments):
            if (job := segment.job) not in self._short:
                with self._short.of(job):
                    micro_batch, window = self._window(segment)
                    bypasses = micro_batch.bypasses(window)
                    windows.append((segment, micro_batch.backward.start(window, segment.span, bypasses)))
        of_jobs = [(segment.job, window) for segment, window in windows]
        backward_windows(of_jobs, self.held.window_group_rows, self._short, self._pause)
        trained = [replace(segment, span=window.span) for segment, window in windows if len(window.span)]
        failed = [segment for segment in segments if segment.job in self._short]
        trained = [segment for segment in trained if segment.job not in self._short]
        for segment in trained:
            if segment.start == 0 and segment.span.first == 0:
                self.sessions[segment.job].micro_batches[segment.key].finish()
        return trained + failed

    def _by_batch_key(self, segments: Sequence[TrainingSegment]) -> list[TrainingSegment]:
        """Sorts segments by their session's `batch_key`, stably."""
        return sorted(segments, key=lambda segment: self.sessions[segment.job].batch_key)

    def _window(self, segment: TrainingSegment) -> tuple[MicroBatchState, Window]:
        micro_batch = self.sessions[segment.job].micro_batches[segment.key]
        return micro_batch, micro_batch.store.window(segment.start, segment.length)

    def _decodes(self, segment: InferenceSegment) -> bool:
        return not segment.offloaded and self.table[segment.key].is_newest(segment)

    def _update(self, updates: Sequence[OptimStep]) -> tuple[dict[str, Updated], dict[str, CoserveError]]:
        updated: dict[str, Updated] = {}
        failed: dict[str, CoserveError] = {}
        if not updates:
            return updated, failed
        short = Shortages(self.held.drop_activations)
        due: list[tuple[TrainingSession, OptimStep]] = []
        for update in updates:
            with short.of(update.job):
                session = self.sessions[update.job]
                session.weights.make_room()
                due.append((session, update))
        for (session, _), found in zip(due, update_all(due), strict=True):
            if isinstance(found, LossNotFinite):
                failed[session.job] = found
            else:
                updated[session.job] = found
        return updated, failed | short.take()
