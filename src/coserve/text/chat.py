"""Chats to tokens, with a mask of those that the assistant wrote.

Templates with `{% generation %}` marks give the mask. For others, growing prefixes of the chat are rendered:
the assistant's part is the text that its turn adds to the prefix with `add_generation_prompt`. Each rendered
prefix must begin the next one; a template that rewrites earlier turns is refused.

A tokenizer without a template gets `plain_chat`. A request's tokens (`encode_request`) equal those before the
answer in training (`encode_chat`). Only templates produce control tokens: a message that spells one is text,
in requests and in training, unless `allow_special_tokens`.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from transformers.utils.chat_template_utils import render_jinja_template

from coserve.errors import DataError
from coserve.jobs.datasets import Message
from coserve.text.control import ControlTokens, control_tokens
from coserve.text.tokenizer import Tokenizer, first_tokens, last_tokens, token_ids

Turns = Sequence[Mapping[str, str]]
Render = Callable[[Turns, bool], str]
Encode = Callable[[str], list[int]]
# transformers compiles a template once for all threads, and what was rendered last is noted in it.
_RENDERING = threading.Lock()
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def plain_chat(turns: Turns, add_generation_prompt: bool) -> str:
    """The format for tokenizers without a template: a line "role: content" for each turn, and "assistant:" as
    the generation prompt."""
    text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns)
    return text + "assistant:" if add_generation_prompt else text


def encode_request(turns: Turns, tokenizer: Tokenizer, allow_special_tokens: bool = False) -> list[int]:
    """Tokens of a chat with the generation prompt. Raises DataError if the template refuses it."""
    for number, turn in enumerate(turns, 1):
        if not {"role", "content"} <= turn.keys():
            raise DataError(f"expected message {number} to have a role and a content, not {sorted(turn)}")
    turns, control = _only_text(turns, tokenizer, allow_special_tokens)
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        return [*first_tokens(tokenizer), *encode(plain_chat(turns, True))]
    with _refusals(control):
        return encode(_rendered(tokenizer, turns, True))


def encode_chat(
    messages: tuple[Message, ...], tokenizer: Tokenizer, allow_special_tokens: bool = False
) -> tuple[list[int], list[bool]]:
    """(tokens, whether the assistant wrote each) of a chat."""
    turns: Turns = [{"role": message.role, "content": message.content} for message in messages]
    turns, control = _only_text(turns, tokenizer, allow_special_tokens)
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        return _encode_plain(turns, tokenizer, encode)
    with _refusals(control):
        if tokenizer.is_fast and _MARKS.search(tokenizer.get_chat_template()):
            if control is not None:
                return _encode_marked_text(turns, tokenizer, encode)
            tokens, mask = _encode_marked(turns, tokenizer)
            # transformers marks nothing where a stretch begins with a space that the tokenizer's offsets
            # leave out.
            if any(mask):
                return tokens, mask
        return _encode_prefixes(turns, tokenizer, lambda part, ask: _rendered(tokenizer, part, ask), encode)


def _only_text(turns: Turns, tokenizer: Tokenizer, allowed: bool) -> tuple[Turns, ControlTokens | None]:
    """The turns with spelled control tokens hidden, and the object that restores them; None where there are
    none, or they are allowed."""
    control = control_tokens(tokenizer)
    texts = [turn["content"] for turn in turns if isinstance(turn["content"], str)]  # templates judge others
    if allowed or not any(map(control.spelled_in, texts)):
        return turns, None
    return [
        {**turn, "content": control.hide(turn["content"])} if isinstance(turn["content"], str) else turn
        for turn in turns
    ], control


def _encoder(tokenizer: Tokenizer, control: ControlTokens | None) -> Encode:
    return partial(token_ids, tokenizer) if control is None else control.ids


@contextmanager
def _refusals(control: ControlTokens | None) -> Iterator[None]:
    """Turns a template's errors into DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        # A template is a program from the model's folder and raises what it likes, mostly a sentence on
        # the roles it takes; all of it is about this chat.
        reason = str(error) if control is None else control.show(str(error))
        raise DataError(f"the chat template refuses this chat: {reason}") from error


def _rendered(tokenizer: Tokenizer, turns: Turns, add_generation_prompt: bool) -> str:
    with _RENDERING:
        text = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return str(text)


def _encode_marked(turns: Turns, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    with _RENDERING:
        encoded = tokenizer.apply_chat_template(
            list(turns),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
    mask = [bool(mark) for mark in encoded["assistant_masks"]]
    # A character can take several tokens, and transformers marks only the first of the last character's;
    # the others begin inside the text of the one before.
    places = encoded["offset_mapping"]
    for i in range(1, len(mask)):
        mask[i] = mask[i] or (mask[i - 1] and places[i][0] < places[i - 1][1])
    return list(encoded["input_ids"]), mask


def _encode_marked_text(turns: Turns, tokenizer: Tokenizer, encode: Encode) -> tuple[list[int], list[bool]]:
    """`_encode_marked` for contents with stand-ins, for which the tokenizer's offsets are wrong."""
    with _RENDERING:
        texts, spans = render_jinja_template(
            [list(turns)],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return _masked(texts[0], spans[0], encode)


def _encode_plain(turns: Turns, tokenizer: Tokenizer, encode: Encode) -> tuple[list[int], list[bool]]:
    tokens, mask = _encode_prefixes(turns, tokenizer, plain_chat, encode)
    first = first_tokens(tokenizer)
    # Only the end of the chat is an end of text; earlier turns end with their line.
    last = last_tokens(tokenizer) if turns[-1]["role"] == "assistant" else []
    return [*first, *tokens, *last], [*[False] * len(first), *mask, *[True] * len(last)]


def _encode_prefixes(
    turns: Turns, tokenizer: Tokenizer, render: Render, encode: Encode
) -> tuple[list[int], list[bool]]:
    text = render(turns, False)
    return _masked(text, _spans(turns, text, render, tokenizer.eos_token), encode)


def _masked(text: str, spans: Iterable[tuple[int, int]], encode: Encode) -> tuple[list[int], list[bool]]:
    """The tokens of a chat, and whether each is within the assistant's spans of its text."""
    tokens = encode(text)
    mask = [False] * len(tokens)
    for start, end in spans:
        # A token that straddles the start counts as the assistant's: it holds the answer's first letters.
        first, last = (_common(tokens, encode(text[:border])) for border in (start, end))
        mask[first:last] = [True] * (last - first)
    return tokens, mask


def _spans(turns: Turns, text: str, render: Render, eos: str | None) -> Iterator[tuple[int, int]]:
    """Spans (start, end) of the assistant's turns in `text`, in characters, end-of-turn marks included."""
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        asked, answered = render(turns[:i], True), render(turns[: i + 1], False)
        if not (text.startswith(answered) and answered.startswith(asked)):
            raise DataError(
                f"the chat template renders message {i + 1} differently once more of the chat follows, so "
                "the assistant's tokens cannot be told apart; mark them with {% generation %} in the template"
            )
        end = len(answered)
        if eos and answered.rstrip().endswith(eos):
            end = len(answered.rstrip())  # an answer is over with its end mark: no one samples the line break
        yield len(asked), end


def _common(one: list[int], two: list[int]) -> int:
    """Length of the common prefix."""
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return i
    return min(len(one), len(two))
