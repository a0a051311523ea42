"""Log-probabilities in the two formats of OpenAI's API."""

from collections.abc import Sequence

from coserve.core.plan import TokenLogprobs
from coserve.serve.answering.answers import Scored
from coserve.serve.schema.chat import Alternative, ChatLogprobs, TokenLogprob
from coserve.serve.schema.completions import CompletionLogprobs
from coserve.text import Text

LOWEST = -9999.0  # what OpenAI says for "very unlikely"; JSON has no infinity


def chat_logprobs(text: Text, scored: Sequence[Scored]) -> ChatLogprobs:
    """The format of chats: an object for each token."""
    return ChatLogprobs(
        content=[_chat_token(text, one.token, one.scores) for one in scored if one.scores is not None]
    )


def completion_logprobs(text: Text, scored: Sequence[Scored], alternatives: int) -> CompletionLogprobs:
    """The format of plain completions: parallel lists."""
    return CompletionLogprobs(
        tokens=[text.token_text(one.token) for one in scored],
        token_logprobs=[None if one.scores is None else max(one.scores.chosen, LOWEST) for one in scored],
        top_logprobs=[_top(text, one) for one in scored] if alternatives else None,
        text_offset=[one.start for one in scored],
    )


def _chat_token(text: Text, token: int, scores: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token=text.token_text(token),
        logprob=max(scores.chosen, LOWEST),
        bytes=list(text.token_bytes(token)),
        top_logprobs=[_alternative(text, other, logprob) for other, logprob in scores.top],
    )


def _alternative(text: Text, token: int, logprob: float) -> Alternative:
    spelling = list(text.token_bytes(token))
    return Alternative(token=text.token_text(token), logprob=max(logprob, LOWEST), bytes=spelling)


def _top(text: Text, one: Scored) -> dict[str, float] | None:
    """The likeliest tokens, and the chosen one if it is not among them."""
    if one.scores is None:
        return None
    best = {text.token_text(other): max(logprob, LOWEST) for other, logprob in reversed(one.scores.top)}
    return {text.token_text(one.token): max(one.scores.chosen, LOWEST), **best}
