"""The fused pass of a step: all forward rows, of answers and of training, through the layers together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.activation import parted
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import AdapterRows, LoraBatch, SlotRows
from coserve.attention.backend import AttentionBackend, CommonAttentionMetadata, InferenceRows
from coserve.attention.states import PassStates
from coserve.core.plan import BasePlan, InferenceSegment, PassesAlone, Prefix, Sampled, TrainingSegment
from coserve.errors import CoserveError
from coserve.memory.exhausted import failing_alone, shared, together
from coserve.model.batch import BatchPart, FusedRows, LayerCalls
from coserve.train.window_group import ForwardWindow, KeptRows
from coserve.worker.cuda_graphs import CudaGraphs, ListedRows, PassGraphs, Record
from coserve.worker.held import HeldState
from coserve.worker.inference import InferenceBatch, PassedRows, adapter_ranges, outside_layers
from coserve.worker.launched import TokensUnderWay
from coserve.worker.offloaded import OffloadedCache, OffloadedSegment, SplitRows
from coserve.worker.sampler import Drawn, Sampler
from coserve.worker.sequence_table import DeviceRows, SequenceTable
from coserve.worker.training_passes import TrainingPasses

Traveller = InferenceBatch | ForwardWindow


class ThroughLayers(Protocol):
    """Runs all rows through layers (None: all of them): a window joins at its span's first layer and leaves
    after its last."""

    def __call__(self, travellers: Sequence[Traveller], layers: range | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class _GraphedRows:
    """Rows of segments, `counts` of each, that a graph takes through all layers; one that `samples` returns
    their tokens, another one hidden rows."""

    segments: Sequence[InferenceSegment]
    counts: Sequence[int]
    replay: Callable[[], Tensor]
    samples: bool

    def passed(self) -> PassedRows:
        """Replays the graph."""
        return PassedRows(self.segments, self.counts, self.replay())


class FusedPass:
    """Takes rows forward, and samples. `offloaded` has the pages that are not on the device; `training` knows
    the windows."""

    sampler_type: ClassVar[type[Sampler]] = Sampler

    def __init__(
        self,
        held: HeldState,
        attention: AttentionBackend[Any],
        table: SequenceTable,
        training: TrainingPasses,
        offloaded: OffloadedCache | None = None,
    ) -> None:
        self.base, self.loaded, self.slot_pools = held.base, held.adapters, held.slot_pools
        self.attention, self.table = attention, table
        self.sampler = self.sampler_type(self.base, self.loaded, table)
        self._training, self._pause = training, training.pause
        self.is_launched = False  # whether a graph should have had decode rows of the last plan, and had not
        self._offloaded = offloaded
        self.forward = self._through()
        self.graphs: PassGraphs | None = None
        if (record := self.recorder()) is not None:
            pages = attention.page_size, table.most_pages
            self.graphs = PassGraphs(self.pass_graph, record, table.padding_row, pages, self.base.device)
            self.graphs.prepare(table.capacity)

    def recorder(self) -> Record | None:
        """A recorder of graphs, which share its memory; None on a processor, where layers are not in memory
        as they are or computed elsewhere or by several ranks, where attention waits for the device, and where
        layers have states: a graph would write the half of the store that it was recorded with."""
        base = self.base
        is_whole = base.shards.every.count == 1 and not base.makes_calls and base.reader is None
        if base.device.type != "cuda" or not is_whole or base.mixers:
            return None
        return CudaGraphs(base.device) if self.attention.is_capturable else None

    @torch.no_grad()  # a setting of the thread, and streams have their own
    def run(self, plan: BasePlan) -> tuple[dict[int, Sampled], list[TrainingSegment]]:
        """Runs rows of sequences, and windows that share their pass; returns the tokens, and the windows with
        the layers that they have passed. A graph takes rows of answers that share no pass with windows, and
        decode rows apart from others where the plan has them so. Windows leave the pass at a pause, between
        two slices.

        Raises TogetherFailed where memory runs out, unless each sequence passes alone. Nothing is sampled
        then: all of it may pass again, and overwrite its results. Where the pass fails for another reason
        each of its rows passes alone at once, and who is the cause fails.
        """
        self.is_launched = False
        if plan.alone is PassesAlone.ALL:
            return self._one_by_one(plan.inference), []
        drawn, trained = list[Drawn](), list[TrainingSegment]()
        with together("a pass that several share") as failed:  # and notes nothing, as it may be repeated
            graphs = self._graphs(plan)
            keys = {segment.key for graph in graphs for segment in graph.segments}
            inference = [segment for segment in plan.inference if segment.key not in keys]
            self.is_launched = self._should_be_replayed(inference, plan)
            if inference:
                windows, reached = self._training.forward_slices(plan.fused, self.forward), 0
                batch = self._inference_rows(inference)
                for part in windows.parts(plan.slice_layers):
                    if self._pause.is_due:
                        break
                    self.forward([batch], range(reached, part.start))
                    self.forward([batch, *windows.going], part)
                    self._pause.passed()
                    reached = part.stop
                self.forward([batch], range(reached, self.base.depth))
                drawn.append(self.sampler.draw(batch))
                trained = self._training.done(plan.fused, windows.end())
            if graphs:
                self.base.chain.on_layer()
            drawn += [self.sampler.draw(graph.passed()) for graph in graphs if not graph.samples]
        if failed:
            trained = self._training.run(plan.fused, plan.slice_layers, self.forward, alone=True)
            return self._one_by_one(plan.inference), trained
        with together("the tokens of several requests") as failed:
            found = self.sampler.note(drawn)
        if failed:  # and nothing is noted
            return self._one_by_one(plan.inference), trained
        with shared():
            for graph in graphs:
                if graph.samples:  # not before the others, which may fail and pass again
                    found |= self.sampler.sampled_rows(graph.segments, graph.replay())
        return found, trained

    def _one_by_one(self, segments: Sequence[InferenceSegment]) -> dict[int, Sampled]:
        """Runs each sequence's rows in a pass of their own; a sequence whose pass fails is lost. Notes what
        is drawn once all have passed, as weights that cannot be read have the whole plan run again."""
        drawn: dict[int, list[Drawn]] = {}
        lost: dict[int, CoserveError] = {}
        for segment in segments:
            with failing_alone("the request", partial(lost.__setitem__, segment.key)):
                drawn[segment.key] = self._drawn([segment])
        found = {segment.key: Sampled() for segment in segments}
        for segment in segments:
            if segment.key not in lost:
                with failing_alone("the request", partial(lost.__setitem__, segment.key)):
                    found |= self.sampler.note(drawn[segment.key])
            if segment.key in lost:
                self.sampler.skip(segment, lost[segment.key])
        return found

    def _drawn(self, segments: Sequence[InferenceSegment]) -> list[Drawn]:
        """Takes rows of sequences alone through the layers, and draws."""
        batch = self._inference_rows(segments)
        self.forward([batch])
        return [self.sampler.draw(batch)]

    def fill(self, prefix: Prefix) -> None:
        """Writes virtual tokens into their pages: given ones as they are, then prompts in a pass of their
        own."""
        version = self.loaded.find(prefix.adapter)
        self.attention.clean(prefix.pages)
        for layer, (k, v) in enumerate(version.virtual.caches()):
            if layer in self.base.chain.span:
                self.attention.fill(layer, prefix.pages, k, v)
        for start, count in self._prompt_windows(prefix.rows):
            bypasses = version.virtual.embedded(version.bypasses, start, count)
            first = prefix.tokens - prefix.rows + start
            self.forward([self._prompt_rows(prefix.pages, first, count, bypasses)])

    def _through(self) -> ThroughLayers:
        """Makes what takes rows through the base's layers."""
        return partial(self.base.chain.forward, compose=self._compose)

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

    def _graphs(self, plan: BasePlan) -> "list[_GraphedRows]":
        """Graphs for rows of answers that share no pass with windows, and for decode rows apart from others
        where the plan has them so."""
        if self.graphs is None:
            return []
        rows, graphs = plan.inference, list[_GraphedRows]()
        if plan.passes.decodes_apart:
            decodes = [one for one in rows if self._decodes(one)]
            graphs += self._graph(decodes)
            rows = tuple(one for one in rows if not self._decodes(one)) if graphs else rows
        return graphs if plan.fused else graphs + self._graph(rows)

    def launch(self, plan: BasePlan) -> TokensUnderWay | None:
        """Gives the device a plan's decode rows, where there is a graph that samples them, and waits for
        nothing; None, and nothing is done, where there is none."""
        for graph in self._graph(plan.inference, captures=False):
            if graph.samples:
                self.base.chain.on_layer()
                return self.sampler.launched_rows(graph.segments, graph.replay())
        return None

    def _graph(self, segments: Sequence[InferenceSegment], captures: bool = True) -> "list[_GraphedRows]":
        """The graph that takes rows through all layers, and samples if it can; none where none holds their
        work."""
        if self.graphs is None or not segments or any(segment.offloaded for segment in segments):
            return []
        ordered, decodes = self._ordered(segments)
        counts = [segment.length for segment in ordered]
        pools = self.slot_pools.assign(adapter_ranges(self.loaded, ordered, counts), sum(counts))
        if pools is None:
            return []
        listed = ListedRows(self.table.places(ordered), counts, *self.table.known(ordered, decodes), pools)
        if decodes == len(ordered) and (draws := self.sampler.draws(ordered)) is not None:
            ends = self.table.lengths([segment.key for segment in ordered])
            sampled = replace(listed, ends=ends, draws=draws)
            if (replay := self.graphs.find(sampled, captures)) is not None:
                return [_GraphedRows(ordered, counts, replay, samples=True)]
        replay = self.graphs.find(listed, captures)
        return [] if replay is None else [_GraphedRows(ordered, counts, replay, samples=False)]

    def _should_be_replayed(self, launched: Sequence[InferenceSegment], plan: BasePlan) -> bool:
        """Tells whether graphs were to have decode rows that are launched, or prompts without decode rows."""
        if self.graphs is None or not launched or (plan.fused and not plan.passes.decodes_apart):
            return False
        is_due = any(map(self._decodes, launched))
        return is_due or not (plan.fused or any(map(self._decodes, plan.inference)))

    def pass_graph(self, rows: DeviceRows, slots: Sequence[SlotRows]) -> Tensor:
        """Hidden rows [1, n, width] after all layers, or the tokens [n] that are sampled of them. Reads the
        device alone."""
        count, (tokens, common) = len(rows.lines), self.table.read(rows)
        hidden, calls = self._embed(tokens, rows.positions, [])
        part = InferenceRows(self.attention, common, hidden.shape[1])
        layers = range(self.base.depth)
        batch = InferenceBatch((), common.query_lens, hidden, part, calls, [], layers, slots)
        self.forward([batch])
        return batch.hidden if rows.ends is None else self.sampler.sample_rows(batch.hidden[:, :count], rows)

    def _compose(self, there: Sequence[Traveller]) -> tuple[FusedRows, LayerCalls]:
        batches = [one for one in there if isinstance(one, InferenceBatch)]
        windows = [one for one in there if isinstance(one, ForwardWindow)]
        parts: list[BatchPart] = [batch.part for batch in batches]
        answering, training = list[AdapterRows](), list[AdapterRows]()
        start = 0
        for batch in batches:
            for rows, bypasses in batch.adapters:
                answering.append((slice(start + rows.start, start + rows.stop), bypasses))
            start += batch.hidden.shape[1]
        if windows:
            check = int if batches else self._pause.check  # answers share the layer
            parts.append(KeptRows([(window.store, window.window) for window in windows], check))
        for window in windows:
            for count, own in parted(window.bypasses, window.window.rows):
                training.append((slice(start, start + count), own))
                start += count
        slots = [slots for batch in batches for slots in batch.slots]
        lora = LoraBatch((), slots) if slots else self.slot_pools.batch(answering)
        lora = lora.with_rows(training)
        padding = batches[0].padding if batches else slice(0, 0)
        fused = FusedRows(parts, lora.rest, lora, not batches, padding)
        return fused, self.base.arguments.concat([one.calls for one in there])

    def _inference_rows(self, segments: Sequence[InferenceSegment]) -> InferenceBatch:
        ordered, decodes = self._ordered(segments)
        tokens, common = self.table.batch(ordered, decodes)
        return self._batch(ordered, tokens, common, adapter_ranges(self.loaded, ordered, common.query_lens))

    def _ordered(self, segments: Sequence[InferenceSegment]) -> tuple[list[InferenceSegment], int]:
        """Decode rows first, then prefill chunks, then rows of offloaded sequences, all ordered so that rows
        of an adapter are adjacent; and the number of decode rows."""
        decodes: list[InferenceSegment] = []
        chunks: list[InferenceSegment] = []
        offloaded: list[InferenceSegment] = []
        for segment, is_decode in zip(segments, self.table.decoding(segments), strict=True):
            group = offloaded if segment.offloaded else decodes if is_decode else chunks
            group.append(segment)
        ordered = [segment for group in (decodes, chunks, offloaded) for segment in self._by_kind(group)]
        return ordered, len(decodes)

    def _batch(
        self,
        segments: Sequence[InferenceSegment],
        tokens: Tensor,
        common: CommonAttentionMetadata,
        adapters: list[tuple[slice, Bypasses]],
    ) -> InferenceBatch:
        hidden, calls = self._embed(tokens, common.positions, adapters)
        states = self._states(segments, common)
        part = self._part(segments, common, hidden.shape[1], states)
        layers = range(self.base.depth)
        return InferenceBatch(
            segments, common.query_lens, hidden, part, calls, adapters, layers, states=states
        )

    def _states(
        self, segments: Sequence[InferenceSegment], common: CommonAttentionMetadata
    ) -> PassStates | None:
        """The rows' states in recurrent layers."""
        return self.table.pass_states(segments, common)

    def _part(
        self,
        segments: Sequence[InferenceSegment],
        common: CommonAttentionMetadata,
        count: int,
        states: PassStates | None,
    ) -> InferenceRows | SplitRows:
        """The rows' attention: to pages on the device, and elsewhere for the last segments if they are
        offloaded."""
        elsewhere = [s for s in segments if s.offloaded]
        if not elsewhere or self._offloaded is None:
            return InferenceRows(self.attention, common, count, states)
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
        if not any([segment.adapter for segment in segments]):
            return segments
        return sorted(segments, key=lambda segment: self._kind(segment.adapter))

    def _kind(self, adapter: str | None) -> tuple[int, str]:
        """Sort key of an adapter's rows, so that rows multiplied together are adjacent."""
        return (
            (-1, "")
            if adapter is None
            else (self.slot_pools.order(self.loaded.find(adapter).bypasses), adapter)
        )

    def _decodes(self, segment: InferenceSegment) -> bool:
        return self.table.decoding([segment])[0]
