"""Formats of training data: the keys by which a record is known, and the record that is made of it.

| format | keys | read as |
|---|---|---|
| chat | `messages`, `tools` | `ChatRecord` |
| ShareGPT | `conversations` of {`from`, `value`}, `system`, `tools` | `ChatRecord` |
| Alpaca | `instruction`, `input`, `output`, `system`, `history` | `ChatRecord` |
| question and answer | `question`, `answer` | `ChatRecord` |
| prompt and completion | `prompt`, `completion` or `response` | `CompletionRecord` |
| text | `text` | `TextRecord` |
| preference | `prompt` or another name of it, or none; `chosen`, `rejected` | `PreferenceRecord` |
| OpenAI's preference | `input`, `preferred_output`, `non_preferred_output` | `PreferenceRecord` |
| labelled completion | `prompt`, `completion`, `label` | `LabelledRecord` |
| labelled chat | `messages` or `conversations`, `label` | `LabelledRecord` |
| prompt with references | `messages`, `prompt` or `question`, and any other keys | `PromptRecord` |

A file has one format. Supervised training reads the first six, preference optimisation the next two, KTO
labelled completions and chats, reinforcement the last, in which every other key of the record is part of the
reference. Keys may be in any letter case. The others' further keys are not read (`Format.ignored`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from coserve.errors import DataError
from coserve.jobs.media import MEDIA
from coserve.jobs.messages import (
    Message,
    Tools,
    check_whole,
    kind,
    quoted,
    read_messages,
    read_tools,
    text_of,
)
from coserve.jobs.shared_beginnings import is_answer, joined, split_texts
from coserve.jobs.sharegpt import read_conversations, read_turns

_TOOLS: Final = ("tools", "functions", "parallel_tool_calls")
_NO_REFERENCE: Final = ("messages", "prompt", "question", *_TOOLS)


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A chat with at least one turn of the assistant, and the tools that it may call."""

    messages: tuple[Message, ...]
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """A prompt and its completion, as plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextRecord:
    """Plain text to be learned. One that `goes_on` is a part of a longer text; the next record has more."""

    text: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """A prompt with two continuations, of which `chosen` is preferred to `rejected`. Each continuation is
    one turn of the assistant or more, with those of tools between."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """A prompt with one answer, as the continuations of a `PreferenceRecord`, and whether it is desirable."""

    prompt: tuple[Message, ...]
    answer: tuple[Message, ...]
    desirable: bool
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt to be answered, with `reference`, values by key that a grader compares answers with."""

    messages: tuple[Message, ...]
    reference: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools = ()


SupervisedRecord = ChatRecord | CompletionRecord | TextRecord
Record = SupervisedRecord | PreferenceRecord | LabelledRecord | PromptRecord


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its name (a file has records of one name), whether an object has its keys, the record of
    such an object, and all keys that are read of it; None for every key."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Record]
    keys: frozenset[str] | None

    def ignored(self, value: Mapping[str, Any]) -> list[str]:
        """The keys of an object with a value that is not read."""
        if self.keys is None:
            return []
        return [key for key, found in value.items() if key not in self.keys and found is not None]


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda value: all(key in value for key in keys)


def _chat(value: Mapping[str, Any]) -> ChatRecord:
    return _answered(read_turns(value["messages"], "messages"), read_tools(value))


def _answered(messages: tuple[Message, ...], tools: Tools = ()) -> ChatRecord:
    if not any(turn.role == "assistant" for turn in messages):
        raise DataError(
            'expected at least one message with the role "assistant"; found none: chats that await an answer '
            "are for reinforcement"
        )
    return ChatRecord(messages, tools)


def _sharegpt(value: Mapping[str, Any]) -> ChatRecord:
    return _answered(_system(value) + read_conversations(value["conversations"]), read_tools(value))


def _alpaca(value: Mapping[str, Any]) -> ChatRecord:
    """The instruction and its input, with a blank line between, are the user's turn."""
    answer = Message("assistant", text_of(value, "output"))
    return ChatRecord((*_system(value), *_instruction(value), answer))


def _instruction(value: Mapping[str, Any]) -> tuple[Message, ...]:
    asked = text_of(value, "instruction")
    if value.get("input"):
        asked += f"\n\n{text_of(value, 'input')}"
    return (*_history(value), Message("user", asked))


def _history(value: Mapping[str, Any]) -> tuple[Message, ...]:
    """Earlier [instruction, output] pairs, which are not learned again."""
    pairs = value.get("history") or []
    if not isinstance(pairs, list | tuple):
        raise DataError(f'expected "history" to be a list of pairs; found {kind(pairs)}')
    turns: list[Message] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f'expected "history[{index}]" to be two texts: an instruction and its output')
        asked, answer = (text_of({f"history[{index}]": text}, f"history[{index}]") for text in pair)
        turns += [Message("user", asked), Message("assistant", answer, weight=0)]
    return tuple(turns)


def _system(value: Mapping[str, Any]) -> tuple[Message, ...]:
    return (Message("system", text_of(value, "system")),) if value.get("system") else ()


def _question(value: Mapping[str, Any]) -> ChatRecord:
    question, answer = text_of(value, "question"), text_of(value, "answer")
    return ChatRecord((Message("user", question), Message("assistant", answer)))


def _completion(value: Mapping[str, Any], key: str = "completion") -> CompletionRecord | ChatRecord:
    """Text, or lists of messages, of which the completion alone is learned."""
    if isinstance(value["prompt"], list | tuple):
        asked = [_unlearned(turn) for turn in _asking(read_turns(value["prompt"], "prompt"), "prompt")]
        return ChatRecord((*asked, *_answering(value, key)), read_tools(value))
    return CompletionRecord(text_of(value, "prompt"), text_of(value, key))


def _text_record(value: Mapping[str, Any]) -> TextRecord:
    return TextRecord(text_of(value, "text"))


def _preference(value: Mapping[str, Any]) -> PreferenceRecord:
    """A text is a turn. Without a prompt the prompt is the shared beginning of both texts or lists. Lists may
    begin with a prompt that is given too."""
    asked = _asked(value)
    if asked is None and isinstance(value["chosen"], str) and isinstance(value["rejected"], str):
        prompt, chosen, rejected = split_texts(text_of(value, "chosen"), text_of(value, "rejected"))
    else:
        prompt, chosen, rejected = joined(asked, _said(value, "chosen"), _said(value, "rejected"))
    if prompt and prompt[0].role != "system":
        prompt = _system(value) + prompt
    _check_answer(chosen, "chosen")
    _check_answer(rejected, "rejected")
    return PreferenceRecord(_asking(prompt, "prompt"), chosen, rejected, read_tools(value))


def _asked(value: Mapping[str, Any]) -> tuple[Message, ...] | None:
    """The turns before the answers; None where the answers alone have them."""
    if value.get("conversations") is not None:
        return read_conversations(value["conversations"])
    for key in ("prompt", "question", "instruction", "input"):
        if value.get(key) is not None:
            return _instruction(value) if key == "instruction" else _turns(value, key, "user")
    return None


def _openai_preference(value: Mapping[str, Any]) -> PreferenceRecord:
    asked = value["input"]
    if not isinstance(asked, Mapping) or "messages" not in asked:
        raise DataError(f'expected "input" to be an object with "messages"; found {kind(asked)}')
    prompt = _asking(read_messages(asked["messages"], "input.messages"), "input.messages")
    chosen, rejected = (_answering(value, key) for key in ("preferred_output", "non_preferred_output"))
    return PreferenceRecord(prompt, chosen, rejected, read_tools(asked))


def _labelled(value: Mapping[str, Any]) -> LabelledRecord:
    """Text is a turn, as in preference pairs."""
    if (desirable := _label(value["label"])) is None:
        raise DataError(f'expected "label" to be true or false; found {quoted(value["label"])}')
    field = next((key for key in ("messages", "conversations") if key in value), "prompt")
    if field == "prompt":
        prompt, answer = _turns(value, "prompt", "user"), _answering(value, "completion")
    else:
        turns = read_turns(value[field], field)
        last = next((at for at in range(len(turns), 0, -1) if not is_answer(turns[at - 1])), 0)
        prompt, answer = turns[:last], turns[last:]
        _check_answer(answer, field)
    return LabelledRecord(_system(value) + _asking(prompt, field), answer, desirable, read_tools(value))


def _label(value: object) -> bool | None:
    """A label, which is text in tables; None for what is none."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _prompt(value: Mapping[str, Any]) -> PromptRecord:
    """A prompt; every key that is no part of it is the reference."""
    field = next(key for key in ("messages", "prompt", "question") if key in value)
    messages = _asking(_turns(value, field, "user"), field)
    ignored = _NO_REFERENCE[: _NO_REFERENCE.index(field) + 1] + _NO_REFERENCE[3:]
    reference = {key: found for key, found in value.items() if key not in ignored and found is not None}
    check_whole(reference, "reference")
    return PromptRecord(messages, reference, read_tools(value))


def _turns(value: Mapping[str, Any], key: str, role: str) -> tuple[Message, ...]:
    """Messages, or text as one turn of `role`."""
    found = value[key]
    if isinstance(found, str):
        return (Message(role, text_of(value, key)),)
    if not isinstance(found, list | tuple):
        raise DataError(f'expected "{key}" to be text or a list of messages; found {kind(found)}')
    return read_turns(found, key)


def _asking(messages: tuple[Message, ...], field: str) -> tuple[Message, ...]:
    """Messages that an answer can follow. Raises DataError for others."""
    if not messages:
        raise DataError(f'expected "{field}" to hold a message; found none')
    if messages[-1].role == "assistant":
        raise DataError(f'expected "{field}" to end before the answer; its last message is the assistant\'s')
    return messages


def _said(value: Mapping[str, Any], key: str) -> tuple[Message, ...]:
    """The turns of an answer, which may be text, one message or a list. A message that is not in a list may
    leave its role out: it is the assistant's."""
    found = value[key]
    if isinstance(found, Mapping):
        found = [found if "role" in found or "from" in found else {"role": "assistant", **found}]
    return _turns({key: found}, key, "assistant")


def _answering(value: Mapping[str, Any], key: str) -> tuple[Message, ...]:
    turns = _said(value, key)
    _check_answer(turns, key)
    return turns


def _check_answer(turns: tuple[Message, ...], field: str) -> None:
    """Raises DataError unless the turns begin and end with the assistant's, with tools' alone between."""
    if not turns:
        raise DataError(f'expected "{field}" to hold a message of the assistant; found none')
    if unfit := [turn.role for turn in turns if not is_answer(turn)]:
        raise DataError(f'expected "{field}" to hold messages of the assistant; found {quoted(unfit[0])}')
    if not turns[0].role == turns[-1].role == "assistant":
        raise DataError(f'expected "{field}" to begin and end with a message of the assistant')


def _unlearned(turn: Message) -> Message:
    return replace(turn, weight=0) if turn.role == "assistant" else turn


def _is_labelled(value: Mapping[str, Any]) -> bool:
    """Tells whether an answer has a label. Other values under this key are of a supervised file's own."""
    if _label(value.get("label")) is None:
        return False
    if _has("prompt", "completion")(value):
        return True
    turns = value.get("messages") or value.get("conversations")
    if not isinstance(turns, list | tuple) or not turns or not isinstance(turns[-1], Mapping):
        return False
    return turns[-1].get("role") == "assistant" or "from" in turns[-1]


def _is_graded_chat(value: Mapping[str, Any]) -> bool:
    """Tells whether messages await an answer, with a reference to compare it with."""
    turns = value.get("messages")
    if not isinstance(turns, list | tuple) or not turns or not isinstance(turns[-1], Mapping):
        return False
    return turns[-1].get("role") != "assistant" and _has_reference(value)


def _is_graded_prompt(value: Mapping[str, Any]) -> bool:
    return "prompt" in value and "completion" not in value and _has_reference(value)


def _has_reference(value: Mapping[str, Any]) -> bool:
    return any(key not in _NO_REFERENCE and found is not None for key, found in value.items())


def _keys(*names: str) -> frozenset[str]:
    return frozenset((*names, *_TOOLS))


TEXTS: Final = "texts"
_CHATS: Final = "chats in messages"
_QUESTION: Final = frozenset(("question", "answer"))
_COMPLETION: Final = _keys("prompt", "completion")
_COMPLETIONS: Final = "prompts with completions"
SUPERVISED: Final = (
    Format(_CHATS, _has("messages"), _chat, _keys("messages")),
    Format("ShareGPT conversations", _has("conversations"), _sharegpt, _keys("conversations", "system")),
    Format(_COMPLETIONS, _has("prompt", "completion"), _completion, _COMPLETION),
    Format(
        _COMPLETIONS,
        _has("prompt", "response"),
        partial(_completion, key="response"),
        _keys("prompt", "response"),
    ),
    Format("questions with answers", _has("question", "answer"), _question, _QUESTION),
    Format(
        "Alpaca instructions",
        _has("instruction", "output"),
        _alpaca,
        frozenset(("instruction", "input", "output", "system", "history")),
    ),
    Format(TEXTS, _has("text"), _text_record, frozenset(("text",))),
)
PREFERENCES: Final = (
    Format(
        "preference pairs",
        _has("chosen", "rejected"),
        _preference,
        _keys(
            "prompt", "conversations", "question", "instruction", "input", "history", "system", "chosen",
            "rejected",
        ),
    ),
    Format(
        "preference pairs of OpenAI",
        _has("input", "preferred_output", "non_preferred_output"),
        _openai_preference,
        frozenset(("input", "preferred_output", "non_preferred_output")),
    ),
)  # fmt: skip
_LABELLED: Final = "prompts with labelled completions"
_LABELLED_KEYS: Final = _keys("prompt", "completion", "messages", "conversations", "system", "label")
LABELLED: Final = tuple(
    Format(_LABELLED, _has(*keys, "label"), _labelled, _LABELLED_KEYS)
    for keys in (("prompt", "completion"), ("messages",), ("conversations",))
)
PROMPTS: Final = (
    Format("prompts in messages", _has("messages"), _prompt, None),
    Format("prompts", _has("prompt"), _prompt, None),
    Format("questions", _has("question"), _prompt, None),
)
# For data without an objective. Chats of one file may end with an answer or await one.
ANY: Final = (
    *PREFERENCES,
    Format(_LABELLED, _is_labelled, _labelled, _LABELLED_KEYS),
    Format(_CHATS, _is_graded_chat, _prompt, None),
    *SUPERVISED,
    Format("prompts with references", _is_graded_prompt, _prompt, None),
)

SETS: Final[Mapping[str, tuple[Format, ...]]] = {
    "supervised": SUPERVISED,
    "preferences": PREFERENCES,
    "labelled": LABELLED,
    "prompts": PROMPTS,
    "any": ANY,
}
KINDS: Final[tuple[type[Record], ...]] = (
    ChatRecord, CompletionRecord, TextRecord, PreferenceRecord, LabelledRecord, PromptRecord,
)  # fmt: skip
_IN_WORDS: Final = {
    SUPERVISED: '"messages", "conversations", "prompt" and "completion", "question" and "answer", '
    '"instruction" and "output", or "text"',
    PREFERENCES: '"prompt", "chosen" and "rejected", or "input", "preferred_output" and '
    '"non_preferred_output"',
    LABELLED: '"prompt", "completion" and "label", or "messages" and "label"',
    PROMPTS: '"messages", "prompt" or "question"',
    ANY: '"messages", "conversations", "prompt" and "completion", "question" and "answer", "instruction" and '
    '"output", "text", or "prompt", "chosen" and "rejected"',
}
_READ: Final = {
    formats: frozenset((*_NO_REFERENCE, *MEDIA)).union(*(one.keys or () for one in formats))
    for formats in SETS.values()
}
# The data of each purpose, those with the most telling keys first.
_PURPOSES: Final = {
    PREFERENCES: "preference training (DPO, ORPO)",
    LABELLED: "KTO",
    SUPERVISED: "supervised training",
    PROMPTS: "reinforcement",
}


def expected(formats: tuple[Format, ...]) -> str:
    """The keys of these formats, for an error."""
    return f"a JSON object with {_IN_WORDS[formats]}"


def with_known_keys(value: object, formats: tuple[Format, ...]) -> object:
    """An object whose keys that these formats read are in lower case, which headers often are not. Keys of a
    reference stay: a grader names them as they are."""
    known = _READ[formats]
    if not isinstance(value, Mapping) or value.keys() <= known:
        return value
    others = {
        key: lower
        for key in value
        if key not in known and isinstance(key, str) and (lower := key.strip().lower()) in known
        if lower not in value
    }
    return {others.get(key, key): found for key, found in value.items()} if others else value


def detect(value: object, formats: tuple[Format, ...] = ANY) -> Format:
    """The first of `formats` whose keys `value` has. Raises DataError, without a place."""
    if not isinstance(value, Mapping):
        raise DataError(f"expected {expected(formats)}; found {kind(value)}")
    for format in formats:
        if format.fits(value):
            return format
    keys = ", ".join(quoted(key).replace("'", '"') for key in list(value)[:8]) or "an empty object"
    raise DataError(f"expected {expected(formats)}; found {keys}{_purpose(value)}")


def _purpose(value: Mapping[str, Any]) -> str:
    """The kind of data that an object is, and what that is for; empty where it is none."""
    for formats, purpose in _PURPOSES.items():
        for format in formats:
            if format.fits(value):
                return f": {format.name}, which are for {purpose}"
    return ""
