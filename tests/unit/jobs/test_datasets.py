"""What training files may hold, and the words in which they are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs import datasets
from coserve.jobs.datasets import ChatRecord, Message, PromptRecord, TextRecord, parse, read

Write = Callable[..., Path]
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
EXPECTED = 'a JSON object with "messages", "prompt" and "completion", "question" and "answer", or "text"'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*lines: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        return path

    return write


def test_every_kind_of_line_is_read(write: Write) -> None:
    path = write(CHAT, {"prompt": "2+2=", "completion": "4"}, b"", {"question": "Why?", "answer": "So."},
                 {"text": "Größe 🎉", "id": 3})  # fmt: skip
    chat = ChatRecord((Message("user", "Hi"), Message("assistant", "Hello")))
    asked = ChatRecord((Message("user", "Why?"), Message("assistant", "So.")))
    want = [chat, PromptRecord("2+2=", "4"), asked, TextRecord("Größe 🎉")]
    assert list(read(path)) == want
    assert list(read(str(path))) == want


def test_python_dicts_are_read_like_lines() -> None:
    assert list(read([CHAT, {"text": "a"}])) == [parse(CHAT), TextRecord("a")]
    with pytest.raises(DataError, match=r'^data, example 2: expected .*; found "foo"$'):
        list(read([CHAT, {"foo": 1}]))


def test_a_corpus_is_cut_at_blank_lines(write: Write) -> None:
    path = write(b"\xef\xbb\xbfone\r", b"two \r", b"  \r", b"", b"three", name="corpus.TXT")
    assert list(read(path)) == [TextRecord("one\ntwo "), TextRecord("three")]


def test_a_byte_order_mark_is_no_part_of_the_first_line(write: Write) -> None:
    path = write(b'\xef\xbb\xbf{"text": "a"}\r', b'{"text": "b"}\r')
    assert list(read(path)) == [TextRecord("a"), TextRecord("b")]


def test_reading_streams(write: Write) -> None:
    records = read(write({"text": "fine"}, b"{broken"))
    assert next(records) == TextRecord("fine")
    with pytest.raises(DataError, match="line 2"):
        next(records)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"foo": 1}, f'expected {EXPECTED}; found "foo"'),
        ({"prompt": "a"}, f'expected {EXPECTED}; found "prompt"'),
        ({}, f"expected {EXPECTED}; found an empty object"),
        ([1], f"expected {EXPECTED}; found a list"),
        (b"{broken", f"expected {EXPECTED}; JSON is malformed: object keys must be strings (byte 1)"),
        (b"[" * 100_000, f"expected {EXPECTED}; maximum recursion depth"),
        (b'{"text": "\\ud800"}', f"expected {EXPECTED}; "),
        ({"text": 3}, 'expected "text" to be a string; found a number'),
        ({"text": None}, 'expected "text" to be a string; found null'),
        ({"text": " \n"}, 'expected "text" to hold text; found it empty'),
        ({"prompt": "a", "completion": ""}, 'expected "completion" to hold text; found it empty'),
        ({"question": "", "answer": "b"}, 'expected "question" to hold text; found it empty'),
        ({"messages": "Hi"}, 'expected "messages" to be a list of objects; found a string'),
        ({"messages": []}, 'expected at least one message with the role "assistant"; found none'),
        ({"messages": CHAT["messages"][:1]}, 'expected at least one message with the role "assistant"'),
        ({"messages": ["Hi"]}, 'message 1: expected an object with "role" and "content"; found a string'),
        ({"messages": [{"role": "user"}]}, 'message 1: expected "role" and "content"; "content" is missing'),
        ({"messages": [*CHAT["messages"], {"role": "bot", "content": "x"}]},
         "message 3: expected the role to be one of system, developer, user, assistant, tool; found 'bot'"),
        ({"messages": [{"role": [], "content": "x"}]}, "found []"),
        ({"messages": [{"role": "assistant", "content": ["x"]}]},
         'message 1: expected "content" to be a string; found a list'),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, 'found "weight"'),
        ({**CHAT, "tools": [{"name": "f"}]}, '"tools" is not supported'),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_place(write: Write, line: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read(write(*[{"text": "fine"}] * 6, line)))
    assert str(caught.value).startswith("train.jsonl, line 7: ")
    assert message in str(caught.value)


def test_absent_fields_that_are_spelled_out_are_fine() -> None:
    chat = {"messages": [{"role": "assistant", "content": "x", "tool_calls": None}], "tools": []}
    assert parse(chat) == ChatRecord((Message("assistant", "x"),))


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(DataError, match=r"data, example 1: .*surrogate"):
        list(read([{"text": "a\ud800"}]))


@pytest.mark.parametrize("name", ["train.jsonl", "corpus.txt"])
def test_other_encodings_are_refused_with_their_line(write: Write, name: str) -> None:
    path = write({"text": "fine"}, '{"text": "Größe"}'.encode("latin-1"), name=name)
    with pytest.raises(DataError, match=rf"^{name}, line 2: expected UTF-8; found byte 0xf6$"):
        list(read(path))


@pytest.mark.parametrize("name", ["train.jsonl", "corpus.txt"])
def test_an_empty_file_is_refused(write: Write, name: str) -> None:
    with pytest.raises(DataError, match=rf"^{name}: expected at least one example; found none$"):
        list(read(write(b"", b" \n", name=name)))
    with pytest.raises(DataError, match=r"^data: expected at least one"):
        list(read([]))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^none.jsonl: cannot be read \(No such file"):
        list(read(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"^upload: cannot be read \(Is a directory"):
        list(read(tmp_path, name="upload"))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "' + b"b" * 100 + b'"}\n',
            "a.jsonl, line 2: expected at most 50",
        ),
        ("a.txt", b"a\n\n" + b"0123456789\n" * 6, "a.txt, line 8: expected a blank line"),
    ],
)
def test_nothing_is_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, said: str
) -> None:
    monkeypatch.setattr(datasets, "LONGEST", 50)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        list(read(tmp_path / name))
    monkeypatch.setattr(datasets, "LONGEST", 200)
    assert len(list(read(tmp_path / name))) == 2
