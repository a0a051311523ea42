"""Answers in the client's formats: protobuf, and the JSON of clients that do not ask for it."""

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

from coserve.core.plan import TokenLogprobs
from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.tinker.futures import Payload
from coserve.serve.tinker.protocol import message_class

MASKED: Final = -99999.0  # the client's log-probability of an empty place in a table of likely tokens
_STOP, _LENGTH = 0, 1  # of the enumeration StopReason


def sample_payload(
    answers: Sequence[AnswerPiece], alternatives: int, prompt: "PromptScores | None"
) -> Payload:
    """The reply with whole answers, and `alternatives` likely tokens beside each that was sampled."""
    message = message_class("SampleResponse")()
    for answer in answers:
        sequence = message.sequences.add()
        sequence.stop_reason = _LENGTH if answer.finish is FinishReason.LENGTH else _STOP
        sequence.tokens = packed("i", answer.tokens)
        sequence.logprobs = packed("f", (one.chosen for one in answer.scores))
        if alternatives:
            _fill(sequence.topk_sampled_logprobs, answer.scores, alternatives)
    if prompt is not None:
        prompt.write(message)
    message.prompt_cache_hit_tokens = min((answer.cached for answer in answers), default=0)
    return Payload(message.SerializeToString(), sample_json)


class PromptScores:
    """Log-probabilities of a prompt's tokens: of the last `last`, and all but the first where that is
    None."""

    def __init__(self, scores: Sequence[TokenLogprobs], alternatives: int, last: int | None) -> None:
        skipped = 0 if last is None else max(len(scores) - last, 0)
        empty = TokenLogprobs(math.nan, ())
        self._scores = [empty] * (1 + skipped) + list(scores[skipped:])
        self._alternatives = alternatives

    def write(self, message: Any) -> None:
        """Puts them into a `SampleResponse`."""
        message.prompt_logprobs = packed("f", (one.chosen for one in self._scores))
        if self._alternatives:
            _fill(message.topk_prompt_logprobs, self._scores, self._alternatives)


def sample_json(body: bytes) -> dict[str, Any]:
    """The JSON of a `SampleResponse`."""
    message = message_class("SampleResponse")()
    message.ParseFromString(body)
    sequences = [
        {
            "stop_reason": "length" if sequence.stop_reason == _LENGTH else "stop",
            "tokens": unpacked("i", sequence.tokens),
            "logprobs": unpacked("f", sequence.logprobs),
        }
        for sequence in message.sequences
    ]
    scores = None
    if message.HasField("prompt_logprobs"):
        scores = [None if math.isnan(one) else one for one in unpacked("f", message.prompt_logprobs)]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": scores}


def unpacked(code: str, data: bytes) -> list[Any]:
    """The numbers in little-endian bytes; `code` is that of `array`. Raises ValueError for a part of one."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def packed(code: str, numbers: Iterable[float] | Iterable[int]) -> bytes:
    """Numbers as little-endian bytes; `code` is that of `array`."""
    made = array(code, numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def _fill(table: Any, scores: Sequence[TokenLogprobs], k: int) -> None:
    """Writes the `k` likeliest tokens of each place; places without any are masked."""
    ids, logprobs = array("i"), array("f")
    for one in scores:
        top = one.top[:k]
        ids.extend(token for token, _ in top)
        ids.extend([0] * (k - len(top)))
        logprobs.extend(logprob for _, logprob in top)
        logprobs.extend([MASKED] * (k - len(top)))
    table.k, table.length = k, len(scores)
    table.token_ids, table.logprobs = packed("i", ids), packed("f", logprobs)
