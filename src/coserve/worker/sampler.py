"""Turns the last hidden states of a pass into tokens and log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from msgspec import structs
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.loaded import LoadedAdapters
from coserve.attention.states import PassStates
from coserve.core.plan import InferenceSegment, Sampled, TokenLogprobs
from coserve.errors import CoserveError, RequestError
from coserve.kernels.rows import concat_rows
from coserve.model.base import Base
from coserve.model.sample import NO_TOKEN, sample, sample_plain, token_logprobs
from coserve.wire.scores import little
from coserve.worker.inference import PassedRows, adapter_ranges, outside_layers
from coserve.worker.launched import NO_TOKEN_LEFT, TokensUnderWay
from coserve.worker.sequence_table import DeviceRows, SequenceTable

_NO_SAMPLE = Sampled()
_SCORED_TOGETHER = 64  # prompt rows whose logits exist at a time


@dataclass(frozen=True, slots=True)
class Drawn:
    """Results of a pass of `segments`: `tokens` [n] of the sequences `keys` at `rows` [n] of the table, with
    their log-probabilities, and those of scored prompt tokens by key; and the states of its sequences. A
    sequence with drafts has several tokens, in order."""

    segments: Sequence[InferenceSegment]
    scored: dict[int, tuple[TokenLogprobs, ...]]
    keys: Sequence[int]
    rows: Tensor
    tokens: Tensor
    logprobs: Sequence[TokenLogprobs | None]
    states: PassStates | None
    pooled: dict[int, Tensor]


class Sampler:
    """Samples for each sequence whose last known token is in the pass, and scores prompts: `draw` for each
    pass, which may be repeated, then `note` for all passes of a plan."""

    def __init__(self, base: Base, loaded: LoadedAdapters, table: SequenceTable) -> None:
        self.base, self.loaded, self.table = base, loaded, table
        self._failed: dict[int, CoserveError] = {}  # sequences without a next token, since `take_failed`

    def take_failed(self) -> dict[int, CoserveError]:
        """Returns, once, the errors of sequences that have no next token; what they got is none."""
        failed, self._failed = self._failed, {}
        return failed

    def fail(self, key: int, error: CoserveError) -> None:
        """Notes that a sequence fails alone."""
        self._failed[key] = error

    def skip(self, segment: InferenceSegment, error: CoserveError) -> None:
        """Notes that a segment fails alone, which has no pass: in rows that are planned already the sequence
        goes on with token 0."""
        self.fail(segment.key, error)
        if segment.start + segment.known == self.table[segment.key].length:
            self.table[segment.key].output.append(0)

    def draw(self, batch: PassedRows) -> Drawn:
        """Samples and scores the rows of a pass. Changes nothing: the pass may be repeated."""
        ends = list(accumulate(batch.counts))
        scored, pooled = self._score_prompts(batch, ends), self._pool_prompts(batch, ends)
        segments, picked, following, ahead = list[InferenceSegment](), list[int](), list[int](), []
        for segment, row_end in zip(batch.segments, ends, strict=True):
            end, known = segment.start + segment.length, self.table[segment.key].length
            for position in range(max(segment.start + 1, known), end + 1):  # of the tokens behind its rows
                segments.append(segment)
                picked.append(row_end - 1 - end + position)
                following.append(position)
                ahead.append(segment.drafts[: position - known])
        keys = [segment.key for segment in segments]
        rows = self.table.rows(segments)
        if not segments:
            return Drawn(batch.segments, scored, keys, rows, rows, [], batch.states, pooled)
        adapters = adapter_ranges(self.loaded, segments, [1] * len(segments))
        last, positions = _rows(batch.hidden, picked), torch.tensor(following, device=rows.device)
        if self._is_drawn_in_parts(segments):
            tokens = self._choose_in_parts(last, adapters, rows, positions)
            nothing = [None] * len(keys)
            return Drawn(batch.segments, scored, keys, rows, tokens, nothing, batch.states, pooled)
        logits = self._logits(last, adapters)
        tokens = self._choose(logits, rows, positions, ahead if any(ahead) else ())
        wanted = [self.table[key].request.sampling.logprobs for key in keys]
        logprobs = self._logprobs(logits, tokens.clamp(min=0), wanted)
        return Drawn(batch.segments, scored, keys, rows, tokens, logprobs, batch.states, pooled)

    def note(self, passes: Sequence[Drawn]) -> dict[int, Sampled]:
        """Makes the tokens of passes their sequences' newest ones, and states their current ones; returns
        results by sequence key. Where memory runs out nothing has changed, and the passes may be repeated."""
        results = {segment.key: _NO_SAMPLE for drawn in passes for segment in drawn.segments}
        if done := [drawn for drawn in passes if drawn.keys]:
            keys = [key for drawn in done for key in drawn.keys]
            rows = concat_rows([drawn.rows for drawn in done])
            tokens = concat_rows([drawn.tokens for drawn in done])
            logprobs = [of_token for drawn in done for of_token in drawn.logprobs]
            drafts = {s.key: s.drafts for drawn in done for s in drawn.segments if s.drafts}
            if drafts:
                held = _held(keys, tokens.tolist(), drafts)
                index = torch.tensor(held, device=rows.device)
                rows, tokens = rows[index], tokens[index]
                keys, logprobs = [keys[i] for i in held], [logprobs[i] for i in held]
            found = self.table.sampled(keys, rows, tokens)
            self._note_failed(keys, found)
            for key in drafts:
                self.table.shrink(key)
            for key, token, own in zip(keys, found, logprobs, strict=True):
                earlier = results[key]
                of_tokens = earlier.logprobs if own is None else (*earlier.logprobs, own)
                results[key] = Sampled((*earlier.tokens, token), of_tokens)
        for drawn in passes:
            if drawn.states is not None:
                drawn.states.commit()
            for key, of_prompt in drawn.scored.items():
                before = results[key].prompt_logprobs
                results[key] = structs.replace(results[key], prompt_logprobs=(*before, *of_prompt))
        for key in {key for drawn in passes for key in drawn.pooled}:
            parts = [drawn.pooled[key] for drawn in passes if key in drawn.pooled]
            results[key] = structs.replace(
                results[key], pooled=little("f", sum(parts[1:], parts[0]).tolist())
            )
        return results

    def draws(self, segments: Sequence[InferenceSegment]) -> bool | None:
        """Tells whether some of these sequences, of which decode rows pass, draw their tokens; None where the
        host is needed to sample, for a grammar, penalties or log-probabilities."""
        slots = self.table.places(segments)
        if any(s.key in self.table.scored for s in segments) or not self.table.sampling.are_plain(slots):
            return None
        if outside_layers(self.base.late_sites, adapter_ranges(self.loaded, segments, [1] * len(segments))):
            return None
        return not self.table.sampling.drawing.isdisjoint(slots)

    def sample_rows(self, hidden: Tensor, rows: DeviceRows) -> Tensor:
        """The next tokens [n] of decode rows, of hidden [1, n, width], as a graph holds them: they become
        their sequences' newest ones on the device."""
        assert rows.ends is not None
        table = self.table.sampling
        slots = rows.lines.clamp(max=table.capacity - 1)  # padding samples as anybody
        tokens = sample_plain(self._logits(hidden, ()), slots, rows.ends, table, rows.draws)
        self.table.put_newest(rows.lines, tokens)
        return tokens

    def sampled_rows(self, segments: Sequence[InferenceSegment], tokens: Tensor) -> dict[int, Sampled]:
        """The results of `sample_rows` by key, once the device has them: the host's only wait in a step."""
        sampled, failed = self._under_way(segments, tokens).note()
        self._failed = failed | self._failed
        return sampled

    def launched_rows(self, segments: Sequence[InferenceSegment], tokens: Tensor) -> TokensUnderWay:
        """The same without waiting: the tokens are on their way to the host."""
        return self._under_way(segments, tokens.to("cpu", non_blocking=True))

    def _under_way(self, segments: Sequence[InferenceSegment], tokens: Tensor) -> TokensUnderWay:
        keys = [segment.key for segment in segments]
        return TokensUnderWay(keys, self.table.expect(keys), tokens)

    def _note_failed(self, keys: Sequence[int], tokens: Sequence[int]) -> None:
        """Notes which sequences have no token."""
        if NO_TOKEN in tokens:
            failed = [key for key, token in zip(keys, tokens, strict=True) if token == NO_TOKEN]
            self._failed = dict.fromkeys(failed, RequestError(NO_TOKEN_LEFT)) | self._failed

    def _score_prompts(self, batch: PassedRows, ends: Sequence[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the prompt tokens that follow rows of this pass, where requested."""
        found = {}
        for segment, end in zip(batch.segments, ends, strict=True) if self.table.scored else ():
            if segment.key in self.table.scored:
                hidden = batch.hidden[:, end - segment.length : end]
                found[segment.key] = self._prompt_logprobs(segment, hidden)
        return found

    def _pool_prompts(self, batch: PassedRows, ends: Sequence[int]) -> dict[int, Tensor]:
        """Sums [width] of what the rows of prompts give after the final norm, or the last row's, where an
        embedding is made of them."""
        found = {}
        for segment, end in zip(batch.segments, ends, strict=True) if self.table.pooled else ():
            if segment.key not in self.table.pooled:
                continue
            request, rows = self.table[segment.key].request, segment.length
            if request.sampling.pooling == "last":
                if segment.start + rows < len(request.prompt):
                    continue
                rows = 1
            late = outside_layers(self.base.late_sites, adapter_ranges(self.loaded, [segment], [rows]))
            final = self.base.last_hidden(batch.hidden[:, end - rows : end], late)
            found[segment.key] = final[0].sum(0, dtype=torch.promote_types(final.dtype, torch.float32))
        return found

    def _logits(self, hidden: Tensor, adapters: Sequence[tuple[slice, Bypasses]]) -> Tensor:
        """Logits [rows, vocabulary] of `hidden` [1, rows, width], whose rows belong to `adapters`."""
        return self.base.tail(hidden, outside_layers(self.base.late_sites, adapters))

    def _choose(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Sequence[Sequence[int]]
    ) -> Tensor:
        """The next tokens [n] of the sequences at `rows` [n], for `positions` [n]; see `sample`."""
        return sample(logits, rows, positions, self.table.sampling, ahead)

    def _is_drawn_in_parts(self, segments: Sequence[InferenceSegment]) -> bool:
        """Tells whether ranks draw from their own parts of the logits: where nobody needs them whole."""
        return self.base.logits.is_cut and self.table.sampling.are_plain(self.table.places(segments))

    def _choose_in_parts(
        self, hidden: Tensor, adapters: Sequence[tuple[slice, Bypasses]], rows: Tensor, positions: Tensor
    ) -> Tensor:
        """As `_choose` from the logits of `hidden` [1, n, width]."""
        logits = self.base.logits
        own = logits.of(self.base.tail, hidden, outside_layers(self.base.late_sites, adapters))
        return logits.draw(own, rows, positions, self.table.sampling)

    def _score(self, logits: Tensor, tokens: Tensor, most: int) -> list[TokenLogprobs]:
        """Log-probabilities of `tokens` [n] and of the `most` likeliest ones."""
        return token_logprobs(logits, tokens, most).rows()

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities of the sampled tokens [n], each with its number of alternatives in `wanted`; None
        where that is None."""
        asked = [i for i, most in enumerate(wanted) if most is not None]
        found: list[TokenLogprobs | None] = [None] * len(wanted)
        if asked:
            index = torch.tensor(asked, device=logits.device)
            most = max(wanted[i] or 0 for i in asked)
            for i, row in zip(asked, token_logprobs(logits[index], tokens[index], most).rows(), strict=True):
                found[i] = replace(row, top=row.top[: wanted[i]])
        return found

    def _prompt_logprobs(self, segment: InferenceSegment, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow the segment's rows, hidden [1, rows, width]."""
        request = self.table[segment.key].request
        following = request.prompt[segment.start + 1 : segment.start + segment.length + 1]
        most = request.sampling.prompt_logprobs or 0
        if not following:
            return ()
        tokens = torch.tensor(following, device=hidden.device)
        found: list[TokenLogprobs] = []
        rows = torch.split(hidden[0, : len(following)], _SCORED_TOGETHER)
        for chunk, of_chunk in zip(rows, torch.split(tokens, _SCORED_TOGETHER), strict=True):
            adapters = adapter_ranges(self.loaded, [segment], [len(chunk)])
            found += self._score(self._logits(chunk[None], adapters), of_chunk, most)
        return tuple(found)


def _held(keys: Sequence[int], tokens: Sequence[int], drafts: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Indexes of the tokens that are their sequences' next ones: each behind drafts that all were sampled."""
    found, left = list[int](), dict[int, list[int]]()  # drafts to come, reversed; none of those that failed
    for index, (key, token) in enumerate(zip(keys, tokens, strict=True)):
        expected = left.setdefault(key, [NO_TOKEN, *reversed(drafts.get(key, ()))])
        if expected:
            found.append(index)
            if token != expected.pop():
                expected.clear()
    return found


def _rows(hidden: Tensor, picked: list[int]) -> Tensor:
    """Rows [1, n, width] of hidden [1, rows, width]: a view of the first, as of decode rows, or a copy."""
    if picked[-1] == len(picked) - 1:  # they ascend
        return hidden[:, : len(picked)]
    return hidden[:, torch.tensor(picked, device=hidden.device)]
