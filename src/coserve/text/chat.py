"""Chats to tokens, with a mask of those that the assistant wrote.

Templates with `{% generation %}` marks give the mask. For others, growing prefixes of the chat are rendered:
the assistant's part is the text that its turn adds to the prefix with `add_generation_prompt`. Each rendered
prefix must begin the next one; a template that rewrites earlier turns is refused.

Tools, and calls of them with their arguments as objects, are rendered by the template. One that leaves them
out is refused, as is a tokenizer without a template.

A tokenizer without a template gets `plain_chat`. A request's tokens (`encode_request`) equal those before the
answer in training (`encode_chat`). Only templates produce control tokens: a message that spells one is text,
in requests and in training, unless `allow_special_tokens`.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from coserve.errors import DataError
from coserve.jobs.messages import Message, Tools
from coserve.text.control import ControlTokens, control_tokens
from coserve.text.tokenizer import Tokenizer, first_tokens, last_tokens, token_ids

Turns = Sequence[Mapping[str, Any]]
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
    return _encode_asked(turns, tokenizer, allow_special_tokens, ())


def encode_prompt(
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
) -> list[int]:
    """Tokens of a record's chat with the generation prompt. Raises DataError where the template refuses the
    chat or leaves out its tools."""
    return _encode_asked([_turn(message) for message in messages], tokenizer, allow_special_tokens, tools)


def _encode_asked(turns: Turns, tokenizer: Tokenizer, allow_special_tokens: bool, tools: Tools) -> list[int]:
    turns, control, tools = _only_text(turns, tokenizer, allow_special_tokens, tools)
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        _refuse_tools(turns, tools)
        return [*first_tokens(tokenizer), *encode(plain_chat(turns, True))]
    with _refusals(control):
        _check_tools(tokenizer, turns, tools)
        return encode(_rendered(tokenizer, turns, True, tools))


def encode_chat(
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
) -> tuple[list[int], list[bool]]:
    """(tokens, whether each is to be learned) of a chat: the assistant's are, but for turns of weight 0.

    Raises DataError where the template refuses the chat or leaves out its tools.
    """
    turns: Turns = [_turn(message) for message in messages]
    turns, control, tools = _only_text(turns, tokenizer, allow_special_tokens, tools)
    learned = [message.weight > 0 for message in messages]
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        _refuse_tools(turns, tools)
        return _encode_plain(turns, learned, tokenizer, encode)
    with _refusals(control):
        _check_tools(tokenizer, turns, tools)
        if tokenizer.is_fast and _MARKS.search(tokenizer.get_chat_template()):
            if control is not None or not all(learned):
                return _encode_marked_text(turns, learned, tokenizer, encode, tools)
            tokens, mask = _encode_marked(turns, tokenizer, tools)
            # transformers marks nothing where a stretch begins with a space that the tokenizer's offsets
            # leave out.
            if any(mask):
                return tokens, mask
        render: Render = partial(_rendered, tokenizer, tools=tools)
        return _encode_prefixes(turns, learned, tokenizer, render, encode)


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            turn[key] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _refuse_tools(turns: Turns, tools: Tools) -> None:
    """Raises DataError for tools, or calls of them, where there is no template."""
    if tools or any("tool_calls" in turn for turn in turns):
        raise DataError("the tokenizer has no chat template, and only a template can render tools")


def _check_tools(tokenizer: Tokenizer, turns: Turns, tools: Tools) -> None:
    """Raises DataError where the template renders the same text without the tools or the calls of them."""
    with_calls = any("tool_calls" in turn for turn in turns)
    if not tools and not with_calls:
        return
    text = _rendered(tokenizer, turns, False, tools)
    if tools and text == _rendered(tokenizer, turns, False):
        raise DataError("the chat template leaves out tools, so they cannot be learned")
    if not with_calls:
        return
    silent = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
    try:
        other = _rendered(tokenizer, silent, False, tools)
    except Exception:
        return  # a template that misses them reads them
    if text == other:
        raise DataError('the chat template leaves out "tool_calls", so they cannot be learned')


def _only_text(
    turns: Turns, tokenizer: Tokenizer, allowed: bool, tools: Tools = ()
) -> tuple[Turns, ControlTokens | None, Tools]:
    """Turns and tools with spelled control tokens hidden, and between them the object that restores these;
    None where there are none, or they are allowed."""
    control = control_tokens(tokenizer)
    if allowed or not any(map(control.spelled_in, _texts([list(turns), list(tools)]))):
        return turns, None, tools
    hidden = [_hidden(turn, control) for turn in turns]
    return hidden, control, tuple(_hidden(tool, control) for tool in tools)


def _texts(value: object) -> Iterator[str]:
    """All texts of nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _hidden(value: Any, control: ControlTokens) -> Any:
    """The same nested lists and objects with `control.hide` of every text in them."""
    if isinstance(value, str):
        return control.hide(value)
    if isinstance(value, Mapping):
        return {_hidden(key, control): _hidden(inner, control) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(inner, control) for inner in value]
    return value


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


def _rendered(tokenizer: Tokenizer, turns: Turns, add_generation_prompt: bool, tools: Tools = ()) -> str:
    with _RENDERING:
        text = tokenizer.apply_chat_template(
            list(turns), tools=_given(tools), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return str(text)


def _given(tools: Tools) -> list[dict[str, Any]] | None:
    """Tools as transformers takes them: templates ask whether there are any."""
    return [dict(tool) for tool in tools] or None


def _encode_marked(turns: Turns, tokenizer: Tokenizer, tools: Tools) -> tuple[list[int], list[bool]]:
    with _RENDERING:
        encoded = tokenizer.apply_chat_template(
            list(turns),
            tools=_given(tools),
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


def _encode_marked_text(
    turns: Turns, learned: Sequence[bool], tokenizer: Tokenizer, encode: Encode, tools: Tools
) -> tuple[list[int], list[bool]]:
    """`_encode_marked` for contents with stand-ins, for which the tokenizer's offsets are wrong, and for
    chats of which some turns are not learned."""
    with _RENDERING:
        texts, spans = render_jinja_template(
            [list(turns)],
            tools=_given(tools),
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return _masked(texts[0], _learned_spans(spans[0], turns, learned), encode)


def _learned_spans(
    spans: Sequence[tuple[int, int]], turns: Turns, learned: Sequence[bool]
) -> Sequence[tuple[int, int]]:
    """The marked spans of turns that are learned. Raises DataError where it is unclear whose they are."""
    if all(learned):
        return spans
    wanted = [want for turn, want in zip(turns, learned, strict=True) if turn["role"] == "assistant"]
    if len(spans) != len(wanted):
        raise DataError(
            f"the chat template marks {len(spans)} stretches for {len(wanted)} turns of the assistant, so "
            'those with "weight" 0 cannot be told apart'
        )
    return [span for span, want in zip(spans, wanted, strict=True) if want]


def _encode_plain(
    turns: Turns, learned: Sequence[bool], tokenizer: Tokenizer, encode: Encode
) -> tuple[list[int], list[bool]]:
    tokens, mask = _encode_prefixes(turns, learned, tokenizer, plain_chat, encode)
    first = first_tokens(tokenizer)
    # Only the end of the chat is an end of text; earlier turns end with their line.
    last = last_tokens(tokenizer) if turns[-1]["role"] == "assistant" else []
    return [*first, *tokens, *last], [*[False] * len(first), *mask, *[learned[-1]] * len(last)]


def _encode_prefixes(
    turns: Turns, learned: Sequence[bool], tokenizer: Tokenizer, render: Render, encode: Encode
) -> tuple[list[int], list[bool]]:
    text = render(turns, False)
    return _masked(text, _spans(turns, learned, text, render, tokenizer.eos_token), encode)


def _masked(text: str, spans: Iterable[tuple[int, int]], encode: Encode) -> tuple[list[int], list[bool]]:
    """The tokens of a chat, and whether each is within the given spans of its text."""
    tokens = encode(text)
    mask = [False] * len(tokens)
    for start, end in spans:
        # A token that straddles the start counts as the assistant's: it holds the answer's first letters.
        first, last = (_common(tokens, encode(text[:border])) for border in (start, end))
        mask[first:last] = [True] * (last - first)
    return tokens, mask


def _spans(
    turns: Turns, learned: Sequence[bool], text: str, render: Render, eos: str | None
) -> Iterator[tuple[int, int]]:
    """Spans (start, end) in `text` of the assistant's turns that are learned, in characters, end-of-turn
    marks included."""
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant" or not learned[i]:
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
