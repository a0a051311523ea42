"""Sampling parameters of each request, as columns of device buffers.

One column per slot, so that a batch is served by indexing and never by a loop over its rows. Rare parameters
(biases, suppressed tokens, penalties) are stored only for their slots, which the host knows: without such
slots nothing is computed.
"""

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError
from coserve.kernels.native.draw import DrawColumns
from coserve.model.banned import BannedSequences
from coserve.model.grammar import Grammar, Grammars, Matcher

COLDEST = 1e-5  # lower temperatures are greedy: logits divided by them would leave float32's range
NO_ROW = -1


class _Entries:
    """A ragged set of (slot, token, value): biases and suppressed tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[int, list[tuple[int, float]]] = {}
        self._packed: tuple[Tensor, Tensor, Tensor] | None = None  # slots, tokens, values; None if outdated

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, slot: int) -> bool:
        return slot in self._of

    def put(self, slot: int, entries: list[tuple[int, float]]) -> None:
        """Replaces the entries of `slot`."""
        if not entries and slot not in self._of:
            return
        self._of.pop(slot, None)
        if entries:
            self._of[slot] = entries
        self._packed = None

    def _pack(self) -> tuple[Tensor, Tensor, Tensor]:
        flat = [(slot, token, value) for slot, entries in self._of.items() for token, value in entries]
        slots, tokens, values = zip(*flat, strict=True) if flat else ((), (), ())
        return (
            torch.tensor(slots, dtype=torch.long, device=self._device),
            torch.tensor(tokens, dtype=torch.long, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )

    def match(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, values), each [E], of the entries that `slots` [B] have."""
        if self._packed is None:
            self._packed = self._pack()
        own, tokens, values = self._packed
        rows, entries = (slots[:, None] == own[None, :]).nonzero(as_tuple=True)
        return rows, tokens[entries], values[entries]


class SamplingTable:
    """Sampling parameters of `capacity` slots, on `device`; a slot is free, or belongs to one request.

    Every buffer has shape [capacity]; `tail` is 1 - top_p, or negative without a top-p, and `floor` is the
    logarithm of min_p. Token counts, [V] per slot, are kept for penalised slots only. `eos_ids` end an answer
    of this base and are suppressed below `min_tokens`, unless ignored. `grammars` compiles answers' grammars;
    None without a tokenizer.
    """

    def __init__(
        self,
        capacity: int,
        vocab: int,
        eos_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        grammars: Grammars | None = None,
    ) -> None:
        self.capacity, self.vocab = capacity, vocab
        self.eos_ids = tuple(eos_ids)
        self.device = torch.device(device)
        # Stacked, so that setting a slot is two copies to the device and not ten.
        self._floats = torch.zeros(6, capacity, dtype=torch.float32, device=self.device)
        self._ints = torch.zeros(4, capacity, dtype=torch.long, device=self.device)
        self.temperature, self.tail, self.floor, self.repetition, self.presence, self.frequency = self._floats
        self.seed, self.top_k, self.first_end, self.count_row = self._ints
        self.columns = DrawColumns(self.temperature, self.tail, self.floor, self.seed, self.top_k)
        self._biases = _Entries(self.device)
        self._held = _Entries(self.device)
        self._rows: dict[int, int] = {}  # penalised slot -> its row of counts
        self._free_rows: list[int] = []
        self.grammars = grammars
        self._matchers: dict[int, Matcher] = {}  # of slots whose answer must match a grammar
        self._banned: dict[int, BannedSequences] = {}  # of slots with words of several tokens
        self._generated = torch.zeros(0, vocab, dtype=torch.int32, device=self.device)
        self._prompted = torch.zeros(0, vocab, dtype=torch.bool, device=self.device)
        self.drawing: set[int] = set()  # slots that do not take the likeliest token
        self.limited: set[int] = set()  # of these, with a top-k
        self.nucleus: set[int] = set()  # with a top-p
        self.floored: set[int] = set()  # with a min-p
        self.logprobs: dict[int, int] = {}  # slots with log-probabilities -> number of alternatives

    @property
    def is_plain(self) -> bool:
        """Tells whether no slot changes its logits: no bias, penalty or suppressed token."""
        return not (self._biases or self._held or self._rows or self._matchers or self._banned)

    def are_plain(self, slots: Collection[int]) -> bool:
        """Tells whether these change no logits, draw from all tokens if at all, and have no
        log-probabilities."""
        narrowed = (self.limited, self.nucleus, self.floored, self.logprobs)
        kinds = self._biases, self._held, self._rows, self._matchers, self._banned, *narrowed
        return not any(slot in kind for kind in kinds if kind for slot in slots)

    def set(
        self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Gives `slot` to a request. `output` are its answer's tokens so far (after a preemption)."""
        assert 0 <= slot < self.capacity, f"sampling slot {slot} is not one of {self.capacity}"
        check_sampling(params, self.vocab, self.grammars)
        self.clear(slot)
        self._set_draw(slot, params)
        row = self._count(slot, prompt, output) if _is_penalised(params) else NO_ROW
        tail = 1.0 - params.top_p if params.top_p < 1.0 else -1.0  # in double, as transformers computes it
        temperature = params.temperature if slot in self.drawing else 0.0
        floor = math.log(params.min_p) if params.min_p else -math.inf
        floats = (temperature, tail, floor, params.repetition_penalty, params.presence_penalty,
                  params.frequency_penalty)  # fmt: skip
        top_k = params.top_k if params.top_k < self.vocab else 0
        ints = (_signed(seed), top_k, len(prompt) + params.min_tokens, row)
        self._floats[:, slot] = torch.tensor(floats, dtype=torch.float32, device=self.device)
        self._ints[:, slot] = torch.tensor(ints, dtype=torch.long, device=self.device)
        self._biases.put(slot, list(params.logit_bias.items()))
        if params.min_tokens > 0:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
            self._held.put(slot, [(token, -torch.inf) for token in sorted(ends)])
        if params.grammar is not None and self.grammars is not None:
            self._matchers[slot] = self.grammars.matcher(params.grammar, output)
        if params.banned:
            self._banned[slot] = BannedSequences(params.banned, output)
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs

    def clear(self, slot: int) -> None:
        """Frees `slot` and its parameters."""
        for kind in (self.drawing, self.limited, self.nucleus, self.floored):
            kind.discard(slot)
        self.logprobs.pop(slot, None)
        self._matchers.pop(slot, None)
        self._banned.pop(slot, None)
        self._biases.put(slot, [])
        self._held.put(slot, [])
        if (row := self._rows.pop(slot, None)) is not None:
            self._free_rows.append(row)
        self.temperature[slot] = 0.0
        self.count_row[slot] = NO_ROW

    def recording(self, slots: Tensor, tokens: Tensor) -> Callable[[], None]:
        """A function that records `tokens` [B] as output of `slots` [B], for what follows from earlier
        tokens. All memory that it takes it has already."""
        followers = [kind for kind in (self._matchers, self._banned) if kind]
        told = [*zip(slots.tolist(), tokens.tolist(), strict=True)] if followers else []
        advances = [(kind[slot], token) for kind in followers for slot, token in told if slot in kind]
        places = ones = None
        if self._rows:
            rows = self.count_row[slots]
            counted = (rows >= 0).nonzero().squeeze(1)
            places = rows[counted] * self.vocab + tokens[counted]
            ones = torch.ones_like(places, dtype=torch.int32)

        def record() -> None:
            for follower, token in advances:
                follower.advance(token)
            if places is not None and ones is not None:
                self._generated.view(-1).scatter_add_(0, places, ones)

        return record

    def adjusted(
        self, logits: Tensor, slots: Tensor, positions: Tensor, ahead: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """`logits` [B, V] with bias, penalties, and suppressed tokens (including those a grammar forbids); a
        copy if changed. Each row may have tokens `ahead`, which count as recorded."""
        if self.is_plain:
            return logits
        logits = logits.clone()
        if self._biases:
            rows, tokens, values = self._biases.match(slots)
            logits[rows, tokens] += values
        if self._rows:
            self._penalise(logits, slots, ahead)
        if self._held:
            rows, tokens, values = self._held.match(slots)
            early = (positions[rows] < self.first_end[slots[rows]]).nonzero().squeeze(1)
            logits[rows[early], tokens[early]] = values[early]
        for row, slot in enumerate(slots.tolist() if self._matchers or self._banned else ()):
            before = ahead[row] if ahead else ()
            if slot in self._banned and (tokens_left_out := self._banned[slot].next(before)):
                logits[row, tokens_left_out] = -torch.inf
            if slot in self._matchers:
                allowed = self._matchers[slot].allowed(self.vocab, self.device, before)
                logits[row].masked_fill_(~allowed, -torch.inf)
        return logits

    def _penalise(self, logits: Tensor, slots: Tensor, ahead: Sequence[Sequence[int]] = ()) -> None:
        """Repetition as transformers defines it, presence and frequency as OpenAI does; in place."""
        rows = (self.count_row[slots] >= 0).nonzero().squeeze(1)
        slots = slots[rows]
        counts = self._generated[self.count_row[slots]]
        if ahead:  # a draft may be a token of the prompt that no answer can have
            told = [
                (i, token)
                for i, row in enumerate(rows.tolist())
                for token in ahead[row]
                if token < self.vocab
            ]
            places = torch.tensor(told, dtype=torch.long, device=self.device).reshape(-1, 2).T
            counts.index_put_((places[0], places[1]), counts.new_ones(len(told)), accumulate=True)
        seen = (counts > 0) | self._prompted[self.count_row[slots]]
        repetition = self.repetition[slots, None]
        scores = logits[rows]
        scores = torch.where(seen, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
        scores -= self.frequency[slots, None] * counts + self.presence[slots, None] * (counts > 0)
        logits[rows] = scores

    def _set_draw(self, slot: int, params: SamplingParams) -> None:
        if params.temperature < COLDEST:
            return
        self.drawing.add(slot)
        if 0 < params.top_k < self.vocab:
            self.limited.add(slot)
        if params.top_p < 1.0:
            self.nucleus.add(slot)
        if params.min_p > 0.0:
            self.floored.add(slot)

    def _count(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Allocates the row of token counts for `slot`; rows are doubled when none is free."""
        if not self._free_rows:
            old, more = len(self._generated), max(len(self._generated), 1)
            for table in (self._generated, self._prompted):
                if table.device.type == "cuda":  # else the stream that made it may reuse its memory at once
                    table.record_stream(torch.cuda.current_stream(table.device))
            self._generated, self._prompted = (  # both or, where memory runs out, neither
                torch.cat([table, table.new_zeros(more, self.vocab)])
                for table in (self._generated, self._prompted)
            )
            self._free_rows = list(range(old, old + more))
        row = self._rows[slot] = self._free_rows.pop()
        # Embeddings can be larger than the head: a prompt may hold tokens that no answer ever can.
        known = [token for token in set(prompt) if token < self.vocab]
        self._prompted[row] = False
        self._prompted[row, torch.tensor(known, dtype=torch.long, device=self.device)] = True
        answered = torch.tensor(output, dtype=torch.long, device=self.device)
        counts = self._generated[row].zero_()
        counts.index_add_(0, answered, torch.ones_like(answered, dtype=torch.int32))
        return row


def check_sampling(
    params: SamplingParams, vocabulary: int, grammars: Grammars | None, output: Sequence[int] = ()
) -> Grammar | None:
    """Raises ConfigError where the request names tokens outside of `vocabulary`, RequestError where its
    grammar is invalid or does not match the answer so far, `output`. Thread-safe. Returns the grammar, which
    is not compiled again while a reference to it exists."""
    grammar = None
    if params.grammar is not None:
        if grammars is None:
            raise ConfigError("grammars need a tokenizer, and the engine was given none")
        grammar = grammars.check(params.grammar, output)
    named = params.logit_bias, params.stop_token_ids, [token for one in params.banned for token in one]
    for name, tokens in zip(("logit_bias", "stop_token_ids", "banned"), named, strict=True):
        if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
            raise ConfigError(f"sampling.{name} names token {unknown[0]}; the model has {vocabulary}")
    return grammar


def _is_penalised(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _signed(seed: int) -> int:
    """`seed` modulo 2**64 as int64."""
    return (seed + 2**63) % 2**64 - 2**63
