"""Running sequences on the device: their last tokens and block tables, read by indexing."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend, CommonAttentionMetadata, PageCopy
from coserve.attention.states import PassStates, StateStore
from coserve.core.plan import InferenceSegment, StateMove
from coserve.core.request import Request
from coserve.core.sequence import Sequence as Answer
from coserve.errors import CoserveError, TogetherFailed
from coserve.kernels.row_tiles import RowTiles
from coserve.memory.exhausted import failing_alone, shared
from coserve.model.sampling_table import SamplingTable

NEWEST: Final = -1  # in place of a token that only the device knows: its sequence's newest


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of a pass as a graph reads them: `lines` of the table, `positions`, and, with prompts among
    them, `tokens`, which may be `NEWEST`, and `tiles`. Decode rows alone have `pages` at most, and `ends`
    where the graph samples: the positions of the tokens in their sequences, some of which it `draws`. [rows]
    each."""

    lines: Tensor
    positions: Tensor
    pages: int = 0
    tokens: Tensor | None = None
    tiles: RowTiles | None = None
    ends: Tensor | None = None
    draws: bool = False


class SequenceTable:
    """One row per running sequence: its last token, block table and sampling parameters.

    Its tokens follow its adapter's virtual tokens. The pages that it shares with other sequences come first
    in its block table and are only read; virtual tokens that do not fill a page are copied into its first own
    page.

    `states` has the states of recurrent layers by the same rows. They need no cleaning: a sequence begins
    without.

    A sequence gets its row with the plan that first names it and loses it when its key is released: when it
    ended, or was preempted, after which a later plan names it anew.
    """

    def __init__(
        self,
        capacity: int,
        max_pages: int,
        attention: AttentionBackend[Any],
        sampling: SamplingTable,
        states: StateStore | None = None,
    ) -> None:
        device = sampling.device
        self.capacity = self.padding_row = capacity  # a row of no sequence, which has no pages
        self.most_pages = max_pages
        self.sampling, self.states = sampling, states
        self._attention = attention
        self._last_token = torch.zeros(capacity + 1, dtype=torch.long, device=device)
        self._block_table = torch.full(
            (capacity + 1, max_pages), attention.padding_page, dtype=torch.long, device=device
        )
        self._answers: dict[int, Answer] = {}  # as far as plans have told of them
        self._rows: dict[int, int] = {}  # of these, by key
        self.scored: set[int] = set()  # keys of those whose prompts are to be scored
        self.pooled: set[int] = set()  # or give an embedding
        self._free = list(range(capacity - 1, -1, -1))

    def __getitem__(self, key: int) -> Answer:
        return self._answers[key]

    def decoding(self, segments: Sequence[InferenceSegment]) -> list[bool]:
        """Tells of each segment whether it is a decode row, of pages on the device."""
        answers = self._answers
        return [answers[one.key].decodes(one.start) and not (one.offloaded or one.drafts) for one in segments]

    def __contains__(self, key: int) -> bool:
        return key in self._answers

    def extend(self, segments: Iterable[InferenceSegment]) -> dict[int, CoserveError]:
        """Adds rows for the sequences that a plan names first, and appends its new pages to their block
        tables: once, however often the plan's rows are run again for lack of memory. Returns, by key, the
        errors of sequences that fail here: their rows give nothing that counts."""
        lost: dict[int, CoserveError] = {}
        grown: list[InferenceSegment] = []
        for segment in segments:
            if segment.request is not None:
                self._name(segment.key, segment.request)
                with failing_alone("the request", partial(lost.__setitem__, segment.key)):
                    self._enter(segment.key, segment.request)
            if segment.new_pages and not segment.offloaded:
                self._answers[segment.key].pages += segment.new_pages
                grown.append(segment)
        try:
            with shared():
                self._give_pages(grown)
        except TogetherFailed:
            for segment in grown:
                with failing_alone("the request", partial(lost.__setitem__, segment.key)):
                    self._give_pages([segment])
        return lost

    def _give_pages(self, segments: Iterable[InferenceSegment]) -> None:
        """Lists the segments' new pages in the block table and prepares them."""
        fresh: list[int] = []
        copies: list[PageCopy] = []
        for segment in segments:
            known = len(self._answers[segment.key].pages)
            new = slice(known - len(segment.new_pages), known)
            self._block_table[self._rows[segment.key], new] = self._tensor(segment.new_pages)
            own = segment.new_pages[segment.filled :]
            fresh += own
            if segment.template is not None:
                begun = segment.context % self._attention.page_size
                copies.append(PageCopy(segment.template, own[0], begun))
        if fresh:
            self._attention.clean(fresh)
        self._attention.copy(copies)

    def rows(self, segments: Iterable[InferenceSegment]) -> Tensor:
        """The segments' rows [segments]."""
        return self._tensor(self.places(segments))

    def places(self, segments: Iterable[InferenceSegment]) -> list[int]:
        """The same as numbers on the host."""
        return [self._rows[segment.key] for segment in segments]

    def release(self, key: int) -> str | None:
        """Frees the row of a sequence, and returns the key of its adapter; keys that never had a row
        (training's) are ignored."""
        answer = self._answers.pop(key, None)
        if answer is None:
            return None
        row = self._rows.pop(key)
        self._block_table[row] = self._attention.padding_page
        self.sampling.clear(row)
        self.scored.discard(key)
        self.pooled.discard(key)
        self._free.append(row)
        return answer.request.adapter

    def batch(
        self, segments: Sequence[InferenceSegment], num_decodes: int
    ) -> tuple[Tensor, CommonAttentionMetadata]:
        """Tokens [rows] of the segments, and their attention metadata. The newest tokens of the first
        `num_decodes` are read on the device."""
        rows = self.rows(segments)
        query_lens = [segment.length for segment in segments]
        seq_lens = [segment.context + segment.length for segment in segments]
        pages = -(-max(seq_lens) // self._attention.page_size)
        tokens = self._last_token[rows[:num_decodes]]
        positions, known = self.known(segments, num_decodes)
        if len(segments) > num_decodes:
            tokens = torch.cat([tokens, self._tensor(known[num_decodes:])])
        block_table = self._block_table[rows, :pages]
        common = CommonAttentionMetadata(
            block_table, self._tensor(positions), query_lens, seq_lens, num_decodes
        )
        return tokens, common

    def begin_states(self, moves: Iterable[StateMove]) -> None:
        """Has sequences begin with states that were kept."""
        for move in moves:
            if self.states is not None and not move.keeps:
                self.states.begin(self._rows[move.key], move.slot)

    def keep_states(
        self, moves: Iterable[StateMove], segments: Iterable[InferenceSegment], leaving: bool = False
    ) -> None:
        """Keeps states of the segments' sequences; where they are `leaving`, of all others, which are
        preempted."""
        here = {segment.key for segment in segments} if self.states is not None else ()
        for move in moves:
            if self.states is not None and move.keeps and (move.key in here) is not leaving:
                self.states.keep(self._rows[move.key], move.slot)

    def pass_states(
        self,
        segments: Sequence[InferenceSegment],
        common: CommonAttentionMetadata,
        by_rows: bool = False,
        begun: Container[int] = (),
    ) -> PassStates | None:
        """The segments' states in recurrent layers, for one pass; None where the base has no such layers. See
        `PassStates`, which has lines where this has rows of the table."""
        if self.states is None:
            return None
        places = self.places(segments)
        return PassStates(self.states, places, common.query_lens, common.seq_lens, by_rows, begun)

    def known(self, segments: Sequence[InferenceSegment], num_decodes: int) -> tuple[list[int], list[int]]:
        """Positions and tokens of the segments' rows on the host, where the first `num_decodes` tokens are
        `NEWEST`."""
        positions, tokens = list[int](), [NEWEST] * num_decodes
        for s in segments:
            positions += range(s.context, s.context + s.length)
        for s in segments[num_decodes:]:
            tokens += self._answers[s.key].tokens(s.start, s.length, s.drafts)
        return positions, tokens

    def read(self, rows: DeviceRows) -> tuple[Tensor, CommonAttentionMetadata]:
        """As `batch`, of rows that a graph reads. Reads the device alone."""
        newest, count = self._last_token[rows.lines], len(rows.lines)
        lens = [1] * count
        if rows.tokens is not None:
            tokens = torch.where(rows.tokens == NEWEST, newest, rows.tokens)
            return tokens, CommonAttentionMetadata(
                self._block_table, rows.positions, lens, lens, count, rows.tiles
            )
        most, table = rows.pages * self._attention.page_size, self._block_table[rows.lines, : rows.pages]
        return newest, CommonAttentionMetadata(table, rows.positions, lens, [most] * count, count)

    def sampled(self, keys: Sequence[int], rows: Tensor, tokens: Tensor) -> list[int]:
        """Appends tokens [n] to the sequences `keys` at `rows` [n], and returns them. A sequence may have
        several, in order. One that has
        none (`NO_TOKEN`) goes on with token 0 until the scheduler has ended it. Where memory runs out nothing
        has changed."""
        drawn: list[int] = tokens.tolist()
        record = self.sampling.recording(rows, tokens.clamp(min=0))
        last = list({key: index for index, key in enumerate(keys)}.values())
        if len(last) < len(keys):  # several of one sequence
            index = self._tensor(last)
            rows, tokens = rows[index], tokens[index]
        self.put_newest(rows, tokens)
        record()
        self.append(keys, drawn)
        return drawn

    def shrink(self, key: int) -> None:
        """Lists no pages of a sequence beyond those for its tokens, as drafts have not held. They may be
        another's now."""
        answer = self._answers[key]
        kept = -(-(answer.virtual + answer.length) // self._attention.page_size)
        if len(answer.pages) > kept:
            del answer.pages[kept:]
            self._block_table[self._rows[key], kept:] = self._attention.padding_page

    def put_newest(self, rows: Tensor, tokens: Tensor) -> None:
        """Puts the sequences' newest tokens on the device, 0 for those without one."""
        self._last_token.index_copy_(0, rows, tokens.clamp(min=0))

    def append(self, keys: Sequence[int], tokens: Sequence[int]) -> None:
        """Appends tokens to the sequences on the host."""
        for key, token in zip(keys, tokens, strict=True):
            self._answers[key].output.append(max(token, 0))

    def expect(self, keys: Sequence[int]) -> list[tuple[list[int], int]]:
        """Appends a token that only the device will know to each sequence; returns their outputs, and its
        places there."""
        outputs = [self._answers[key].output for key in keys]
        places = [(output, len(output)) for output in outputs]
        for output in outputs:
            output.append(0)
        return places

    def lengths(self, keys: Sequence[int]) -> list[int]:
        """Number of tokens known of each sequence, which is also the position of the next sampled one."""
        return [self._answers[key].length for key in keys]

    def _name(self, key: int, request: Request) -> None:
        assert key not in self._answers, "a sequence is named once"
        self._answers[key] = Answer(key, request, [*request.continued])
        self._rows[key] = self._free.pop()
        if request.sampling.prompt_logprobs is not None:
            self.scored.add(key)
        if request.sampling.pooling is not None:
            self.pooled.add(key)

    def _enter(self, key: int, request: Request) -> None:
        row, output, params = self._rows[key], request.continued, request.sampling
        if output:
            self._last_token[row] = output[-1]
        assert params.seed is not None, "a seed is drawn when the request is made"
        self.sampling.set(row, params, params.seed, request.prompt, output)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        # A copy that blocks would wait for all that runs; what it reads is copied aside at once.
        return torch.tensor(values, dtype=torch.long).to(self._last_token.device, non_blocking=True)
