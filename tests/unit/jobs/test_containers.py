"""Files that hold training data: compressed ones, tables, and the bounds of both."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.containers import suffix_of, values
from coserve.jobs.datasets import read, read_preferences
from coserve.jobs.formats import ChatRecord, CompletionRecord, TextRecord
from coserve.jobs.limits import LIMITS, ReadLimits
from coserve.jobs.messages import Message

LINES = b'{"text": "one"}\n\n{"text": "two"}\n'
TEXTS = [TextRecord("one"), TextRecord("two")]


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.JSONL", ".jsonl"), ("a.json", ".jsonl"), ("a", ".jsonl"), ("a.gz", ".jsonl.gz"),
     ("a.b.csv.GZ", ".csv.gz"), ("a.txt.gz", ".txt.gz"), ("a.parquet", ".parquet"),
     ("a.parquet.gz", ".jsonl.gz"), ("", ".jsonl"), (".file-1.csv", ".csv")],
)  # fmt: skip
def test_the_name_says_how_a_file_is_read(name: str, suffix: str) -> None:
    assert suffix_of(name) == suffix


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.txt", b"one\n\ntwo"),
        ("a.csv", b"\xef\xbb\xbf text ,id\r\none,1\r\n\r\ntwo,2\r\n"),
    ],
)
def test_a_compressed_file_is_read_like_its_content(tmp_path: Path, name: str, data: bytes) -> None:
    assert list(read(put(tmp_path, name, data))) == TEXTS
    assert list(read(put(tmp_path, f"{name}.gz", gzip.compress(data, mtime=0)))) == TEXTS
    half = len(data) // 2  # a file of several members, as `cat` makes them
    assert (
        list(
            read(
                put(tmp_path, f"{name}.GZ", gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:]))
            )
        )
        == TEXTS
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LINES, "Not a gzipped file"),
        (gzip.compress(LINES, mtime=0)[:-12], "Compressed file ended before"),
        (gzip.compress(LINES, mtime=0)[:-8] + b"12345678", "CRC check failed"),
        (gzip.compress(LINES, mtime=0)[:10] + b"\xff" * 20, "Error -3 while decompressing"),
        (b"", "expected at least one example"),
    ],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        list(read(put(tmp_path, "a.jsonl.gz", data)))
    assert str(caught.value).startswith("a.jsonl.gz: expected ")


def test_what_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    text = b'{"text": "one"}\n' * 100_000  # 1.6 MB, 300 times its packed size
    path = put(tmp_path, "a.jsonl.gz", gzip.compress(text, mtime=0))
    assert sum(1 for _ in values(path, "a", LIMITS)) == 100_000
    most = 100 * path.stat().st_size
    with pytest.raises(
        DataError,
        match=rf"^a, line {most // 16 + 1}: expected to unpack to at most {most} bytes: split it$",
    ):
        list(values(path, "a", ReadLimits(always=1000)))
    with pytest.raises(DataError, match=r"^a, line 51: expected to unpack to at most 800 bytes: split it$"):
        list(values(path, "a", ReadLimits(unpacked=800)))


def test_lines_and_columns_have_bounds(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", LINES)
    assert len(list(read(path, limits=ReadLimits(rows=3)))) == 2
    with pytest.raises(DataError, match=r"^a.jsonl, line 3: expected at most 2 lines: split"):
        list(read(path, limits=ReadLimits(rows=2)))
    newlines = put(tmp_path, "b.txt.gz", gzip.compress(b"\n" * 2**24, mtime=0))  # 16 KiB
    most = 100_000 + newlines.stat().st_size
    with pytest.raises(DataError, match=rf"^b.txt.gz, line {most + 1}: expected at most {most} lines: split"):
        list(read(newlines))
    wide = put(tmp_path, "c.csv", ",".join(map(str, range(40_000))).encode() + b"\n")
    with pytest.raises(DataError, match=r"^c.csv, line 1: expected at most 1000 columns; found 40000$"):
        list(read(wide))


def test_a_row_of_a_table_is_a_record(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": 'a, "b"\nc'}])
    quoted = messages.replace('"', '""')
    path = put(tmp_path, "a.csv", f'id,messages,tools\n1,"{quoted}",\n'.encode())
    assert list(read(path)) == [ChatRecord((Message("user", "Hi"), Message("assistant", 'a, "b"\nc')))]
    path = put(tmp_path, "b.csv", b'prompt,completion\n"two\nlines",b\n')
    assert list(read(path)) == [CompletionRecord("two\nlines", "b")]
    path = put(tmp_path, "c.csv", b"instruction,input,output\nAdd,,3\n")
    assert list(read(path)) == [ChatRecord((Message("user", "Add"), Message("assistant", "3")))]
    asked = '"{""messages"": [{""role"": ""user"", ""content"": ""a""}]}"'
    pair = f"input,preferred_output,non_preferred_output\n{asked}"
    answers = ',"[{""role"": ""assistant"", ""content"": ""b""}]"' * 2
    (record,) = read_preferences(put(tmp_path, "d.csv", f"{pair}{answers}\n".encode()))
    assert record.chosen == record.rejected == (Message("assistant", "b"),)
    columns = b'prompt,chosen,rejected\n"[{""role"": ""user"", ""content"": ""a""}]"'
    said = b',"[{""role"": ""assistant"", ""content"": ""b""}]","[{""x"": 1}] is no message"\n'
    (record,) = read_preferences(put(tmp_path, "e.csv", columns + said))
    assert record.prompt == (Message("user", "a"),) and record.chosen == (Message("assistant", "b"),)
    assert record.rejected == (Message("assistant", '[{"x": 1}] is no message'),)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text\n\"a\nb\",c\nd\n", "line 2: expected 1 fields, as in the header; found 2"),
        (b"text,text\na,b\n", "line 1: expected different names of columns; found 'text' twice"),
        (b"text\n\"a\"b\n", "line 2: expected comma-separated values; ',' expected after '\"'"),
        (b"text\nfine\n\"a\nb\n", "line 4: expected comma-separated values; unexpected end of data"),
        (b"text\n" + b"a" * 140_000 + b"\n", "line 2: expected comma-separated values; field larger than"),
        (b"text\nfine\n\xff\n", "line 3: expected UTF-8; found byte 0xff"),
        (b"messages\n[{\n", 'line 2: expected "messages" to be JSON; Input data was truncated'),
        (b"messages\n" + b"[" * 10_000 + b"\n", 'line 2: expected "messages" to be JSON; maximum recursion'),
        (b"messages\n\n \n", 'line 3: expected a JSON object with "messages"'),
        (b"name\na\n", 'line 2: expected a JSON object with "messages"'),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read(put(tmp_path, "a.csv", data)))
    assert str(caught.value).startswith(f"a.csv, {said}")


def test_a_row_of_endless_lines_is_refused(tmp_path: Path) -> None:
    row = b",".join([b'"' + b"a\n" * 100 + b'"'] * 5)
    path = put(tmp_path, "a.csv", b"a,b,c,d,e\n" + row + b"\n")
    with pytest.raises(DataError, match=r"^a.csv, line \d+: expected a row of at most 1000 characters$"):
        list(read(path, limits=ReadLimits(longest=1000)))
    many: Any = b"text\n" + b"one\n" * 5000  # of rows there may be any number
    assert len(list(read(put(tmp_path, "b.csv", many)))) == 5000
