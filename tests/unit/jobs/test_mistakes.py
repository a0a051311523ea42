"""One mistake in each format, after a record without any, in each container: its place, field and value."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.datasets import RecordReader

read_any = RecordReader("any")

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {"messages": [USER, ANSWER], "tools": [TOOL]}
ALPACA = {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
PAIR: dict[str, Any] = {"prompt": "Hi", "chosen": [ANSWER], "rejected": [ANSWER]}
OPENAI = {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]}
LABELLED = {"prompt": "Hi", "completion": "Hello", "label": True}
PROMPT = {"prompt": "Hi", "answer": "4"}
MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (CHAT, {"messages": [USER, {**ANSWER, "weight": 2}]},
     'message 2: expected "weight" to be 0 or 1; found 2'),
    (CHAT, {"messages": [{**USER, "weight": 1}, ANSWER]},
     """message 1: expected "weight" at the role "assistant" only; found it at 'user'"""),
    (CHAT, {"messages": [USER, {**ANSWER, "tool_calls": [{**CALL, "function": {"name": 3}}]}]},
     'message 2: expected "tool_calls[0].function.name" to hold text; found 3'),
    (CHAT, {"messages": [{**USER, "content": ["x"]}, ANSWER]},
     'message 1: expected "content[0]" to be an object with "type" and "text"; found a string'),
    (CHAT, {"tools": [{"type": "search"}]}, """expected "tools[0].type" to be "function"; found 'search'"""),
    (ALPACA, {"output": ""}, 'expected "output" to hold text; found it empty'),
    (ALPACA, {"history": [["Hi"]]}, 'expected "history[0]" to be two texts: an instruction and its'),
    (SHAREGPT, {"conversations": [{"from": "alien", "value": "Hi"}]},
     '"conversations", message 1: expected "from" to be one of system, human'),
    (PAIR, {"rejected": [USER]}, """expected "rejected" to hold messages of the assistant; found 'user'"""),
    (PAIR, {"chosen": ""}, 'expected "chosen" to hold text; found it empty'),
    (OPENAI, {"input": {"messages": [USER, ANSWER]}}, 'expected "input.messages" to end before the answer'),
    (LABELLED, {"label": "maybe"}, "expected prompts with labelled completions, as in"),
    (LABELLED, {"completion": " "}, 'expected "completion" to hold text; found it empty'),
    (PROMPT, {"prompt": ""}, 'expected "prompt" to hold text; found it empty'),
]  # fmt: skip


def table(*rows: dict[str, Any]) -> bytes:
    """CSV, whose lists and objects are JSON in their cells."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
        )
    return text.getvalue().encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz"])
@pytest.mark.parametrize(("good", "wrong", "said"), MISTAKES)
def test_a_mistake_is_told_with_its_place_and_field(
    tmp_path: Path, good: dict[str, Any], wrong: dict[str, Any], said: str, name: str
) -> None:
    rows = [good, {**good, **wrong}]
    data = table(*rows) if ".csv" in name else b"\n".join(json.dumps(row).encode() for row in rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    line = 3 if ".csv" in name else 2  # the first one names the columns
    with pytest.raises(DataError) as caught:
        list(read_any(path))
    assert str(caught.value).startswith(f"{name}, line {line}: {said}")


@pytest.mark.parametrize("number", [7, 8])
def test_a_mistake_in_columns_is_told_with_its_row(tmp_path: Path, number: int) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    good, wrong, said = MISTAKES[number]
    rows = [{key: row[key] for key in good} for row in (good, {**good, **wrong})]
    write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        list(read_any(tmp_path / "a.parquet"))
    assert str(caught.value).startswith(f"a.parquet, row 2: {said}")
