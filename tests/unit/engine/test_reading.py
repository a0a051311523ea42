"""A job's data is read as its objective needs it, from a file or from memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from coserve.engine.reading import Reading, read_data
from coserve.errors import ConfigError, DataError
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Example
from coserve.train.labelled import TokenAnswer
from coserve.train.objectives import objective_of
from coserve.train.pairs import TokenPair
from coserve.train.prompts import TokenPrompt
from models import letter_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
PAIR = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
LABELLED = {"prompt": "hi", "completion": "yes", "label": True}
PROMPT = {"messages": CHAT["messages"][:1], "answer": "yes"}
OBJECTIVES: dict[str, Any] = {
    "supervised": "supervised",
    "dpo": "dpo",
    "orpo": "orpo",
    "kto": "kto",
    "distillation": "distillation",
    "reinforcement": {
        "type": "reinforcement",
        "grader": {"type": "string_check", "reference": "{{item.answer}}"},
    },
}
RECORDS: dict[str, Any] = {
    "supervised": CHAT,
    "distillation": CHAT,
    "dpo": PAIR,
    "orpo": PAIR,
    "kto": LABELLED,
    "reinforcement": PROMPT,
}
EXAMPLE = Example((1, 2), (2, -100))
TOKENS: dict[str, Any] = {
    "supervised": EXAMPLE,
    "distillation": EXAMPLE,
    "dpo": TokenPair(EXAMPLE, Example((1, 3), (3, -100))),
    "orpo": TokenPair(EXAMPLE, Example((1, 3), (3, -100))),
    "kto": TokenAnswer(EXAMPLE, True),
    "reinforcement": TokenPrompt((1, 2), {"answer": "yes"}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_files_and_records_of_each_objective(name: str, tmp_path: Path) -> None:
    objective, config, text = objective_of(OBJECTIVES[name]), TrainingConfig(), Text(letter_tokenizer())
    file = tmp_path / "data.jsonl"
    file.write_text(f"{json.dumps(RECORDS[name])}\n" * 3)
    found = read_data(file, config, objective, text, reading=Reading(most=2))
    held = read_data([RECORDS[name]] * 2, config, objective, text)
    assert (found.examples, found.digest) == (held.examples, held.digest)
    assert (found.container, found.is_whole) == ("JSON lines", False) and found.format
    assert (held.container, held.is_whole, held.format) == ("", True, found.format)
    assert len(found.examples) == 2 * objective.group
    assert found.references == (({"answer": "yes"},) * 2 if name == "reinforcement" else ())
    assert len(read_data([TOKENS[name]] * 2, config, objective, None).examples) == 2 * objective.group
    assert found.desirable == ((True,) * 2 if name == "kto" else ())
    with pytest.raises(ConfigError, match="tokenizer"):
        read_data(file, config, objective, None)


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("supervised", "dpo", 'found "prompt", "chosen", "rejected": preference pairs, which are for pref'),
        ("supervised", "reinforcement", "chats that await an answer are for reinforcement"),
        (
            "dpo",
            "supervised",
            '"chosen" and "rejected".* found "messages": chats in messages, which are for s',
        ),
        ("orpo", "reinforcement", 'found "messages", "answer": chats in messages'),
        ("dpo", "kto", "prompts with labelled completions, which are for KTO"),
        (
            "kto",
            "dpo",
            '"prompt", "completion" and "label", or .*; found .* which are for preference training',
        ),
        ("kto", "supervised", "which are for supervised training"),
        ("reinforcement", "supervised", 'expected "messages" to end before the answer'),
        ("reinforcement", "dpo", "the grader needs item.answer, and the record has chosen, rejected"),
        ("distillation", "dpo", "preference pairs, which are for preference training"),
    ],
)
def test_data_of_another_objective_is_refused(name: str, other: str, words: str, tmp_path: Path) -> None:
    """With its place, what was expected, and what the data is for; after a line that is fine too."""
    objective, text = objective_of(OBJECTIVES[name]), Text(letter_tokenizer())
    file = tmp_path / "data.jsonl"
    for number in (1, 2):
        file.write_text(f"{json.dumps(RECORDS[name])}\n" * (number - 1) + json.dumps(RECORDS[other]))
        with pytest.raises(DataError, match=rf"^data\.jsonl, line {number}: .*{words}" if number == 1 else
                           rf"^data\.jsonl, line {number}: "):  # fmt: skip
            read_data(file, TrainingConfig(), objective, text)


def test_what_a_record_is_refused_for_later_has_its_place_too(tmp_path: Path) -> None:
    """Errors that only the grader or the chat template finds name lines, and rows in memory."""
    objective, text = objective_of(OBJECTIVES["reinforcement"]), Text(letter_tokenizer())
    lines = [PROMPT, {**PROMPT, "answer": None, "id": 3}]
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match=r"^data\.jsonl, line 3: the grader needs item\.answer"):
        read_data(file, TrainingConfig(), objective, text)
    with pytest.raises(DataError, match=r"^data, example 2: the grader needs item\.answer"):
        read_data(lines, TrainingConfig(), objective, text)
    tokenizer = letter_tokenizer()
    refused = "{% if messages[0].content == 'bad' %}{{ raise_exception('a bad one') }}{% endif %}"
    tokenizer.chat_template = refused + str(tokenizer.chat_template)
    for record, name in ((CHAT, "supervised"), (PAIR, "dpo"), (LABELLED, "kto")):
        file.write_text(f"{json.dumps(record)}\n" + json.dumps(record).replace('"hi"', '"bad"'))
        with pytest.raises(DataError, match=r"^data\.jsonl, line 2: the chat template refuses .*: a bad one"):
            read_data(file, TrainingConfig(), objective_of(OBJECTIVES[name]), Text(tokenizer))


def test_only_the_first_records_are_read(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f"{json.dumps(CHAT)}\n" * 2 + "{broken\n")
    text = Text(letter_tokenizer())
    objective = objective_of("supervised")
    found = read_data(file, TrainingConfig(), objective, text, reading=Reading(most=2))
    assert len(found.examples) == 2 and not found.is_whole
    with pytest.raises(DataError, match=r"^mine\.jsonl, line 3"):
        read_data(file, TrainingConfig(), objective, text, reading=Reading(most=3, name="mine.jsonl"))
