"""One block instance of a worker: the block's layers, keys and values of a scheduler's sequences in them, and
its adapters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.lora_batch import LoraBatch
from coserve.adapters.sites import Site
from coserve.adapters.slot_pools import LoraSlotPools
from coserve.attention.backend import CommonAttentionMetadata, InferenceRows, PageCopy
from coserve.attention.paged import make_batched
from coserve.cluster.blocks import BlockShards, merged_sites
from coserve.cluster.messages import LoadBlock, MovedState, PassRows, RowSegment, StateStep, TrainRows
from coserve.cluster.returning import Trained, trained
from coserve.cluster.states import BlockStates
from coserve.errors import ConfigError, RequestError
from coserve.executors.codec import Codec
from coserve.executors.executor import LoadAdapter
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.together import linears_together
from coserve.worker.inference import InferenceBatch


@dataclass(frozen=True, eq=False)
class ArrivedRows:
    """Rows [rows, width] that came with a message, for its first hop."""

    message: PassRows
    hidden: Tensor


class OpenBlock:
    """An instance: its number is its scheduler's. Adapters and pages are changed by one thread at a time, as
    the worker has it."""

    def __init__(self, base: Base, content: str, asked: LoadBlock) -> None:
        """Raises ConfigError where the keys and values do not fit into memory."""
        span = range(asked.first, asked.last)
        self.base, self.content, self.span = base, content, span
        self._shards = BlockShards(base.sites, span, base.depth)
        try:
            pages = asked.pages + asked.spare
            self.attention = make_batched(base.caches, pages, asked.page_size, base.dtype, base.device)
            self.states = BlockStates(base.mixers, asked, base.device) if base.mixers else None
        except RuntimeError as error:  # torch is out of memory
            raise ConfigError(
                f"keys and values of {asked.pages * asked.page_size} tokens, and states of {asked.sequences} "
                "sequences, do not fit into the worker's memory"
            ) from error
        self._spare = range(asked.pages, asked.pages + asked.spare)
        self._slots = LoraSlotPools(linears_together(base), asked.sequences, base.device)
        self.loaded = LoadedAdapters(lambda version: self._slots.forget(version.bypasses))

    def tell_sites(self, sites: Sequence[Site]) -> None:
        """Notes the sites of the whole model."""
        self.base.sites = merged_sites(self.base.modules.paths, [sites])
        self._shards = BlockShards(self.base.sites, self.span, self.base.depth)

    def hold(self, adapter: bytes) -> None:
        """Holds the part of an adapter version that is in this block. Raises AdapterError."""
        base = self.base
        command = Codec(base.frame, base.dtype, base.device).decode_command(adapter)
        if not isinstance(command, LoadAdapter):
            raise RequestError("an instance holds adapters, and nothing else")
        part = self._shards.cut(command.adapter)
        _ = part.bypasses  # computed here, not in the first pass with its rows
        self.loaded.add(part)

    @torch.no_grad()
    def run(self, arrived: Sequence[ArrivedRows]) -> list[Tensor]:
        """Takes the rows of several messages through the block in one pass; returns them message by message.
        Raises RequestError for pages and states that this instance has not, and AdapterNotFound."""
        self._clean(arrived)
        found = [(one.hidden, place, segment) for one in arrived for place, segment in _placed(one.message)]
        every = [step for one in arrived for step in self._steps(one.message)]
        order = sorted(range(len(found)), key=lambda i: (found[i][2].length > 1, found[i][2].adapter))
        segments = [found[i][2] for i in order]
        hidden = torch.cat([found[i][0][found[i][1]] for i in order]).to(self.base.device, self.base.dtype)
        adapters = self._adapters(segments)
        for _, own in adapters:
            self._slots.use(own)
        steps = [every[i] for i in order] if self.states is not None else []
        whole = self._passed(hidden, segments, adapters, self._slots.batch(adapters), steps)
        passed = torch.split(whole, [segment.length for segment in segments])
        back = {i: rows for i, rows in zip(order, passed, strict=True)}
        parts, start = list[Tensor](), 0
        for one in arrived:
            count = len(one.message.segments)
            parts.append(torch.cat([back[start + i] for i in range(count)]))
            start += count
        return parts

    @torch.no_grad()
    def predict(self, arrived: ArrivedRows) -> Tensor:
        """The output that the surrogate of the first hop predicts for rows, one of each of their sequences.
        Keys and values of these rows go to spare pages, behind a copy of the part of a page before them.
        Raises RequestError, and AdapterNotFound."""
        message, size = arrived.message, self.attention.page_size
        if self.states is not None:
            raise RequestError("surrogates predict no block with recurrent layers")
        if len(message.segments) > len(self._spare) or any(one.length > 1 for one in message.segments):
            raise RequestError("a surrogate predicts single rows, as many as there are spare pages")
        segments, copies, surrogate = [], [], message.hops[0].surrogate
        for place, (one, spare) in enumerate(zip(message.segments, self._spare, strict=False)):
            before, own = one.context // size, message.hops[0].pages_of(place, one)
            self._check(own)
            if (tokens := one.context % size) and before < len(own):
                copies.append(PageCopy(own[before], spare, tokens))
            pages = (*own[:before], spare)
            segments.append(RowSegment(one.key, 1, one.context, pages, surrogate))
        self.attention.clean(self._spare[: len(segments)])
        self.attention.copy(copies)
        hidden = arrived.hidden.to(self.base.device, self.base.dtype)
        adapters = self._adapters(segments)
        return self._passed(hidden, segments, adapters, LoraBatch(adapters))

    def train(self, message: TrainRows, tensors: Sequence[Tensor]) -> Iterator[Trained | None]:
        """Takes training rows through layers, one at each step, after which it gives None; at last it gives
        the reply and its tensors. Raises RequestError for rows of other layers or shapes, and
        AdapterNotFound."""
        return trained(self.base, self.span, self._version(message.adapter), message, tensors)

    def read_state(self, moved: MovedState) -> Tensor:
        """The bytes [1, bytes] of a sequence's states. Raises RequestError where they are not there."""
        return self._held_states.read(moved)

    def write_state(self, moved: MovedState, data: Tensor) -> None:
        """Takes states that `read_state` of another instance gave. Raises RequestError."""
        self._held_states.write(moved, data)

    @property
    def state_nbytes(self) -> tuple[int, int]:
        """Bytes of all states, and of one sequence's."""
        return (0, 0) if self.states is None else (self.states.nbytes, self.states.state_nbytes)

    @property
    def _held_states(self) -> BlockStates:
        if self.states is None:
            raise RequestError("this instance has no recurrent layers")
        return self.states

    def _steps(self, message: PassRows) -> Sequence[StateStep]:
        """The steps of a message's states. Raises RequestError where it has others than this block needs."""
        steps = message.hops[0].states
        if len(steps) != (0 if self.states is None else len(message.segments)):
            raise RequestError(f"{len(steps)} states for {len(message.segments)} sequences in this block")
        return steps

    def _version(self, key: str) -> AdapterVersion:
        return self.loaded.find(key) if key else AdapterVersion("", 0, ())

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """The bytes of pages [pages, bytes]. Raises RequestError."""
        self._check(pages)
        into = torch.empty(len(pages), self.attention.page_nbytes, dtype=torch.uint8, device=self.base.device)
        self.attention.read_pages(pages, into)
        return into.cpu()

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        """Fills pages with bytes that `read_pages` of another instance gave. Raises RequestError."""
        self._check(pages)
        if tuple(data.shape) != (len(pages), self.attention.page_nbytes) or data.dtype != torch.uint8:
            raise RequestError(f"{tuple(data.shape)} bytes are not those of {len(pages)} pages of this block")
        self.attention.write_pages(pages, data.to(self.base.device))

    def _clean(self, arrived: Sequence[ArrivedRows]) -> None:
        pages = sorted({page for one in arrived for page in one.message.hops[0].clean})
        self._check(pages)
        if pages:
            self.attention.clean(pages)

    def _check(self, pages: Sequence[int]) -> None:
        if pages and max(pages) >= self.attention.padding_page:
            raise RequestError(f"page {max(pages)}, and this instance has {self.attention.padding_page}")

    def _passed(
        self,
        hidden: Tensor,
        segments: Sequence[RowSegment],
        adapters: list[tuple[slice, Bypasses]],
        lora: LoraBatch,
        steps: Sequence[StateStep] = (),
    ) -> Tensor:
        base, rows = self.base, len(hidden)
        states = None if self.states is None else self.states.of_pass(segments, steps)
        common = self._common(segments)
        positions = common.positions
        if missing := base.row_buckets.pad_rows(rows) - rows:
            hidden, positions = F.pad(hidden, (0, 0, 0, missing)), F.pad(positions, (0, missing))
        _, calls = base.prologue(torch.zeros_like(positions), positions)
        part = InferenceRows(self.attention, common, len(hidden), states)
        fused = FusedRows([part], lora.rest, lora, False, slice(rows, len(hidden)))
        batch = InferenceBatch((), common.query_lens, hidden[None], part, calls, adapters, self.span)
        base.chain.forward([batch], self.span, compose=lambda _: (fused, calls))
        if self.states is not None:
            self.states.passed(segments, steps)
        return batch.hidden[0, :rows].cpu()

    def _common(self, segments: Sequence[RowSegment]) -> CommonAttentionMetadata:
        size, device = self.attention.page_size, self.base.device
        ends = [segment.context + segment.length for segment in segments]
        table = torch.full(
            (len(segments), -(-max(ends) // size)), self.attention.padding_page, dtype=torch.long
        )
        for line, (segment, end) in enumerate(zip(segments, ends, strict=True)):
            pages = segment.pages[: -(-end // size)]
            self._check(pages)
            if len(pages) * size < end:
                raise RequestError(f"{len(segment.pages)} pages do not hold {end} positions")
            table[line, : len(pages)] = torch.tensor(pages, dtype=torch.long)
        positions = [torch.arange(segment.context, end) for segment, end in zip(segments, ends, strict=True)]
        decodes = sum(segment.length == 1 for segment in segments)
        return CommonAttentionMetadata(
            table.to(device),
            torch.cat(positions).to(device),
            [segment.length for segment in segments],
            ends,
            decodes,
        )

    def _adapters(self, segments: Sequence[RowSegment]) -> list[tuple[slice, Bypasses]]:
        ranges, start = list[tuple[slice, Bypasses]](), 0
        for key, group in groupby(segments, lambda segment: segment.adapter):
            end = start + sum(segment.length for segment in group)
            if key:
                ranges.append((slice(start, end), self.loaded.find(key).bypasses))
            start = end
        return ranges


def _placed(message: PassRows) -> list[tuple[slice, RowSegment]]:
    """The rows of each segment in its message, with its pages at the first hop."""
    found, start, hop = list[tuple[slice, RowSegment]](), 0, message.hops[0]
    for place, segment in enumerate(message.segments):
        own = structs.replace(segment, pages=hop.pages_of(place, segment))
        found.append((slice(start, start + segment.length), own))
        start += segment.length
    return found


def check_rows(message: PassRows, tensors: Sequence[Tensor], width: int) -> Tensor:
    """The rows of a message. Raises ConnectionError where it has others."""
    rows = sum(segment.length for segment in message.segments)
    if not message.hops or not rows or any(not segment.length for segment in message.segments):
        raise ConnectionError("rows without a segment or a way")
    if len(message.hops[0].pages) not in (0, len(message.segments)):
        raise ConnectionError("rows with the pages of other segments")
    if len(tensors) != 1 or tuple(tensors[0].shape) != (rows, width):
        raise ConnectionError(f"a message of {rows} rows has other tensors")
    return tensors[0]
