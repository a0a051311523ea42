"""Descriptors of running sequences, on the device: a step reads them by indexing, never row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.core.plan import Segment
from coserve.core.sequence import Sequence as Answer
from coserve.memory.kv import DecodeRows, KVPool
from coserve.model.sampling_table import SamplingTable


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

    A sequence gets its row when it first appears in a plan and loses it when its key is released (it
    ended, or was preempted; then it comes back as a fresh row).
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
        self._row_of: dict[int, int] = {}
        self._page_count: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def admit(self, answers: Sequence[Answer]) -> Tensor:
        """Rows [len(answers)] of these sequences, new ones included, with their page tables up to date."""
        entering = [answer for answer in answers if answer.key not in self._row_of]
        fresh: list[int] = []
        for answer in entering:
            self._enter(answer)
        for answer in answers:
            known = self._page_count[answer.key]
            if len(answer.pages) > known:
                row = self._row_of[answer.key]
                self._pages[row, known : len(answer.pages)] = self._tensor(answer.pages[known:])
                self._page_count[answer.key] = len(answer.pages)
                own = answer.pages[max(known, answer.shared) :]
                fresh += [page for page in own if page != answer.template]
        if fresh:
            self._pool.clean(self._tensor(fresh))
        self._copy_templates(entering)
        return self._tensor([self._row_of[answer.key] for answer in answers])

    def release(self, key: int) -> None:
        """Frees the row of a sequence; keys that never had one (training's) are ignored."""
        row = self._row_of.pop(key, None)
        if row is not None:
            del self._page_count[key]
            self._pages[row] = self._pool.padding_page
            self.sampling.clear(row)
            self._free.append(row)

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

    def prefill(self, segment: Segment, row: Tensor) -> Chunk:
        """The rows of one prefill segment of the sequence at `row` []."""
        answer = segment.sequence
        assert isinstance(answer, Answer)
        tokens = self._tensor(answer.tokens(segment.start, segment.length))
        start = answer.virtual + segment.start
        positions = torch.arange(start, start + segment.length, device=tokens.device)
        pages = self._pages[row, : -(-(start + segment.length) // self._pool.page_size)]
        return Chunk(start, tokens, positions, self._slots(pages.expand(len(tokens), -1), positions), pages)

    def sampled(self, rows: Tensor, tokens: Tensor) -> None:
        """Records tokens [n] as the next ones of `rows` [n]."""
        self._last_token[rows] = tokens
        self._length[rows] += 1
        self.sampling.record(rows, tokens)

    def lengths(self, rows: Tensor) -> Tensor:
        """Tokens known of each row; also the place, among them, of the one to be sampled next."""
        return self._length[rows]

    def _enter(self, answer: Answer) -> None:
        row = self._free.pop()
        self._row_of[answer.key] = row
        self._page_count[answer.key] = 0
        self._length[row] = answer.length
        self._virtual[row] = answer.virtual
        if answer.output:
            self._last_token[row] = answer.output[-1]
        params = answer.request.sampling
        assert params.seed is not None, "a seed is drawn when the request is made"
        self.sampling.set(row, params, params.seed, answer.request.prompt, answer.output)

    def _copy_templates(self, answers: Sequence[Answer]) -> None:
        """What a sequence begins with and fills no page, into the first page that is its own."""
        size = self._pool.page_size
        sources: list[int] = []
        targets: list[int] = []
        for answer in answers:
            if answer.template is not None and answer.template != answer.pages[answer.shared]:
                rest = (answer.virtual + answer.computed) % size
                sources += range(answer.template * size, answer.template * size + rest)
                first = answer.pages[answer.shared] * size
                targets += range(first, first + rest)
        if sources:
            self._pool.copy(self._tensor(sources), self._tensor(targets))

    def _slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        size = self._pool.page_size
        return pages.gather(1, (positions // size)[:, None]).squeeze(1) * size + positions % size

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._last_token.device)
