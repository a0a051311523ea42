"""Records in the shapes of published data, in each container and encoding: all containers give equal records,
which are those that the generator of the shape states."""

import codecs
import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.datasets import RecordReader, Records, read, read_labelled, read_preferences
from coserve.jobs.formats import ChatRecord, CompletionRecord, LabelledRecord, PreferenceRecord, TextRecord
from coserve.jobs.messages import Message, ToolCall

read_any = RecordReader("any")

TRIED = int(os.environ.get("COSERVE_ATTACK_SHAPES", "400"))
COLUMNS = 6  # of these, files that a process of their own reads: 0.4 s each
PIECES = [
    "one",
    "two; three",
    "a, b",
    "tab\there",
    '"so"',
    "Größe",
    "🎉",
    "[{",
    "}]",
    "\\",
    "line\nline",
    ": 7",
]
Draws = random.Random
Made = tuple[dict[str, Any], Any]
"""A record as it is published, and what is read of it."""


def text(draws: Draws) -> str:
    return " ".join(draws.choice(PIECES) for _ in range(draws.randint(1, 5)))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def said(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


def chat(draws: Draws) -> Made:
    texts = [text(draws) for _ in range(2 * draws.randint(1, 3))]
    turns = [Message(("user", "assistant")[n % 2], said) for n, said in enumerate(texts)]
    return {"messages": [turn(one.role, one.content) for one in turns]}, ChatRecord(tuple(turns))


def parts(draws: Draws) -> Made:
    asked, answer = [text(draws) for _ in range(draws.randint(1, 3))], text(draws)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": one} for one in asked]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return {"messages": turns}, ChatRecord((Message("user", "".join(asked)), Message("assistant", answer)))


def weighed(draws: Draws) -> Made:
    asked, first, second, answer = (text(draws) for _ in range(4))
    turns = [turn("user", asked), turn("assistant", first), turn("user", second), turn("assistant", answer)]
    weights = 0.0, 0.0, 0.0, 1.0
    read = [Message(one["role"], one["content"]) for one in turns]
    read[1] = Message("assistant", first, weight=0)
    record = [{**one, "loss_weight": weight} for one, weight in zip(turns, weights, strict=True)]
    return {"messages": record}, ChatRecord(tuple(read))


def sharegpt(draws: Draws) -> Made:
    asked, answer, system = text(draws), text(draws), text(draws)
    read = ChatRecord((Message("system", system), Message("user", asked), Message("assistant", answer)))
    return {"conversations": [said("human", asked), said("gpt", answer)], "system": system}, read


def alpaca(draws: Draws) -> Made:
    asked, given, answer = text(draws), draws.choice(["", text(draws)]), text(draws)
    whole = f"{asked}\n\n{given}" if given else asked
    record = {"instruction": asked, "input": given, "output": answer}
    return record, ChatRecord((Message("user", whole), Message("assistant", answer)))


def completion(draws: Draws) -> Made:
    asked, answer = text(draws), text(draws)
    return {"prompt": asked, "completion": answer}, CompletionRecord(asked, answer)


def question(draws: Draws) -> Made:
    asked, answer = text(draws), text(draws)
    record = {"question": asked, "answer": answer}
    return record, ChatRecord((Message("user", asked), Message("assistant", answer)))


def plain(draws: Draws) -> Made:
    found = text(draws)
    return {"text": found}, TextRecord(found)


def old_calls(draws: Draws) -> Made:
    asked, told, answer = text(draws), text(draws), text(draws)
    turns = [
        {"role": "user", "content": asked, "function_call": None, "name": None},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"n": 1}'}},
        {"role": "function", "content": told, "name": "f"},
        turn("assistant", answer),
    ]
    read = ChatRecord(
        (
            Message("user", asked),
            Message("assistant", "", tool_calls=(ToolCall("f", {"n": 1}),)),
            Message("tool", told, name="f"),
            Message("assistant", answer),
        ),
        ({"type": "function", "function": {"name": "f"}},),
    )
    return {"messages": turns, "functions": '[{"name": "f"}]'}, read


def answers(draws: Draws) -> tuple[str, str, str]:
    """A prompt and two answers that begin differently."""
    return text(draws), f"Yes {text(draws)}", f"No {text(draws)}"


def pair_of(asked: str, chosen: str, rejected: str) -> PreferenceRecord:
    messages = ((Message("user", asked),), (Message("assistant", chosen),), (Message("assistant", rejected),))
    return PreferenceRecord(*messages)


def pair_texts(draws: Draws) -> Made:
    asked, chosen, rejected = answers(draws)
    return {"prompt": asked, "chosen": chosen, "rejected": rejected}, pair_of(asked, chosen, rejected)


def pair_lists(draws: Draws) -> Made:
    asked, *both = answers(draws)
    lists = [[turn("user", asked), turn("assistant", answer)] for answer in both]
    record: dict[str, Any] = {"chosen": lists[0], "rejected": lists[1]}
    return {**draws.choice([{}, {"prompt": asked}]), **record}, pair_of(asked, *both)


def pair_objects(draws: Draws) -> Made:
    asked, chosen, rejected = answers(draws)
    if draws.random() < 0.5:
        record: dict[str, Any] = {"prompt": asked, "chosen": turn("assistant", chosen)}
        record["rejected"] = turn("assistant", rejected)
    else:
        record = {"conversations": [said("human", asked)], "chosen": said("gpt", chosen)}
        record["rejected"] = said("gpt", rejected)
    return record, pair_of(asked, chosen, rejected)


def pair_whole(draws: Draws) -> Made:
    asked, chosen, rejected = (" ".join(one.split()) for one in answers(draws))
    if draws.random() < 0.5:
        both = [f"\n\nHuman: {asked}\n\nAssistant: {answer}" for answer in (chosen, rejected)]
    else:
        both = [f"{asked}\n{answer}" for answer in (chosen, rejected)]
    return {"chosen": both[0], "rejected": both[1]}, pair_of(asked, chosen, rejected)


def labelled(draws: Draws) -> Made:
    asked, answer, label = text(draws), text(draws), draws.random() < 0.5
    read = LabelledRecord((Message("user", asked),), (Message("assistant", answer),), label)
    if draws.random() < 0.5:
        return {"prompt": asked, "completion": answer, "label": label}, read
    return {"messages": [turn("user", asked), turn("assistant", answer)], "label": label}, read


SHAPES: list[tuple[Callable[[Draws], Made], Callable[..., Records[Any]]]] = [
    *((make, read) for make in (chat, parts, weighed, sharegpt, alpaca, completion, question)),
    *((make, read) for make in (plain, old_calls)),
    *((make, read_preferences) for make in (pair_texts, pair_lists, pair_objects, pair_whole)),
    (labelled, read_labelled),
]  # fmt: skip


def jsonl(rows: Sequence[dict[str, Any]], draws: Draws) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=draws.random() < 0.5).encode() + b"\n" for row in rows)


def array(rows: Sequence[dict[str, Any]], draws: Draws) -> bytes:
    indent = draws.choice([None, 1, 4])
    whole = draws.choice([rows, {"data": rows}, {"version": "1.0", "data": rows, "more": [{"x": 1}]}])
    return json.dumps(whole, ensure_ascii=draws.random() < 0.5, indent=indent).encode()


def table(rows: Sequence[dict[str, Any]], draws: Draws, usual: str = ",") -> bytes:
    file = io.StringIO()
    header = list(rows[0])
    draws.shuffle(header)
    delimiter = draws.choice(",;\t") if len(header) > 1 else usual
    writer = csv.DictWriter(
        file, header, delimiter=delimiter, lineterminator="\n", quoting=draws.choice([0, 1])
    )
    writer.writeheader()
    for row in rows:
        cells = {
            key: str(one) if isinstance(one, str | bool) else json.dumps(one) for key, one in row.items()
        }
        writer.writerow(cells)
    return file.getvalue().encode()


CONTAINERS = {".jsonl": jsonl, ".json": array, ".csv": table, ".tsv": partial(table, usual="\t")}


def drawn(
    seed: object,
) -> tuple[list[dict[str, Any]], list[Any], list[str], Callable[..., Records[Any]], Draws]:
    """Rows of one shape, what is read of them, the keys that are not, and how they are read."""
    draws = random.Random(f"shapes/{seed}")
    make, reads = draws.choice(SHAPES)
    made = [make(draws)]
    while len(made) < draws.choice([2, 5, 9]):  # a file's records have the same keys
        if (other := make(draws))[0].keys() == made[0][0].keys():
            made.append(other)
    spell = {key: draws.choice([key, key, key.title(), key.upper()]) for key in made[0][0]}
    beside = draws.sample(["id", "source", "score_chosen", "Label of ours"], draws.randint(0, 2))
    rows = [
        {**{spell[key]: one for key, one in row.items()}, **dict.fromkeys(beside, 0.5)} for row, _ in made
    ]
    return rows, [read for _, read in made], beside, reads, draws


def test_all_containers_and_encodings_give_the_same_records(tmp_path: Path) -> None:
    for seed in range(TRIED):
        rows, want, beside, reads, draws = drawn(seed)
        suffix = list(CONTAINERS)[seed % len(CONTAINERS)]
        data = CONTAINERS[suffix](rows, draws)
        if suffix.startswith(".j") and draws.random() < 0.5:
            data = data.replace(b"\n", b"\r\n")
        if (encoding := draws.random()) < 0.3:
            data = codecs.BOM_UTF8 + data
        elif encoding < 0.5:
            data = data.decode().encode("utf-16")
        if draws.random() < 0.3:
            data, suffix = gzip.compress(data, mtime=0), f"{suffix}.gz"
        path = tmp_path / f"{seed}{suffix}"
        path.write_bytes(data)
        for reading in (reads, read_any):
            records = reading(path)
            assert list(records) == want, (seed, rows)
        records = reads(path)
        assert len(list(records)) == len(rows) and set(records.seen.ignored) == set(beside), (seed, rows)


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow writes columns")
def test_columns_give_the_same_records(tmp_path: Path) -> None:
    from pyarrow import Table, ipc
    from pyarrow.parquet import write_table

    for seed in range(max(COLUMNS, TRIED // 80)):
        rows, want, beside, reads, _ = drawn(f"columns {seed}")
        tabled = Table.from_pylist(rows)
        path = tmp_path / f"{seed}.parquet"
        if seed % 2:
            write_table(tabled, path)
        else:
            path = tmp_path / str(seed)
            path.mkdir()
            (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
            with ipc.new_stream(str(path / "data.arrow"), tabled.schema) as stream:
                stream.write_table(tabled)
        records = reads(path)
        assert list(records) == want and set(records.seen.ignored) == set(beside), (seed, rows)


def test_an_array_without_one_bracket_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for seed in range(TRIED // 4):
        rows, _, _, reads, draws = drawn(f"spoilt {seed}")
        lines = json.dumps(rows, indent=1).splitlines()
        at = draws.choice(
            [n for n, line in enumerate(lines) if n and line.strip(" ,") in ("{", "}", "[", "]")]
        )
        number = sum(line == " {" for line in lines[: at + 1])
        lines[at] = lines[at].strip(" {}[]")
        path.write_bytes("\n".join(lines).encode())
        with pytest.raises(DataError) as caught:
            list(reads(path))
        said = str(caught.value).splitlines()[0]
        assert said.startswith(f"a.json, record {number}, line "), (seed, at, said)
