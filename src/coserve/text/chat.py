"""Chats to tokens, with a mask of those that the assistant wrote.

Templates with `{% generation %}` marks give the mask. For others, growing prefixes of the chat are rendered:
the assistant's part is the text that its turn adds to the prefix with `add_generation_prompt`. Each rendered
prefix must begin the next one. With a template that rewrites earlier turns, as those that drop reasoning do,
each turn is learned in a chat of its own that ends with it, as it is served (`encode_turns`). Templates are
rendered in a sandbox (`rendering.py`), which bounds the time.

Tools, and calls of them with their arguments as objects, are rendered by the template. One that leaves them
out is refused, as is a tokenizer without a template.

A tokenizer without a template gets `plain_chat`. A request's tokens (`encode_request`) equal those before the
answer in training (`encode_chat`). Only templates produce control tokens: a message that spells one is text,
in requests and in training, unless `allow_special_tokens`.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

from coserve.errors import DataError
from coserve.jobs.messages import Message
from coserve.text.control import Anchor, ControlTokens, control_tokens
from coserve.text.rendering import (
    NO_VARIABLES,
    Tools,
    Turns,
    Variables,
    render_marked,
    render_prefixes,
    render_request,
)
from coserve.text.templates import end_of
from coserve.text.tokenizer import Tokenizer, first_tokens, last_tokens, token_ids

Encode = Callable[[str], list[int]]
_MARKS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DEVELOPER: Final = "developer"
_MOST_AGAIN: Final = 2**23  # characters of a chat that are tokenized again to find its answers: 3 to 8 s


def plain_chat(turns: Turns, add_generation_prompt: bool) -> str:
    """The format for tokenizers without a template: a line "role: content" for each turn, and "assistant:" as
    the generation prompt."""
    text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns)
    return text + "assistant:" if add_generation_prompt else text


def encode_request(
    turns: Turns,
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
    variables: Variables = NO_VARIABLES,
    is_continued: bool = False,
) -> list[int]:
    """Tokens of a chat with the generation prompt, or of one whose last message `is_continued`. The
    template reads `variables`, too. Raises DataError if it refuses the chat."""
    for number, turn in enumerate(turns, 1):
        if not {"role", "content"} <= turn.keys():
            raise DataError(f"expected message {number} to have a role and a content, not {sorted(turn)}")
    return _encode_asked(turns, tokenizer, allow_special_tokens, tools, variables, is_continued)


def encode_prompt(
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
) -> list[int]:
    """Tokens of a record's chat with the generation prompt. Raises DataError where the template refuses the
    chat."""
    return _encode_asked([turn_of(message) for message in messages], tokenizer, allow_special_tokens, tools)


def _encode_asked(
    turns: Turns,
    tokenizer: Tokenizer,
    allow_special_tokens: bool,
    tools: Tools,
    variables: Variables = NO_VARIABLES,
    is_continued: bool = False,
) -> list[int]:
    turns = _with_roles(turns, tokenizer)
    (turns, tools, variables), control = _only_text(
        (turns, _described(tools), variables), tokenizer, allow_special_tokens
    )
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        _refuse_tools(turns, tools)
        text = plain_chat(turns, False).removesuffix("\n") if is_continued else plain_chat(turns, True)
        return [*first_tokens(tokenizer), *encode(text)]
    with _shown(control):
        return encode(render_request(tokenizer, turns, tools, variables, is_continued))


def encode_chat(
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
) -> tuple[list[int], list[bool]]:
    """(tokens, whether each is to be learned) of a chat: the assistant's are, but for turns of weight 0.

    Raises DataError where the template refuses the chat, and TurnsRewritten where a
    learned turn is another one in the chat up to it.
    """
    turns: Turns = _with_roles([turn_of(message) for message in messages], tokenizer)
    (turns, tools, _), control = _only_text(
        (turns, _described(tools), NO_VARIABLES), tokenizer, allow_special_tokens
    )
    learned = [message.weight > 0 for message in messages]
    encode = _encoder(tokenizer, control)
    if tokenizer.chat_template is None:
        _refuse_tools(turns, tools)
        return _encode_plain(turns, learned, tokenizer, encode)
    with _shown(control):
        if tokenizer.is_fast and _MARKS.search(tokenizer.get_chat_template(tools=list(tools) or None)):
            text, marked = render_marked(tokenizer, turns, tools)
            if control is not None or not all(learned):
                return _masked(text, _learned_spans(marked, turns, learned), tokenizer, encode)
            tokens, mask = _encode_marked(text, marked, tokenizer)
            # transformers marks nothing where a stretch begins with a space that the tokenizer's offsets
            # leave out.
            if any(mask):
                return tokens, mask
        text, spans = render_prefixes(tokenizer, turns, learned, tools)
        return _masked(text, spans, tokenizer, encode)


def encode_turns(
    messages: tuple[Message, ...],
    tokenizer: Tokenizer,
    allow_special_tokens: bool = False,
    tools: Tools = (),
) -> Iterator[tuple[list[int], list[bool]]]:
    """As `encode_chat`, for each learned turn of the assistant's: the chat up to it, of which it alone is to
    be learned. So every turn is rendered as it is served. Raises DataError also for a chat whose turns have
    too much before them in all."""
    ends = [end for end, one in enumerate(messages, 1) if one.role == "assistant" and one.weight > 0]
    lengths = [*accumulate(len(one.content) + len(one.reasoning or "") for one in messages)]
    if (length := sum(lengths[end - 1] for end in ends)) > _MOST_AGAIN:
        raise DataError(
            f"the chat template renders earlier turns differently, so that {len(ends)} turns are learned one "
            f"by one, with {length} characters in all: split this chat"
        )
    for end in ends:
        before = tuple(replace(one, weight=0) for one in messages[: end - 1])
        yield encode_chat((*before, messages[end - 1]), tokenizer, allow_special_tokens, tools)


def _with_roles(turns: Turns, tokenizer: Tokenizer) -> Turns:
    """Turns with roles that the template knows: OpenAI's newer name of the system is known to few, and the
    others leave such a turn out or write a name that the model has never read."""
    template = tokenizer.chat_template
    if template is None or _DEVELOPER in str(template) or all(turn["role"] != _DEVELOPER for turn in turns):
        return turns
    return [{**turn, "role": "system"} if turn["role"] == _DEVELOPER else turn for turn in turns]


def turn_of(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
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


def _described(tools: Tools) -> Tools:
    """Tools as a model is told of them. `strict` is a word to whoever enforces a schema: clients set it, or
    not, by their dialect, and a prompt with it is unlike the data by which a tool was taught."""
    found = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and "strict" in function:
            tool = {**tool, "function": {key: each for key, each in function.items() if key != "strict"}}
        found.append(tool)
    return found


def _refuse_tools(turns: Turns, tools: Tools) -> None:
    """Raises DataError for tools, or calls of them, where there is no template."""
    if tools or any("tool_calls" in turn for turn in turns):
        raise DataError("the tokenizer has no chat template, and only a template can render tools")


def _only_text(
    given: tuple[Turns, Tools, Variables], tokenizer: Tokenizer, allowed: bool
) -> tuple[tuple[Turns, Tools, Variables], ControlTokens | None]:
    """Turns, tools and variables with spelled control tokens hidden, and the object that restores these; None
    where there are none, or they are allowed."""
    control = control_tokens(tokenizer)
    if allowed or not any(map(control.spelled_in, texts_of(given))):
        return given, None
    turns, tools, variables = (_hidden(part, control) for part in given)
    return (turns, tools, variables), control


def texts_of(value: object) -> Iterator[str]:
    """All texts of nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_of(key)
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


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
def _shown(control: ControlTokens | None) -> Iterator[None]:
    """Has errors quote control tokens as they were spelled."""
    try:
        yield
    except DataError as error:
        if control is None:
            raise
        raise type(error)(control.show(str(error))) from error


def _encode_marked(
    text: str, spans: Iterable[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[list[int], list[bool]]:
    """The tokens of a chat, and whether each is within the given spans, as transformers' mask has it."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = list(encoded["input_ids"])
    mask = [False] * len(tokens)
    for start, end in spans:
        first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
        if first is None:
            break
        for i in range(first, last + 1 if last else len(tokens)):
            mask[i] = True
    # A character can take several tokens, and transformers marks only the first of the last character's;
    # the others begin inside the text of the one before.
    places = encoded["offset_mapping"]
    for i in range(1, len(mask)):
        mask[i] = mask[i] or (mask[i - 1] and places[i][0] < places[i - 1][1])
    return tokens, mask


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
    tokens, mask = _masked(
        plain_chat(turns, False), _plain_spans(turns, learned, tokenizer), tokenizer, encode
    )
    first = first_tokens(tokenizer)
    # Only the end of the chat is an end of text; earlier turns end with their line.
    last = last_tokens(tokenizer) if turns[-1]["role"] == "assistant" else []
    return [*first, *tokens, *last], [*[False] * len(first), *mask, *[learned[-1]] * len(last)]


def _plain_spans(turns: Turns, learned: Sequence[bool], tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Spans in `plain_chat` of the assistant's turns that are learned."""
    start = 0
    for turn, wanted in zip(turns, learned, strict=True):
        text = plain_chat([turn], False)
        if turn["role"] == "assistant" and wanted:
            yield start + len(plain_chat([], True)), start + end_of(text, tokenizer.eos_token)
        start += len(text)


def _masked(
    text: str, spans: Iterable[tuple[int, int]], tokenizer: Tokenizer, encode: Encode
) -> tuple[list[int], list[bool]]:
    """The tokens of a chat, and whether each is within the given spans of its text."""
    tokens = encode(text)
    mask = [False] * len(tokens)
    anchors = [Anchor(0, 0, 0), *control_tokens(tokenizer).anchors(text, tokens)]
    again = 0
    for span in spans:
        borders = []
        for place in span:
            last = anchors[bisect_right(anchors, place, key=lambda anchor: anchor.end) - 1]
            again += place - last.start
            if again > _MOST_AGAIN:
                raise DataError(
                    f"this chat of {len(text)} characters has more answers than can be told apart, as its "
                    "template has no control tokens between them: split it"
                )
            before = encode(text[last.start : place])
            there = tokens[last.place : last.place + len(before)]
            borders.append(last.place + _common(there, before))
        # A token that straddles the start counts as the assistant's: it holds the answer's first letters.
        mask[borders[0] : borders[1]] = [True] * (borders[1] - borders[0])
    return tokens, mask


def _common(one: list[int], two: list[int]) -> int:
    """Length of the common prefix."""
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return i
    return min(len(one), len(two))
