"""A job's data is read as its objective needs it, from a file or from memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from coserve.engine.reading import read_data
from coserve.errors import ConfigError, DataError
from coserve.text import Text
from coserve.train.config import TrainingConfig
from coserve.train.example import Example
from coserve.train.objectives import objective_of
from coserve.train.pairs import TokenPair
from coserve.train.prompts import TokenPrompt
from models import letter_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
PAIR = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
PROMPT = {"messages": CHAT["messages"][:1], "answer": "yes"}
OBJECTIVES: dict[str, Any] = {
    "supervised": "supervised",
    "dpo": "dpo",
    "orpo": "orpo",
    "distillation": "distillation",
    "reinforcement": {
        "type": "reinforcement",
        "grader": {"type": "string_check", "reference": "{{item.answer}}"},
    },
}
RECORDS = {"supervised": CHAT, "distillation": CHAT, "dpo": PAIR, "orpo": PAIR, "reinforcement": PROMPT}
EXAMPLE = Example((1, 2), (2, -100))
TOKENS: dict[str, Any] = {
    "supervised": EXAMPLE,
    "distillation": EXAMPLE,
    "dpo": TokenPair(EXAMPLE, Example((1, 3), (3, -100))),
    "orpo": TokenPair(EXAMPLE, Example((1, 3), (3, -100))),
    "reinforcement": TokenPrompt((1, 2), {"answer": "yes"}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_files_and_records_of_each_objective(name: str, tmp_path: Path) -> None:
    objective, config, text = objective_of(OBJECTIVES[name]), TrainingConfig(), Text(letter_tokenizer())
    file = tmp_path / "data.jsonl"
    file.write_text(f"{json.dumps(RECORDS[name])}\n" * 3)
    found = read_data(file, config, objective, text, most=2)
    assert found == read_data([RECORDS[name]] * 2, config, objective, text)
    assert len(found.examples) == 2 * objective.group
    assert found.references == (({"answer": "yes"},) * 2 if name == "reinforcement" else ())
    assert len(read_data([TOKENS[name]], config, objective, None).examples) == objective.group
    with pytest.raises(ConfigError, match="tokenizer"):
        read_data(file, config, objective, None)


@pytest.mark.parametrize(
    ("name", "other"), [("supervised", "dpo"), ("dpo", "supervised"), ("orpo", "reinforcement")]
)
def test_data_of_another_objective_is_refused(name: str, other: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(RECORDS[other]))
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: expected"):
        read_data(file, TrainingConfig(), objective_of(OBJECTIVES[name]), Text(letter_tokenizer()))
