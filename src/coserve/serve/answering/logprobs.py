"""Log-probabilities in the two shapes that OpenAI's API has for them."""

from collections.abc import Sequence

from coserve.core.plan import TokenLogprobs
from coserve.serve.answering.answers import Scored
from coserve.serve.schema.chat import Alternative, ChatLogprobs, TokenLogprob
from coserve.serve.schema.completions import CompletionLogprobs
from coserve.text import Text

LOWEST = -9999.0  # what OpenAI says for "very unlikely"; JSON has no infinity


def chat_logprobs(text: Text, scored: Sequence[Scored]) -> ChatLogprobs:
    """The shape of chats: an object for each token."""
    return ChatLogprobs(content=[_chat_token(text, token, scores) for token, scores in scored])


def _chat_token(text: Text, token: int, scores: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token=text.piece(token),
        logprob=max(scores.chosen, LOWEST),
        bytes=list(text.piece_bytes(token)),
        top_logprobs=[_alternative(text, other, logprob) for other, logprob in scores.top],
    )


def _alternative(text: Text, token: int, logprob: float) -> Alternative:
    spelling = list(text.piece_bytes(token))
    return Alternative(token=text.piece(token), logprob=max(logprob, LOWEST), bytes=spelling)


class CompletionScores:
    """The shape of plain completions: parallel lists. Offsets count characters from the text's beginning."""

    def __init__(self, text: Text, alternatives: int) -> None:
        self._text, self._alternatives, self._offset = text, alternatives, 0

    def of(self, scored: Sequence[tuple[int, TokenLogprobs | None]]) -> CompletionLogprobs:
        """The next tokens. One without scores is the first of a prompt."""
        pieces = [self._text.piece(token) for token, _ in scored]
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece)
        return CompletionLogprobs(
            tokens=pieces,
            token_logprobs=[None if scores is None else max(scores.chosen, LOWEST) for _, scores in scored],
            top_logprobs=[self._top(token, scores) for token, scores in scored]
            if self._alternatives
            else None,
            text_offset=offsets,
        )

    def _top(self, token: int, scores: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest tokens, and the chosen one if it is not among them."""
        if scores is None:
            return None
        best = {self._text.piece(other): max(logprob, LOWEST) for other, logprob in reversed(scores.top)}
        return {self._text.piece(token): max(scores.chosen, LOWEST), **best}
