"""Bodies as chats and sampling parameters."""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from coserve.core.request import SamplingParams
from coserve.serve.anthropic.schema import Content, MessagePrompt, MessagesRequest
from coserve.serve.errors import ApiError

_BETWEEN: Final = "\n"  # blocks of a turn, and messages that are one turn


def turns_of(body: MessagePrompt) -> list[dict[str, str]]:
    """The turns of a chat. Raises ApiError 400 for one that ends with the assistant's."""
    if body.messages[-1].role == "assistant":
        message = "The last message is the assistant's: an answer that has begun cannot be continued here."
        raise ApiError(400, message, param="messages", code="unsupported_parameter")
    return [
        {"role": role, "content": _BETWEEN.join(text for _, text in texts)}
        for role, texts in groupby(_texts(body), key=lambda one: one[0])
    ]


def _texts(body: MessagePrompt) -> Iterator[tuple[str, str]]:
    """(role, text) of each message."""
    if body.system is not None:
        yield "system", _text(body.system)
    for message in body.messages:
        yield message.role, _text(message.content)


def _text(content: Content) -> str:
    return content if isinstance(content, str) else _BETWEEN.join(block.text for block in content)


def sampling_of(body: MessagesRequest) -> SamplingParams:
    """Sampling parameters of a body, but for `max_tokens`."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=tuple(body.stop_sequences or ()),
    )
