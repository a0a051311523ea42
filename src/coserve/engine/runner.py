"""Runs a plan on the local device: one fused forward, the sampled tokens, backward, optimizer steps."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.abreast import Abreast
from coserve.adapters.bank import AdapterBank
from coserve.adapters.bypass import Bypasses
from coserve.adapters.stacks import Stacks
from coserve.core.plan import (
    InferenceSegment,
    Lane,
    Plan,
    Prefix,
    Sampled,
    StepResult,
    TrainingSegment,
    Updated,
)
from coserve.core.row_buckets import pad_rows
from coserve.core.sequence import Direction
from coserve.engine.backward import backward_windows
from coserve.engine.inference import InferenceBatch, adapter_ranges, outside_layers
from coserve.engine.lanes import Lanes
from coserve.engine.sampler import Sampler
from coserve.engine.shortage import Shortages
from coserve.engine.table import SequenceTable
from coserve.errors import CoserveError, LossNotFinite
from coserve.memory.arena import Arena
from coserve.memory.exhausted import is_out_of_memory
from coserve.memory.kv import InferenceRows, KVPool, PrefillRows
from coserve.model.base import Base
from coserve.model.batch import FusedRows, LayerCalls, Many, Part
from coserve.model.together import linears_together
from coserve.train.backward import BackwardWindow
from coserve.train.tape import KeptWindow, Tape
from coserve.train.trainer import TrainingRun
from coserve.train.updating import update_all
from coserve.train.window import Window
from coserve.train.window_group import KeptWindowGroup

_NAP: Final = 0.001  # seconds; a pause is cut into so many, for whoever arrives meanwhile


@dataclass(slots=True)
class ForwardWindow:
    """A training window that goes forward in this step."""

    segment: TrainingSegment
    tape: Tape
    window: Window
    bypasses: Bypasses
    calls: LayerCalls


class LocalRunner:
    """The `Runner` of one device. Owns keys and values, sequence rows and training runs; decides nothing."""

    def __init__(self, base: Base, bank: AdapterBank, pool: KVPool, table: SequenceTable) -> None:
        self.base, self.bank, self.pool, self.table = base, bank, pool, table
        self.arena = Arena()
        self.window_group_rows = 0  # most that go back together
        self.sampler = Sampler(base, bank, table)
        self.stacks = Stacks(linears_together(base), table.capacity, base.device)
        bank.when_dropped(lambda version: self.stacks.forget(version.bypasses))
        self.runs: dict[str, TrainingRun] = {}
        self._lanes = Lanes(base.device)
        self._beside: Future[float] | None = None  # training in a lane of its own, while steps go on
        self._underway: tuple[TrainingSegment, ...] = ()
        self._trained: list[TrainingSegment] = []  # done, and not told yet
        self._training_seconds = 0.0
        self._short = Shortages(self._drop)

    @torch.no_grad()
    def run(self, plan: Plan) -> StepResult:
        if plan.split is None:
            self.settle()
        started = time.perf_counter()
        for key in plan.released:
            self.table.release(key)
        self.table.start(plan.sequences)
        for prefix in plan.prefixes:
            self._fill(prefix)
        self.table.extend(plan.inference)
        sampled, answering = self._run_fused(plan) if plan.split is None else self._run_split(plan)
        if plan.pause:
            time.sleep(min(plan.pause, _NAP))
        updated, failed = self._update(plan.updates)
        if self._beside is None:  # else its jobs have more pieces to come
            failed |= self._short.take()
        if self.base.device.type == "cuda" and plan.split is None:  # a lane waits for its own stream
            torch.cuda.synchronize(self.base.device)
        trained, self._trained = tuple(self._trained), []
        lanes, self._training_seconds = (answering, self._training_seconds), 0.0
        seconds = time.perf_counter() - started
        return StepResult(seconds, sampled, updated, failed, trained, lanes)

    def settle(self) -> None:
        """Waits for the training that is under way in a lane of its own."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            self._training_seconds = beside.result()
            self._trained += self._underway

    def _run_fused(self, plan: Plan) -> tuple[dict[int, Sampled], float]:
        """Tokens; the whole machine does one thing at a time."""
        (lane,) = plan.lanes
        sampled = self._pass(lane)
        self._backward_all(lane)
        self._trained += lane.training
        return sampled, 0.0

    def _run_split(self, plan: Plan) -> tuple[dict[int, Sampled], float]:
        """Tokens, and the seconds of their lane; without inference the other lane is waited for."""
        answers, training = plan.lanes
        if training.training:
            assert self._beside is None, "one piece of training beside inference at a time"
            self._underway = training.training
            self._beside = self._lanes.begin(1, training.share, partial(self._train_lane, training))
        if not answers.inference:
            self.settle()
            return {}, 0.0
        sampled, seconds = self._lanes.begin(0, answers.share, partial(self._answer_lane, answers)).result()
        if self._beside is not None and self._beside.done():
            self.settle()
        return sampled, seconds

    @torch.no_grad()  # of this thread: every lane has its own
    def _answer_lane(self, lane: Lane) -> tuple[dict[int, Sampled], float]:
        started = time.perf_counter()
        return self._pass(lane), time.perf_counter() - started

    @torch.no_grad()
    def _train_lane(self, lane: Lane) -> float:
        started = time.perf_counter()
        self._pass(lane)
        self._backward_all(lane)
        return time.perf_counter() - started

    def _backward_all(self, lane: Lane) -> None:
        """Windows through the tail, then windows back through layers."""
        for segment in lane.training:
            if segment.direction is Direction.LOSS and (job := segment.job) not in self._short:
                with self._short.of(job):
                    self._through_tail(segment)
        self._backward([segment for segment in lane.training if segment.direction is Direction.BACKWARD])

    def _drop(self, job: str) -> None:
        """Gives back what a job that ran out of memory has on its way."""
        self.runs[job].drop_tapes()
        self.arena.empty()

    def _fill(self, prefix: Prefix) -> None:
        """Virtual tokens into their pages: given ones as they are, then prompts in a pass of their own."""
        version = self.bank.find(prefix.adapter)
        pages = torch.tensor(prefix.pages, device=self.base.device)
        self.pool.clean(pages)
        slots = self.pool.slots(pages)[: prefix.tokens]
        given = prefix.tokens - prefix.rows
        for layer, (k, v) in enumerate(version.virtual.caches()):
            self.pool.write(layer, slots[:given], k, v)
        for start, count in self._prompt_windows(prefix.rows):
            bypasses = version.virtual.embedded(version.bypasses, start, count)
            first, end = given + start, given + start + count
            rows = PrefillRows(first, count, pages[: -(-end // self.pool.page_size)])
            self._forward(self._prompt_rows(rows, slots[first:end], bypasses), [])

    def _prompt_windows(self, rows: int) -> list[tuple[int, int]]:
        """(start, count) of the passes that a prompt goes through the model in."""
        return [(0, rows)] if rows else []

    def _prompt_rows(self, rows: PrefillRows, slots: Tensor, bypasses: Bypasses) -> InferenceBatch:
        missing = pad_rows(rows.count) - rows.count
        adapters = [(slice(0, rows.count), bypasses)]
        positions = torch.arange(rows.start, rows.start + rows.count, device=slots.device)
        hidden, calls = self.base.prologue(
            torch.zeros(rows.count + missing, dtype=torch.long, device=slots.device),
            F.pad(positions, (0, missing)),
            outside_layers(self.base.early_sites, adapters),
        )
        part = InferenceRows(self.pool, slots, None, [rows], missing)
        return InferenceBatch(part, (), slots, (), hidden, calls, adapters)

    def _pass(self, lane: Lane) -> dict[int, Sampled]:
        """Everything that goes forward, in one fused pass, and the tokens that come of it.

        Where memory does not last all pass again alone, and only write where they wrote before.
        """
        inference = self._inference_rows(lane.inference) if lane.inference else None
        kept = [segment for segment in lane.training if segment.direction is Direction.TRAIN_FORWARD]
        if not self._fits(inference, kept):
            inference = self._inference_rows(lane.inference) if lane.inference else None
            self._forward(inference, [])
            for segment in kept:
                self._keep_alone(segment)
        return self.sampler.sample(inference) if inference is not None else {}

    def _fits(self, inference: InferenceBatch | None, kept: Sequence[TrainingSegment]) -> bool:
        """Whether there was memory for one pass of all, where it can be told whose fault it is."""
        try:
            self._forward(inference, kept)
        except (RuntimeError, MemoryError) as error:
            if not kept or not is_out_of_memory(error):
                raise
            return False
        return True

    def _keep_alone(self, segment: TrainingSegment) -> None:
        """A window forward in a pass of its own."""
        if (job := segment.job) not in self._short:
            with self._short.of(job):
                self._forward(None, [segment])

    def _forward(self, inference: InferenceBatch | None, kept: Sequence[TrainingSegment]) -> None:
        """All rows through the layers; a window joins at its span's first layer and leaves after its last."""
        windows = [self._forward_window(segment) for segment in self._by_batch_key(kept)]
        composed: list[ForwardWindow] | None = None
        for layer in range(self.base.depth):
            joined = [t for t in windows if t.segment.span.first <= layer < t.segment.span.last]
            if inference is None and not joined:
                continue
            if composed is None or [id(t) for t in joined] != [id(t) for t in composed]:
                composed = joined
                rows, calls = self._compose(inference, joined)
            hidden = [] if inference is None else [inference.hidden]
            hidden += [t.tape.input(layer, t.window, t.bypasses) for t in joined]
            with self.base.cell.set(rows):
                out = self.base.layer(layer, hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1), calls)
            start = 0
            if inference is not None:
                start = inference.hidden.shape[1]
                inference.hidden = out[:, :start]
            for window in joined:
                window.tape.keep_output(layer, window.window, out[0, start : start + window.window.rows])
                start += window.window.rows

    def _forward_window(self, segment: TrainingSegment) -> ForwardWindow:
        run, window = self._window(segment)
        tape = run.tape(segment.key)
        return ForwardWindow(segment, tape, window, run.bypasses(segment.key, window), tape.calls_for(window))

    def _compose(
        self, inference: InferenceBatch | None, windows: Sequence[ForwardWindow]
    ) -> tuple[FusedRows, LayerCalls]:
        parts: list[Part] = [] if inference is None else [inference.part]
        laid = self.stacks.lay([] if inference is None else inference.adapters)
        adapters = list(laid.alone)
        calls = [] if inference is None else [inference.calls]
        start = 0 if inference is None else inference.hidden.shape[1]
        kept = [KeptWindow(window.tape, window.window) for window in windows]
        parts += [KeptWindowGroup(kept)] if len(kept) > 1 else kept
        calls += [window.calls for window in windows]
        for window in windows:
            adapters.append((slice(start, start + window.window.rows), window.bypasses))
            start += window.window.rows
        many: list[Many] = list(laid.gathered)
        if len(adapters) > 1:
            many.append(abreast := Abreast(adapters))
            adapters = abreast.rest
        return FusedRows(parts, adapters, many), self.base.arguments.concat(calls)

    def _inference_rows(self, segments: Sequence[InferenceSegment]) -> InferenceBatch:
        """Decode rows first, then prefill chunks, each ordered so that an adapter's rows lie together."""
        ordered = sorted(segments, key=lambda s: (not self._decodes(s), *self._kind(s.adapter)))
        rows = self.table.rows(ordered)
        decoding = sum(map(self._decodes, ordered))
        entering, prefills, decode = [], [], None
        if decoding:
            longest = max(segment.context + 1 for segment in ordered[:decoding])
            tokens, positions, slots, decode = self.table.decode(rows[:decoding], longest)
            entering.append((tokens, positions, slots))
        counts = [1] * decoding
        for segment, row in zip(ordered[decoding:], rows[decoding:], strict=True):
            chunk = self.table.prefill(segment, row)
            prefills.append(PrefillRows(chunk.start, segment.length, chunk.pages))
            entering.append((chunk.tokens, chunk.positions, chunk.slots))
            counts.append(segment.length)
        tokens, positions, slots = (torch.cat(column) for column in zip(*entering, strict=True))
        missing = pad_rows(len(tokens)) - len(tokens)
        part = InferenceRows(self.pool, slots, decode, prefills, missing)
        adapters = adapter_ranges(self.bank, ordered, counts)
        hidden, calls = self.base.prologue(
            F.pad(tokens, (0, missing)),
            F.pad(positions, (0, missing)),
            outside_layers(self.base.early_sites, adapters),
        )
        return InferenceBatch(part, ordered, rows, counts, hidden, calls, adapters)

    def _kind(self, adapter: str | None) -> tuple[int, str]:
        """What rows are ordered by, so that those lie together which are multiplied together."""
        return (-1, "") if adapter is None else (self.stacks.order(self.bank.find(adapter).bypasses), adapter)

    def _through_tail(self, segment: TrainingSegment) -> None:
        run, window = self._window(segment)
        run.backward(segment.key).through_tail(window, run.bypasses(segment.key, window))

    def _backward(self, segments: Sequence[TrainingSegment]) -> None:
        """Windows back through layers."""
        windows: list[tuple[str, BackwardWindow]] = []
        for segment in self._by_batch_key(segments):
            if (job := segment.job) not in self._short:
                with self._short.of(job):
                    run, window = self._window(segment)
                    bypasses = run.bypasses(segment.key, window)
                    windows.append((job, run.backward(segment.key).start(window, segment.span, bypasses)))
        backward_windows(windows, self.window_group_rows, self._short)
        for segment in segments:
            is_through = segment.start == 0 and segment.span.first == 0
            if is_through and segment.job not in self._short:
                self.runs[segment.job].release(segment.key)

    def _by_batch_key(self, segments: Sequence[TrainingSegment]) -> list[TrainingSegment]:
        """Those of like jobs next to each other; a job's own stay in their order."""
        return sorted(segments, key=lambda segment: self.runs[segment.job].batch_key)

    def _window(self, segment: TrainingSegment) -> tuple[TrainingRun, Window]:
        run = self.runs[segment.job]
        return run, run.tape(segment.key).window(segment.start, segment.length)

    def _decodes(self, segment: InferenceSegment) -> bool:
        return self.table[segment.key].is_newest(segment)

    def _update(self, jobs: Sequence[str]) -> tuple[dict[str, Updated], dict[str, CoserveError]]:
        updated: dict[str, Updated] = {}
        failed: dict[str, CoserveError] = {}
        short = Shortages(self._drop)
        due = []
        for job in jobs:
            with short.of(job):
                self.runs[job].make_room()
                due.append(self.runs[job])
        for run, found in zip(due, update_all(due), strict=True):
            if isinstance(found, LossNotFinite):
                failed[run.job] = found
            else:
                updated[run.job] = found
        return updated, failed | short.take()
