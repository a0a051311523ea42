"""Parquet files and folders of `datasets`, as pyarrow writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.datasets import read, read_preferences, read_prompts
from coserve.jobs.formats import ChatRecord, CompletionRecord, PreferenceRecord, PromptRecord, Record
from coserve.jobs.messages import Message

pa = pytest.importorskip("pyarrow")
USER, ANSWER = Message("user", "Hi"), Message("assistant", "Hello")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"name": "f", "arguments": "{}"}


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def saved(folder: Path, *shards: list[dict[str, Any]]) -> Path:
    """The layout of `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    files = []
    for number, rows in enumerate(shards):
        table = pa.Table.from_pylist(rows)
        files.append({"filename": f"data-{number:05d}-of-{len(shards):05d}.arrow"})
        with (
            pa.OSFile(str(folder / files[-1]["filename"]), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_format_type": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_rows_are_records(tmp_path: Path, compression: str) -> None:
    rows = [{"prompt": f"{n}", "completion": "b", "note": None if n % 2 else "x"} for n in range(300)]
    path = parquet(tmp_path / "a.parquet", rows, compression=compression, row_group_size=70)
    assert list(read(path)) == [CompletionRecord(f"{n}", "b") for n in range(300)]


def test_fields_that_other_rows_have_are_absent(tmp_path: Path) -> None:
    """Columns are the union of all rows' fields: what is null in a row was not there."""
    calls = [
        *CHAT[:1],
        {"role": "assistant", "tool_calls": [{"function": CALL}], "content": None, "weight": 0},
    ]
    path = parquet(
        tmp_path / "a.parquet",
        [{"messages": CHAT, "tools": None}, {"messages": calls, "tools": '[{"name": "f"}]'}],
    )
    first, second = read(path)
    assert first == ChatRecord((USER, ANSWER))
    assert isinstance(second, ChatRecord) and second.messages[1].tool_calls[0].name == "f" and second.tools


@pytest.mark.parametrize(
    ("reads", "row", "record"),
    [
        (read_preferences, {"prompt": "Hi", "chosen": CHAT[1:], "rejected": CHAT[1:]},
         PreferenceRecord((USER,), (ANSWER,), (ANSWER,))),
        (read_prompts, {"prompt": CHAT[:1], "solution": 4, "x": [1.5]},
         PromptRecord((USER,), {"solution": 4, "x": [1.5]})),
    ],
)  # fmt: skip
def test_pairs_and_prompts_are_read_too(tmp_path: Path, reads: Any, row: Any, record: Record) -> None:
    assert list(reads(parquet(tmp_path / "a.parquet", [row]))) == [record]


def test_a_saved_folder_is_read_in_its_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "completion": "b"} for n in range(100)]
    folder = saved(tmp_path / "whole", rows[:60], rows[60:])
    want = [CompletionRecord(f"{n}", "b") for n in range(100)]
    assert list(read(folder)) == want
    splits = tmp_path / "splits"
    saved(splits / "train", rows)
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(read(splits)) == want
    (splits / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(
        DataError, match=r"^splits: expected a split \"train\", or the folder of one split; found \['t"
    ):
        list(read(splits))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "cannot be read: "),
        ("[]", "expected state.json to be an object"),
        ("{}", 'expected "_data_files" in state.json to be a list of objects'),
        ('{"_data_files": [{"filename": "../secret.arrow"}]}', "to name a file of the folder"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "No such file"),
    ],
)
def test_a_folder_that_is_damaged_is_refused(tmp_path: Path, state: str, said: str) -> None:
    folder = saved(tmp_path / "a", [{"text": "a"}])
    (folder / "state.json").write_text(state)
    with pytest.raises(DataError) as caught:
        list(read(folder))
    assert str(caught.value).startswith("a: ") and said in str(caught.value)


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": ""}])
    with pytest.raises(DataError) as caught:
        list(read(path))
    first, second = str(caught.value).splitlines()
    assert first.startswith("a.parquet, row 2: expected a JSON object with ")
    assert second == 'a.parquet, row 3: expected "text" to hold text; found it empty'
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"^a.parquet: cannot be read: Parquet magic bytes not found"):
        list(read(path))
