"""Descriptors of running sequences, on the device: a step reads them by indexing, never row by row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.core.plan import InferenceSegment, SequenceStart
from coserve.memory.kv import DecodeRows, KVPool
from coserve.model.sampling_table import SamplingTable


@dataclass(slots=True)
class SequenceState:
    """Host state of a running sequence: its row, its tokens, the length of its block table."""

    start: SequenceStart
    row: int
    tokens: list[int]  # all that are known, prompt and answer
    pages: int = 0

    @property
    def length(self) -> int:
        """Tokens known, virtual ones apart."""
        return len(self.tokens)

    def is_newest(self, segment: InferenceSegment) -> bool:
        """Tells whether a segment is a decode row: only the newest token of an answer that has begun."""
        return segment.start == self.length - 1 >= len(self.start.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill segment's rows: tokens, positions and cache slots [rows]; pages [n] of all up to its end.
    The first of the rows is at position `start`."""

    start: int
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    pages: Tensor


class SequenceTable:
    """One row per running sequence: its last token, its length, its page table, how it is sampled.

    Its tokens stand after the virtual ones of its adapter. The pages that it shares with others come first in
    its page table and are only read; what of them does not fill a page is copied to where it goes on itself.

    A sequence gets its row with the plan that first names it and loses it when its key is released (it
    ended, or was preempted; then a later plan names it anew).
    """

    def __init__(self, capacity: int, max_pages: int, pool: KVPool, sampling: SamplingTable) -> None:
        device = sampling.device
        self.capacity = capacity
        self.sampling = sampling
        self._pool = pool
        self._last_token = torch.zeros(capacity, dtype=torch.long, device=device)
        self._length = torch.zeros(capacity, dtype=torch.long, device=device)
        self._virtual = torch.zeros(capacity, dtype=torch.long, device=device)
        self._pages = torch.full((capacity, max_pages), pool.padding_page, dtype=torch.long, device=device)
        self._states: dict[int, SequenceState] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def __getitem__(self, key: int) -> SequenceState:
        return self._states[key]

    def start(self, sequences: Iterable[SequenceStart]) -> None:
        """Gives rows to sequences that a plan names for the first time."""
        for sequence in sequences:
            self._enter(sequence)

    def extend(self, segments: Iterable[InferenceSegment]) -> None:
        """Appends a plan's new pages to the block tables of its sequences: once, however often rows of the
        plan are run again for want of memory."""
        fresh: list[int] = []
        entering: list[tuple[SequenceStart, int]] = []
        for segment in segments:
            if not segment.new_pages:
                continue
            state = self._states[segment.key]
            start, known, end = state.start, state.pages, state.pages + len(segment.new_pages)
            self._pages[state.row, known:end] = self._tensor(segment.new_pages)
            state.pages = end
            own = segment.new_pages[max(start.shared - known, 0) :]
            fresh += [page for page in own if page != start.template]
            if not known and start.template is not None and own[0] != start.template:
                entering.append((start, own[0]))
        if fresh:
            self._pool.clean(self._tensor(fresh))
        self._copy_templates(entering)

    def rows(self, segments: Iterable[InferenceSegment]) -> Tensor:
        """Rows [segments] of their sequences."""
        return self._tensor([self._states[segment.key].row for segment in segments])

    def release(self, key: int) -> None:
        """Frees the row of a sequence; keys that never had one (training's) are ignored."""
        state = self._states.pop(key, None)
        if state is not None:
            self._pages[state.row] = self._pool.padding_page
            self.sampling.clear(state.row)
            self._free.append(state.row)

    def decode(self, rows: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor, DecodeRows]:
        """(tokens, positions, cache slots, page descriptors); no sequence takes up more than `longest`
        positions."""
        positions = self._virtual[rows] + self._length[rows] - 1
        pages = self._pages[rows, : -(-longest // self._pool.page_size)]
        return (
            self._last_token[rows],
            positions,
            self._slots(pages, positions),
            DecodeRows(pages.flatten(), positions + 1),
        )

    def prefill(self, segment: InferenceSegment, row: Tensor) -> Chunk:
        """The rows of one prefill segment of the sequence at `row` []."""
        end = segment.context + segment.length
        known = self._states[segment.key].tokens
        tokens = self._tensor(known[segment.start : segment.start + segment.length])
        positions = torch.arange(segment.context, end, device=tokens.device)
        pages = self._pages[row, : -(-end // self._pool.page_size)]
        slots = self._slots(pages.expand(len(tokens), -1), positions)
        return Chunk(segment.context, tokens, positions, slots, pages)

    def sampled(self, keys: Sequence[int], rows: Tensor, tokens: Tensor) -> list[int]:
        """Records tokens [n] as the next ones of the sequences `keys` at `rows` [n], and returns them."""
        self._last_token[rows] = tokens
        self._length[rows] += 1
        self.sampling.record(rows, tokens)
        drawn: list[int] = tokens.tolist()
        for key, token in zip(keys, drawn, strict=True):
            self._states[key].tokens.append(token)
        return drawn

    def lengths(self, rows: Tensor) -> Tensor:
        """Tokens known of each row; also the place, among them, of the one to be sampled next."""
        return self._length[rows]

    def _enter(self, sequence: SequenceStart) -> None:
        assert sequence.key not in self._states, "a sequence is named once"
        row, tokens = self._free.pop(), [*sequence.prompt, *sequence.output]
        self._states[sequence.key] = SequenceState(sequence, row, tokens)
        self._length[row] = len(tokens)
        self._virtual[row] = sequence.virtual
        if sequence.output:
            self._last_token[row] = sequence.output[-1]
        params = sequence.sampling
        assert params.seed is not None, "a seed is drawn when the request is made"
        self.sampling.set(row, params, params.seed, sequence.prompt, sequence.output)

    def _copy_templates(self, entering: Iterable[tuple[SequenceStart, int]]) -> None:
        """Copies the part of a template page that a sequence begins with into the sequence's first own
        page."""
        size = self._pool.page_size
        sources: list[int] = []
        targets: list[int] = []
        for start, page in entering:
            assert start.template is not None
            rest = (start.virtual + start.computed) % size
            sources += range(start.template * size, start.template * size + rest)
            targets += range(page * size, page * size + rest)
        if sources:
            self._pool.copy(self._tensor(sources), self._tensor(targets))

    def _slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        size = self._pool.page_size
        return pages.gather(1, (positions // size)[:, None]).squeeze(1) * size + positions % size

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._last_token.device)
