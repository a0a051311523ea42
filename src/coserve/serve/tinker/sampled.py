"""Answers in the client's formats: protobuf, and the JSON of clients that do not ask for it."""

import math
from array import array
from collections.abc import Sequence
from typing import Any, Final

from coserve.core.request import FinishReason
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.tinker.futures import Payload
from coserve.serve.tinker.protocol import message_class
from coserve.wire.scores import ABSENT, Scores, little, numbers

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
        sequence.tokens = little("i", answer.tokens)
        sequence.logprobs = answer.scores.chosen
        if alternatives:
            _fill(sequence.topk_sampled_logprobs, answer.scores, alternatives)
    if prompt is not None:
        prompt.write(message)
    message.prompt_cache_hit_tokens = min((answer.cached for answer in answers), default=0)
    return Payload(message.SerializeToString(), sample_json)


class PromptScores:
    """Log-probabilities of a prompt's tokens: of the last `last`, and all but the first where that is
    None."""

    def __init__(self, scores: Scores, alternatives: int, last: int | None) -> None:
        skipped = 0 if last is None else max(len(scores) - last, 0)
        self._empty, self._scores = 1 + skipped, scores.rows(skipped)
        self._alternatives = alternatives

    def write(self, message: Any) -> None:
        """Puts them into a `SampleResponse`."""
        message.prompt_logprobs = little("f", [math.nan] * self._empty) + self._scores.chosen
        if self._alternatives:
            _fill(message.topk_prompt_logprobs, self._scores, self._alternatives, self._empty)


def sample_json(body: bytes) -> dict[str, Any]:
    """The JSON of a `SampleResponse`."""
    message = message_class("SampleResponse")()
    message.ParseFromString(body)
    sequences = [
        {
            "stop_reason": "length" if sequence.stop_reason == _LENGTH else "stop",
            "tokens": numbers("i", sequence.tokens).tolist(),
            "logprobs": numbers("f", sequence.logprobs).tolist(),
        }
        for sequence in message.sequences
    ]
    scores = None
    if message.HasField("prompt_logprobs"):
        scores = [None if math.isnan(one) else one for one in numbers("f", message.prompt_logprobs)]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": scores}


def _fill(table: Any, scores: Scores, k: int, empty: int = 0) -> None:
    """Writes the `k` likeliest tokens of each place after `empty` ones; places without any are masked."""
    ids, logprobs = numbers("i", scores.ids), numbers("f", scores.top)
    no_ids, masked = array("i", [0] * k), array("f", [MASKED] * k)
    all_ids, all_logprobs, width = no_ids * empty, masked * empty, min(scores.width, k)
    for start in range(0, len(scores) * scores.width, scores.width) if width else ():
        all_ids += ids[start : start + width] + no_ids[width:]
        all_logprobs += logprobs[start : start + width] + masked[width:]
    if not width:
        all_ids, all_logprobs = no_ids * (empty + len(scores)), masked * (empty + len(scores))
    if ABSENT in all_ids:
        for place, token in enumerate(all_ids):
            if token == ABSENT:
                all_ids[place], all_logprobs[place] = 0, MASKED
    table.k, table.length = k, empty + len(scores)
    table.token_ids, table.logprobs = little("i", all_ids), little("f", all_logprobs)
