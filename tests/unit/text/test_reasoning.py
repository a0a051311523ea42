"""Reasoning before an answer, wherever its text is cut."""

import random
import secrets
from collections.abc import Sequence

import pytest

from coserve.text.deltas import joined
from coserve.text.markup import AnswerReader, Markup
from coserve.text.tools.formats import HERMES
from coserve.text.tools.tool import Tool


def read(pieces: Sequence[str], is_open: bool) -> tuple[str, str, int]:
    """(reasoning, text, number of calls) of an answer in pieces."""
    reader = AnswerReader(Markup(True, is_open, HERMES, {"f": Tool("f")}))
    deltas = [
        delta for number, piece in enumerate(pieces, 1) for delta in reader.push(piece, number == len(pieces))
    ]
    said, thought, calls = joined(deltas)
    return thought, said, len(calls)


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
KNOWN: list[tuple[str, bool, tuple[str, str, int]]] = [
    ("<think>\nI think.\n</think>\n\nHi", False, ("I think.", "Hi", 0)),
    ("I\n\nthink.</think>Hi\n", True, ("I\n\nthink.", "Hi\n", 0)),
    ("Hi <think>no</think>", False, ("", "Hi <think>no</think>", 0)),
    (f"<think>{CALL}</think>\n{CALL}", False, (CALL, "", 1)),
    ("I think", True, ("I think", "", 0)),
    ("<think>\n\n</think>\n\nHi", False, ("", "Hi", 0)),
    ("</think>Hi", True, ("", "Hi", 0)),
    ("<thin", False, ("", "<thin", 0)),
    ("", False, ("", "", 0)),
]


@pytest.mark.parametrize(("text", "is_open", "told"), KNOWN)
def test_reasoning_is_told_apart(text: str, is_open: bool, told: tuple[str, str, int]) -> None:
    assert read([text], is_open) == told
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]], is_open) == told


def test_where_it_is_cut_makes_no_difference() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    pieces = ["<think>", "</think>", "<", "/think>", "\n", "\n" * 20, " " * 20, "a", CALL, "<tool_call>"]
    for _ in range(200):
        text, is_open = "".join(draw.choices(pieces, k=draw.randint(1, 8))), draw.random() < 0.5
        whole = read([text], is_open)
        assert read(list(text), is_open) == whole
        places = sorted(draw.choices(range(len(text) + 1), k=3))
        cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert read(cut, is_open) == whole
