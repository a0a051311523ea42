"""Prompts of preference pairs that have none of their own: the beginning that both answers share."""

import re
from itertools import islice
from typing import Final

from coserve.errors import DataError
from coserve.jobs.limits import LIMITS
from coserve.jobs.messages import Message, text_of

Split = tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]
"""The prompt, the rest of the first and the rest of the second."""

# Turns of a transcript, as in Anthropic's hh-rlhf: each begins a line with its speaker.
_SPEAKER: Final = re.compile(r"(?:\A\s*|\n)(Human|User|Assistant|System):")
_ROLES: Final = {"Human": "user", "User": "user", "Assistant": "assistant", "System": "system"}
_WHITE: Final = re.compile(r"\s")


def split_turns(first: tuple[Message, ...], second: tuple[Message, ...]) -> Split:
    """Splits two chats after their longest common beginning that ends before a turn of the assistant."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    while same and first[same - 1].role == "assistant":
        same -= 1
    return first[:same], first[same:], second[same:]


def split_texts(first: str, second: str) -> Split:
    """Splits two texts, each a prompt with its answer. Transcripts ("Human: ...", "Assistant: ...") are split
    as chats. Others are split where the last line begins that both share the beginning of, or else at their
    last common white space: a word is never cut, as it is by TRL's `extract_prompt`. Raises DataError where
    they share no beginning."""
    chats = _transcript(first, "chosen"), _transcript(second, "rejected")
    if chats[0] is not None and chats[1] is not None:
        return split_turns(chats[0], chats[1])
    differing = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    same = first[: next(differing, min(len(first), len(second)))]
    for at in (same.rfind("\n"), _last_white(same)):
        if prompt := same[: max(at, 0)].strip():
            chosen, rejected = (
                (Message("assistant", text_of({key: text[at:].strip()}, key)),)
                for key, text in (("chosen", first), ("rejected", second))
            )
            return (Message("user", prompt),), chosen, rejected
    raise DataError(
        'expected "prompt" to hold a message; found none, and "chosen" and "rejected" share no beginning'
    )


def joined(
    asked: tuple[Message, ...] | None, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> Split:
    """Splits two lists, each of the answer alone or of the whole chat, of which `asked` are turns that a
    record gives beside: the whole prompt, or the first or last turns of the one that both chats begin with.
    Raises DataError where that has neither."""
    are_whole = [bool(turns) and not is_answer(turns[0]) for turns in (chosen, rejected)]
    if asked is None or all(are_whole):
        split = split_turns(chosen, rejected)
        if asked is None or _begins_with(split[0], asked) or _begins_with(split[0][-len(asked) :], asked):
            return split
        raise DataError(
            'expected "chosen" and "rejected" to begin with the turns of the prompt, or with the answer; '
            "found other turns before it"
        )
    first, second = (
        turns[len(asked) :] if len(turns) > len(asked) and _begins_with(turns, asked) else turns
        for turns in (chosen, rejected)
    )
    return asked, first, second


def is_answer(turn: Message) -> bool:
    """Tells whether a turn may be of an answer, the assistant's or a tool's."""
    return turn.role in ("assistant", "tool")


def _begins_with(turns: tuple[Message, ...], asked: tuple[Message, ...]) -> bool:
    """Tells whether a chat begins with the same turns, but for white space around their texts."""
    return [(one.role, one.content.strip()) for one in turns[: len(asked)]] == [
        (one.role, one.content.strip()) for one in asked
    ]


def _last_white(text: str) -> int:
    """The index of the last white space, -1 where there is none."""
    return len(text) - 1 - found.start() if (found := _WHITE.search(text[::-1])) else -1


def _transcript(text: str, field: str) -> tuple[Message, ...] | None:
    """The turns of a transcript that the assistant ends; None for other text. Raises DataError."""
    marks = list(islice(_SPEAKER.finditer(text), LIMITS.turns + 1))
    if not marks or marks[0].start():
        return None
    if len(marks) > LIMITS.turns:
        raise DataError(f'expected at most {LIMITS.turns} messages in "{field}"; found more: split the chat')
    if marks[-1][1] != "Assistant":
        return None
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return tuple(
        Message(_ROLES[mark[1]], text_of({field: text[mark.end() : end].strip()}, field))
        for mark, end in zip(marks, ends, strict=True)
    )
