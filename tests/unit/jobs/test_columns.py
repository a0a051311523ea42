"""Columns read by another process: what it is told, and every way in which it may end."""

import os
import sys
import time
from pathlib import Path

import pytest

from coserve.errors import DataError
from coserve.jobs import datasets
from coserve.jobs.datasets import read, read_rows
from coserve.jobs.limits import ReadLimits
from coserve.sandbox import process

# A module in pyarrow's place, so that the child does what a hostile file could make a parser do.
FAKE = """
import os, sys, time
class Batch:
    def __init__(self, rows): self.rows, self.num_rows = rows, len(rows)
    def slice(self, start, count): return Batch(self.rows[start:start + count])
    def to_pylist(self): return self.rows
class Schema:
    names = ["text"]
class ParquetFile:
    schema_arrow = Schema()
    class metadata:
        num_rows = 71
    def __init__(self, path, **options): pass
    def iter_batches(self, **options):
        yield Batch([{"text": "fine", "none": None}] * 70)
        %s
"""


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake pyarrow, and a file for it beside."""
    package = tmp_path / "library" / "pyarrow"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    return tmp_path


def does(parser: Path, code: str) -> Path:
    (parser / "library" / "pyarrow" / "parquet.py").write_text(FAKE % code)
    return parser / "a.parquet"


def test_rows_have_no_columns_without_values(parser: Path) -> None:
    rows = list(read_rows(does(parser, "yield Batch([{'text': b'x'}])"), "a"))
    assert rows[0] == {"text": "fine"} and rows[70] == {"text": "eA=="}
    assert len(list(read(does(parser, "pass")))) == 70


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.abort()", "its process ended with signal 6"),
        ("os._exit(7)", "its process ended with status 7"),
        ("bytearray(300 * 2**20)", "cannot be read: it takes more than 200 MiB"),
        (
            "raise ValueError('Couldn\\'t  deserialize\\nthrift')",
            "cannot be read: Couldn't deserialize thrift",
        ),
        ("raise RuntimeError('x')", "its reader failed with RuntimeError: x"),
        ("raise OSError('Corrupt snappy')", "cannot be read: Corrupt snappy"),
        ("while True: pass", "it takes more than 1 s"),
        ("open('out', 'wb').write(bytes(10**6))", "cannot be read: "),
        ("yield Batch([{'text': '\\ud800'}])", "cannot be read: "),
        ("sys.stderr.write('x' * 10**5); os._exit(3)", "its process ended with status 3"),
    ],
)
def test_a_reader_that_fails_is_an_error_of_the_file(
    parser: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(datasets, "_MEMORY", 200 * 2**20)
    monkeypatch.chdir(parser)
    limits = ReadLimits(seconds=1.0)
    with pytest.raises(DataError) as caught:
        list(read_rows(does(parser, code), "a", limits))
    assert str(caught.value).startswith("a") and said in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_rows_and_files_have_bounds(parser: Path) -> None:
    one = does(parser, "yield Batch([{'text': 'x' * 1000}])")
    with pytest.raises(DataError, match=r"^a, row 71: expected at most 1000 bytes: split it$"):
        list(read_rows(one, "a", ReadLimits(longest=1000)))
    endless = does(parser, "while True: yield Batch([{'text': 'x' * 100}])")
    with pytest.raises(DataError, match=r"^a, row \d+: expected to unpack to at most 5000 bytes: split it$"):
        list(read_rows(endless, "a", ReadLimits(unpacked=5000)))
    with pytest.raises(DataError, match=r"^a, row 1005: expected at most 1004 rows: split"):
        list(read_rows(endless, "a", ReadLimits(few_rows=1000)))
    with pytest.raises(DataError, match=r"^a: expected at most 24 rows; found 71: split the file$"):
        list(read_rows(one, "a", ReadLimits(few_rows=20)))
    with pytest.raises(DataError, match=r"^a: expected at most 0 columns; found 1$"):
        list(read_rows(one, "a", ReadLimits(columns=0)))


def test_a_reader_ends_with_its_caller_and_knows_no_keys(
    parser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    row = "{'text': str(os.getpid()), 'key': os.environ.get('OPENAI_API_KEY'), 'long': 'x' * 10**6}"
    told = does(parser, f"yield Batch([{row}] * 9)\n        time.sleep(100)")
    rows = read_rows(told, "a")
    found = [next(rows) for _ in range(71)][70]
    assert "key" not in found
    rows.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(found["text"]), 0)


def test_a_reader_that_never_ends_is_ended(parser: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WALL_LEAST", 0.3)
    start = time.monotonic()
    path = does(parser, "time.sleep(100)")
    with pytest.raises(DataError, match=r"it takes more than 0\.01 s"):
        list(read_rows(path, "a", ReadLimits(seconds=0.01)))
    assert time.monotonic() - start < 30


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        DataError, match=r"^a.parquet: reading it needs pyarrow, which coserve\[parquet\] inst"
    ):
        list(read(tmp_path / "a.parquet"))


def test_a_folder_that_holds_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Is a directory, and not one that datasets.save_to_disk wrote"):
        list(read(tmp_path))
    with pytest.raises(DataError, match=r"^none.parquet: cannot be read \(No such file"):
        list(read(tmp_path / "none.parquet"))
