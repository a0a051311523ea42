"""Contents of training files, and the messages of refused ones."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.datasets import (
    RecordReader,
    count,
    parse,
    read,
    read_labelled,
    read_preferences,
    read_prompts,
)
from coserve.jobs.formats import (
    ChatRecord,
    CompletionRecord,
    LabelledRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    TextRecord,
)
from coserve.jobs.limits import ReadLimits
from coserve.jobs.messages import Message

read_any = RecordReader("any")

Write = Callable[..., Path]
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
EXPECTED = (
    'a JSON object with "messages", "conversations", "prompt" and "completion", "question" and "answer", '
    '"instruction" and "output", or "text"'
)
USER, ANSWER, OTHER = Message("user", "Hi"), Message("assistant", "Hello"), Message("assistant", "No")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*lines: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        return path

    return write


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (CHAT, ChatRecord((USER, ANSWER))),
        ({"prompt": "2+2=", "completion": "4"}, CompletionRecord("2+2=", "4")),
        ({"question": "Why?", "answer": "So."},
         ChatRecord((Message("user", "Why?"), Message("assistant", "So.")))),
        ({"text": "Größe 🎉", "id": 3}, TextRecord("Größe 🎉")),
    ],
)  # fmt: skip
def test_every_kind_of_line_is_read(write: Write, line: Any, record: Record) -> None:
    path = write(line, b"", line)
    assert list(read(path)) == list(read(str(path))) == list(read_any(path)) == [record] * 2


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [{"role": "user", "content": "Hi"}],
         "chosen": [{"role": "assistant", "content": "Hello"}],
         "rejected": {"role": "assistant", "content": "No"}},
        {"chosen": CHAT["messages"],
         "rejected": [CHAT["messages"][0], {"role": "assistant", "content": "No"}]},
        {"input": {"messages": CHAT["messages"][:1], "tools": [], "parallel_tool_calls": True},
         "preferred_output": CHAT["messages"][1:],
         "non_preferred_output": [{"role": "assistant", "content": "No"}]},
    ],
)  # fmt: skip
def test_preference_pairs_are_read_in_every_form(write: Write, line: Any) -> None:
    want = [PreferenceRecord((USER,), (ANSWER,), (OTHER,))]
    assert list(read_preferences(write(line))) == list(read_any(write(line))) == want
    with pytest.raises(DataError, match=r"line 1: expected a JSON object with .*; found "):
        list(read(write(line)))


@pytest.mark.parametrize(
    ("line", "desirable"),
    [
        ({"prompt": "Hi", "completion": "Hello", "label": True}, True),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1], "label": False}, False),
        ({"prompt": "Hi", "completion": "Hello", "label": " False"}, False),  # as tables have it
    ],
)
def test_labelled_completions_are_read_in_every_form(write: Write, line: Any, desirable: bool) -> None:
    want = [LabelledRecord((USER,), (ANSWER,), desirable)]
    assert list(read_labelled(write(line))) == list(read_any(write(line))) == want


def test_other_labels_are_of_a_supervised_file(write: Write) -> None:
    other = {"prompt": "Hi", "completion": "Hello", "label": "greeting"}
    assert list(read_any(write(other))) == list(read(write(other))) == [CompletionRecord("Hi", "Hello")]
    table = write(b"prompt,completion,label", b"Hi,Hello,TRUE", b"Hi,Hello,1", name="t.csv")
    with pytest.raises(
        DataError, match=r"^t\.csv, line 3: expected \"label\" to be true or false; found '1'"
    ):
        list(read_labelled(table))
    mixed = write({**other, "label": True}, {"prompt": "Hi", "completion": "Hello"})
    with pytest.raises(DataError, match="line 2: expected prompts with labelled completions, as in line 1"):
        list(read_any(mixed))


@pytest.mark.parametrize(
    ("line", "reference"),
    [
        ({"messages": CHAT["messages"][:1], "reference_answer": "4", "id": 3},
         {"reference_answer": "4", "id": 3}),
        ({"prompt": "Hi", "solution": {"x": [1]}, "note": None}, {"solution": {"x": [1]}}),
        ({"prompt": CHAT["messages"][:1], "answer": "4"}, {"answer": "4"}),
    ],
)  # fmt: skip
def test_other_keys_of_a_prompt_are_its_reference(write: Write, line: Any, reference: Any) -> None:
    want = [PromptRecord((USER,), reference)]
    assert list(read_prompts(write(line))) == list(read_any(write(line))) == want


def test_a_question_with_an_answer_serves_both() -> None:
    (record,) = read_prompts([{"question": "Hi", "answer": "4"}])
    assert record == PromptRecord((USER,), {"answer": "4"})
    (prompt,) = read_prompts([{"messages": CHAT["messages"][:1]}])
    assert not prompt.reference


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [
        (read_preferences, {"prompt": "Hi", "chosen": "Hello"}, 'expected a JSON object with "prompt", "cho'),
        (read_preferences, {"prompt": "Hi", "chosen": "a", "rejected": 3},
         'expected "rejected" to be text or a list of messages; found a number'),
        (read_preferences, {"prompt": CHAT["messages"], "chosen": "a", "rejected": "b"},
         'expected "prompt" to end before the answer'),
        (read_preferences, {"prompt": "Bye", "chosen": CHAT["messages"], "rejected": "b"},
         """expected "chosen" to hold messages of the assistant; found 'user'"""),
        (read_preferences, {"chosen": "a", "rejected": "b"}, 'expected "prompt" to hold a message; found no'),
        (read_preferences, {"input": [], "preferred_output": "a", "non_preferred_output": "b"},
         'expected "input" to be an object with "messages"; found a list'),
        (read_preferences, {"prompt": "Hi", "chosen": [], "rejected": "b"},
         'expected "chosen" to hold a message of the assistant; found none'),
        (read_preferences, {"prompt": "Hi", "rejected": "b", "chosen": [{"role": "assistant"}]},
         '"chosen", message 1: expected "role" and "content"; "content" is missing'),
        (read_labelled, {"prompt": "Hi", "completion": "a", "label": 1},
         'expected "label" to be true or false; found 1'),
        (read_labelled, {"prompt": "Hi", "completion": "", "label": True},
         'expected "completion" to hold text; found it empty'),
        (read_labelled, {"prompt": "Hi", "completion": "a"}, 'expected a JSON object with "prompt", "comple'),
        (read_prompts, CHAT, 'expected "messages" to end before the answer'),
        (read_prompts, {"messages": []}, 'expected "messages" to hold a message; found none'),
        (read_prompts, {"text": "a"}, 'expected a JSON object with "messages", "prompt" or "question"; fo'),
        (read_prompts, {"prompt": "a", "x": "\ud800"}, 'expected "reference" to hold JSON'),
    ],
)  # fmt: skip
def test_pairs_and_prompts_that_are_none_are_refused(read: Any, line: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read([line]))
    assert str(caught.value).startswith(f"data, example 1: {message}")


def test_a_file_has_one_format(write: Write) -> None:
    path = write({"text": "a"}, {"prompt": "a", "completion": "b"}, CHAT)
    with pytest.raises(DataError) as caught:
        list(read(path))
    assert str(caught.value).splitlines() == [
        f"train.jsonl, line {line}: expected texts, as in line 1; found {found}: put those into a file of "
        "their own"
        for line, found in ((2, "prompts with completions"), (3, "chats in messages"))
    ]
    graded = {"messages": CHAT["messages"][:1], "answer": "4"}
    assert len(list(read_any([CHAT, graded]))) == 2  # chats that end with an answer, or await one


def test_three_errors_are_listed_at_most(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        list(read(write({"text": "fine"}, {"text": 1}, {"text": "fine"}, {"text": ""}, b"{", b"{")))
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"train.jsonl, line {n}" for n in (2, 4, 5)]
    many = [{"text": 1}, *[{"text": "fine"}] * 2000, {"text": 2}]
    with pytest.raises(DataError) as caught:
        list(read(many))
    assert "\n" not in str(caught.value)  # nobody waits for the end of a long file
    with pytest.raises(DataError, match=r"line 1: .*\n.*line 2: expected UTF-8"):
        list(read(write({"text": 1}, b"\xff")))


def test_python_dicts_are_read_like_lines() -> None:
    assert list(read([CHAT, CHAT])) == [parse(CHAT)] * 2
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
        ([1], "record 1, line 7: " f"expected {EXPECTED}; found a number"),
        (b"{broken", "expected one JSON object in this line; JSON is malformed: object keys"),
        (b"[" * 100_000, "record 1, line 7: expected the list to end with ]; the file ends before"),
        (b"[" * 100_000 + b"]" * 100_000, "line 7: expected one JSON object; maximum recursion depth"),
        (b'{"text": ' + b"[" * 100_000, "expected one JSON object in this line; maximum recursion depth"),
        (b'{"text": "\\ud800"}', "expected one JSON object in this line; "),
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
        ({"messages": [{"role": [], "content": "x"}]}, "user, assistant, tool; found a list"),
        ({"messages": [{"role": "assistant", "content": ["x"]}]},
         'message 1: expected "content[0]" to be an object with "type" and "text"; found a string'),
        ({"messages": [{"role": "assistant", "content": "x", "audio": 0}]}, "found 'audio'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_place(write: Write, line: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read(write(*[b""] * 6, line)))
    place = str(caught.value).partition(": ")[0]
    assert place.startswith("train.jsonl, ") and place.endswith("line 7")
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
    with pytest.raises(DataError, match=rf"^{name}, line 2: expected UTF-8; found byte 0xf6: save"):
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
        ("a.csv", b"text\na\n" + b"0" * 100 + b"\n", "a.csv, line 3: expected at most 50 bytes"),
    ],
)
def test_nothing_is_read_as_a_whole(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        list(read(tmp_path / name, limits=ReadLimits(longest=50)))
    assert len(list(read(tmp_path / name, limits=ReadLimits(longest=200)))) == 2


def test_a_long_text_is_cut_at_borders() -> None:
    """A text of several records is one example to the count, and ends once."""
    document = "One two. Three four five.\n\nSix seven eight nine ten eleven\n\ntwelve"
    parts = ["One two. Three four five.\n\n", "Six seven eight nine ten ", "eleven\n\ntwelve"]
    records = list(read([{"text": document, "id": 1}, {"text": "short"}], limits=ReadLimits(characters=28)))
    assert records == [
        *(TextRecord(part, goes_on=True) for part in parts[:-1]),
        TextRecord(parts[-1]),
        TextRecord("short"),
    ]
    solid = list(read([{"text": "x" * 70}], limits=ReadLimits(characters=28)))
    assert [len(record.text) for record in solid if isinstance(record, TextRecord)] == [28, 28, 14]
    with pytest.raises(DataError, match="at most 28 characters in a record"):
        list(read([{"prompt": document, "completion": "a"}], limits=ReadLimits(characters=28)))


def test_cut_texts_are_counted_once(write: Write) -> None:
    path = write({"text": "one two three"}, {"text": "four"})
    assert count(path, "a", ReadLimits(characters=5)) == 2
    assert len(list(read(path, limits=ReadLimits(characters=5)))) == 4


@pytest.mark.parametrize("packed", [False, True])
def test_paragraphs_and_lines_of_a_corpus_are_cut_where_they_are_too_long(
    tmp_path: Path, packed: bool
) -> None:
    """Also within a character of several bytes, and in one line without an end."""
    line = "über die Größe. " * 20
    corpus = f"first\n\n{line}\nsecond line\n\nlast\n{'ö' * 101}"
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    data = corpus.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    texts = [one.text for one in read(path, limits=ReadLimits(longest=50)) if isinstance(one, TextRecord)]
    assert max(map(len, texts)) <= 50 and texts[0] == "first"
    assert "".join(texts[1:]) == corpus.removeprefix("first\n\n").replace("\n\n", "")
    assert texts[1] == "über die Größe. " * 3
    path.write_bytes(gzip.compress(data[:-1] + b"\xff") if packed else data[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"line 7: expected UTF-8; found byte 0xc3"):
        list(read(path, limits=ReadLimits(longest=50)))


def test_a_record_has_bounds() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    cases = {
        "messages": {"messages": turns * 2},
        "conversations": {"conversations": turns * 2},
        "history": {"instruction": "a", "output": "b", "history": [["a", "b"]] * 4},
    }
    for key, record in cases.items():
        with pytest.raises(DataError, match=f'at most 3 messages in "{key}"; found 4: .*max_chat_turns'):
            list(read([record], limits=ReadLimits(turns=3)))
    pair = {
        "input": {"messages": turns * 2},
        "preferred_output": turns[1:],
        "non_preferred_output": turns[1:],
    }
    with pytest.raises(DataError, match=r'at most 3 messages in "messages"; found 4'):
        list(read_preferences([pair], limits=ReadLimits(turns=3)))
    assert len(list(read([{"messages": turns}], limits=ReadLimits(turns=2, values=8, characters=20)))) == 1
    with pytest.raises(DataError, match="at most 7 values in a record"):
        list(read([{"messages": turns}], limits=ReadLimits(values=7)))
    with pytest.raises(DataError, match=r"at most 19 characters in a record; found 20: .*max_text_char"):
        list(read([{"messages": turns}], limits=ReadLimits(characters=19)))


def test_a_beginning_is_read_for_some_seconds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\n" * 1000)
    assert len(list(read(tmp_path / "a.txt", most=500))) == 500
    assert len(list(read(tmp_path / "a.txt", most=500, seconds=0.0))) == 16
    assert len(list(read(tmp_path / "a.txt"))) == 1000
