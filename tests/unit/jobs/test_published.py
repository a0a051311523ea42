"""Files as people publish them: arrays, tables of other programs, shapes of preference data, and records that
training would read half of."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve.errors import DataError
from coserve.jobs.arrays import Elements
from coserve.jobs.containers import values
from coserve.jobs.datasets import count, read, read_labelled, read_preferences, read_prompts
from coserve.jobs.formats import ChatRecord, CompletionRecord, LabelledRecord, PreferenceRecord, TextRecord
from coserve.jobs.limits import LIMITS, ReadLimits
from coserve.jobs.messages import Message, ToolCall

USER, ANSWER, OTHER = Message("user", "Hi"), Message("assistant", "Hello"), Message("assistant", "No")
ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
NO = {"role": "assistant", "content": "No"}


def put(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# Arrays


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_an_array_is_cut_into_its_elements(step: int) -> None:
    elements = [{"a": '\\"]}, [{', "b": [1, {"c": []}]}, {"a": "\\\\"}, [], "x,]", {"é": "\n"}]
    data = b"\n " + json.dumps(elements, indent=2, ensure_ascii=False).encode() + b"\n\n"
    chunks = (data[at : at + step] for at in range(0, len(data), step))
    found = Elements(chunks, "a", LIMITS, 5)
    assert [json.loads(one) for one in found] == elements
    line = data.count(b"\n", 0, data.rindex(b"{")) + 1
    assert found.place == f"record 5, line {line}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('[{"text": "a"},\n\n {"text": 3}]', 'a.json, record 2, line 3: expected "text" to be a'),
        ('[{"text": "a"},\n {"text": "b"},\n]', "a.json, record 3, line 3: expected an object between"),
        ('[{"text": "a"},,{"text": "b"}]', "a.json, record 2, line 1: expected an object between"),
        ('[{"text": "a"}\n{"text": "b"}]', "a.json, record 1, line 1: expected one JSON object"),
        ('[{"text": "a"},\n{"text": "b"}', "a.json, record 2, line 2: expected the list to end with ];"),
        ('[{"text": "a"},\n{"text": "b]', "a.json, record 2, line 2: expected the list to end with ];"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "a.json: expected nothing after the list of records; found"),
        ('[{"text": "a"}, {"text": "b"}}]', "a.json: expected nothing after the list of records; found"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', "a.json, record 2, line 2: expected UTF-8; found byte 0xff"),
        (" [ ]", "a.json: expected at least one example; found none"),
        ('{\n "text": "a"\n}', "a.json, line 1: expected whole objects, one in each"),
        ('{"text": "a"}'.encode("utf-32"), "a.json: expected UTF-8; found text in UTF-32: save"),
        (gzip.compress(b"x", mtime=0), "a.json: expected UTF-8; found a gzip file: let its name end"),
        (b"PK\x03\x04aaaa", "a.json: expected UTF-8; found a zip file or a workbook: unpack"),
    ],
)  # fmt: skip
def test_a_fault_of_an_array_is_told_with_record_and_line(
    tmp_path: Path, data: bytes | str, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        list(read(put(tmp_path, "a.json", data)))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_an_array_keeps_the_bounds_of_files(tmp_path: Path) -> None:
    record = '{"text": "' + "a" * 90 + '"}'
    path = put(tmp_path, "a.json", f"[{','.join([record] * 300)}]")
    assert count(path, "a") == 300
    with pytest.raises(
        DataError, match=r"^a.json, record 201, line 1: expected at most 200 records: split it$"
    ):
        list(read(path, limits=ReadLimits(rows=200)))
    with pytest.raises(DataError, match=r"^a.json, record 1, line 1: expected at most 50 bytes: split it$"):
        list(read(path, limits=ReadLimits(longest=50)))
    packed = put(tmp_path, "b.json.gz", gzip.compress(path.read_bytes() + b" " * 2**20, mtime=0))
    assert len(list(read(packed))) == 300
    with pytest.raises(DataError, match=r"^b.json.gz: expected to unpack to at most 100000 bytes: split it$"):
        list(read(packed, limits=ReadLimits(unpacked=100_000)))
    with pytest.raises(DataError, match="expected at most 3 messages"):
        list(
            read(
                put(tmp_path, "c.json", json.dumps([{"messages": [ASKED, SAID] * 2}])),
                limits=ReadLimits(turns=3),
            )
        )


@pytest.mark.parametrize("endless", [b'{"text": "', b'{"text": "\\', b"[", b" ", b'{"a":', b'"'])
def test_an_element_without_an_end_is_not_held(tmp_path: Path, endless: bytes) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"["
        while True:
            yield endless * 2**10

    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"^a, record 1, line 1: expected at most 20000 bytes: split it$"):
            list(Elements(chunks(), "a", ReadLimits(longest=20_000), 10))
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


def test_an_array_is_read_as_it_comes(tmp_path: Path) -> None:
    """Of an array of 1 MB a part of 64 KiB is in memory."""
    path = put(tmp_path, "a.json", "[" + ",\n".join(['{"text": "' + "a" * 100 + '"}'] * 10_000) + "]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in values(path, "a", LIMITS)) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


# Tables


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", "\ufeffPrompt;Completion\n\"a, b\";\"c; d\"\n"),
        ("a.csv", "prompt\tCOMPLETION\na, b\tc; d\n"),
        ("a.tsv", "Completion\tprompt \r\nc; d\ta, b\r\n"),
        ("a.tsv", '"prompt","completion"\n"a, b","c; d"\n'),
        ("a.csv", '"completion","prompt, with; one"\n"c; d","a, b"\n'.replace("prompt, with; one", "Prompt")),
    ],
)  # fmt: skip
def test_what_is_between_columns_is_found(tmp_path: Path, name: str, data: str) -> None:
    assert list(read(put(tmp_path, name, data))) == [CompletionRecord("a, b", "c; d")]


def test_a_table_of_one_column_is_no_list_of_others(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv"):
        assert list(read(put(tmp_path, name, "Text\none; two\n"))) == [TextRecord("one; two")]
    with pytest.raises(DataError, match=r"^a.csv, line 2: expected 1 fields, as in the header; found 2$"):
        list(read(put(tmp_path, "a.csv", "text\none, two\n")))
    with pytest.raises(DataError, match=r"^b.csv, line 2: expected semicolon-separated values; "):
        list(read(put(tmp_path, "b.csv", 'text;id\n"a"b;1\n')))


def test_keys_are_known_in_any_letter_case(tmp_path: Path) -> None:
    chat = put(
        tmp_path, "a.csv", f'ID;Messages\n1;"{json.dumps([ASKED, SAID]).replace(chr(34), chr(34) * 2)}"\n'
    )
    assert list(read(chat)) == [ChatRecord((USER, ANSWER))]
    assert list(read([{"Instruction": "Hi", "OUTPUT": "Hello"}])) == [ChatRecord((USER, ANSWER))]
    # A key that is there in lower case is meant; a grader names keys of references as they are.
    assert list(read([{"text": "a", "Text": "b"}])) == [TextRecord("a")]
    (prompt,) = read_prompts([{"Prompt": "Hi", "Answer": "4"}])
    assert prompt.messages == (USER,) and prompt.reference == {"Answer": "4"}
    with pytest.raises(DataError, match='at most 1 messages in "messages"'):
        list(read([{"Messages": [ASKED, SAID]}], limits=ReadLimits(turns=1)))


# Preference data

PAIR = PreferenceRecord((USER,), (ANSWER,), (OTHER,))
BE = Message("system", "Be.")


@pytest.mark.parametrize(
    ("record", "want"),
    [
        ({"prompt": "Hi", "chosen": [ASKED, SAID], "rejected": [ASKED, NO]}, PAIR),
        ({"prompt": " Hi\n", "chosen": [ASKED, SAID], "rejected": [ASKED, NO]}, PAIR),
        ({"prompt": [ASKED], "chosen": [ASKED, SAID], "rejected": "No"}, PAIR),
        ({"prompt": "Hi", "chosen": {"content": "Hello"}, "rejected": NO}, PAIR),
        ({"question": "Hi", "chosen": "Hello", "rejected": "No", "system": "Be."},
         PreferenceRecord((BE, USER), (ANSWER,), (OTHER,))),
        ({"prompt": "Hi", "chosen": [{"role": "system", "content": "Be."}, ASKED, SAID],
          "rejected": [{"role": "system", "content": "Be."}, ASKED, NO]},
         PreferenceRecord((BE, USER), (ANSWER,), (OTHER,))),
        ({"prompt": "Hi", "chosen": [ASKED, SAID, ASKED, SAID], "rejected": [ASKED, SAID, ASKED, NO]},
         PreferenceRecord((USER, ANSWER, USER), (ANSWER,), (OTHER,))),
        ({"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"}, PAIR),
        ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"},
          "rejected": {"from": "gpt", "value": "No"}}, PAIR),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}, PAIR),
        ({"chosen": "Human: Hi\nAssistant: Hello\nHuman: Hi\nAssistant: Hello",
          "rejected": "Human: Hi\nAssistant: Hello\nHuman: Hi\nAssistant: No"},
         PreferenceRecord((USER, ANSWER, USER), (ANSWER,), (OTHER,))),
        ({"chosen": "Hi\nHello", "rejected": "Hi\nNo"}, PAIR),
        ({"chosen": "Hi Hello", "rejected": "Hi Help"},  # no word is cut
         PreferenceRecord((USER,), (ANSWER,), (Message("assistant", "Help"),))),
    ],
)  # fmt: skip
def test_pairs_in_other_shapes(record: dict[str, Any], want: PreferenceRecord) -> None:
    assert list(read_preferences([record])) == [want]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "Bye", "chosen": [ASKED, SAID], "rejected": [ASKED, NO]},
         'expected "chosen" and "rejected" to begin with the turns of the prompt'),
        ({"chosen": "Hello", "rejected": "No"}, 'expected "prompt" to hold a message; found none'),
        ({"chosen": "Human: Hi\nAssistant:", "rejected": "Human: Hi\nAssistant: No"},
         'expected "chosen" to hold text; found it empty'),
        ({"chosen": "Human: a\nAssistant: b\n" * 2000, "rejected": "Human: a\nAssistant: c"},
         'expected at most 2048 messages in "chosen"; found more'),
    ],
)  # fmt: skip
def test_pairs_without_a_common_prompt_are_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^data, example 1: {said}"):
        list(read_preferences([record]))


def test_a_transcript_keeps_the_bound_of_a_chat() -> None:
    both = {"chosen": "Human: a\nAssistant: b\nHuman: c\nAssistant: d", "rejected": "Human: a\nAssistant: b\n"
            "Human: c\nAssistant: e"}  # fmt: skip
    assert len(list(read_preferences([both], limits=ReadLimits(turns=3)))) == 1
    with pytest.raises(DataError, match='at most 2 messages in "prompt"; found 3'):
        list(read_preferences([both], limits=ReadLimits(turns=2)))


def test_a_labelled_chat_is_a_prompt_and_its_answer() -> None:
    said = [ASKED, SAID, ASKED, NO]
    want = LabelledRecord((USER, ANSWER, USER), (OTHER,), False)
    assert list(read_labelled([{"messages": said, "label": False}])) == [want]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (record,) = read_labelled([{"conversations": turns, "label": "TRUE", "system": "Be."}])
    assert record == LabelledRecord((BE, USER), (ANSWER,), True)
    with pytest.raises(DataError, match='expected "messages" to hold a message of the assistant; found none'):
        list(read_labelled([{"messages": [ASKED], "label": True}]))


# Messages


def test_calls_of_old_data_are_calls() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    told = {"role": "function", "name": "f", "content": "4"}
    (record,) = read([{"messages": [ASKED, call, told, SAID], "functions": [{"name": "f"}]}])
    assert isinstance(record, ChatRecord) and len(record.tools) == 1
    called = Message("assistant", "", tool_calls=(ToolCall("f", {"a": 1}),))
    assert record.messages == (USER, called, Message("tool", "4", name="f"), ANSWER)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
         """expected "content[1].type" to be "text", as training reads text alone; found 'image_url'"""),
        ({"role": "user", "content": [{"type": "input_audio"}]}, 'expected "content[0].type" to be "text"'),
        ({"role": "user", "content": [{"type": "text"}]}, 'expected "content[0]" to have a "text"'),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, 'expected "content[0].text" to be'),
        ({"role": "user", "content": []}, 'expected "content" to hold text; found it empty'),
        ({**ASKED, "loss_weight": 1.0}, 'expected a "loss_weight" above 0 at the role "assistant" only'),
        ({**SAID, "loss_weight": 0.5}, 'expected "loss_weight" to be 0 or 1; found 0.5'),
    ],
)  # fmt: skip
def test_messages_that_training_cannot_read_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read([{"messages": [message, SAID]}]))
    assert str(caught.value).startswith(f"data, example 1: message 1: {said}")


# Beside


@pytest.mark.parametrize(
    ("beside", "asked", "found"),
    [
        ({"images": ["0.jpg"]}, "<image>Hi", '"images" and <image>'),
        ({"images": []}, "Hi <image>", "<image>"),
        ({"audio": {"path": "a.wav"}}, "Hi", '"audio"'),
        ({"Videos": ["a"], "image": "b"}, "Hi", '"image" and "videos"'),
    ],
)
def test_records_that_show_something_are_refused(beside: dict[str, Any], asked: str, found: str) -> None:
    said = rf"^data, example 1: expected text alone; found {found}: "
    chat = {"messages": [{"role": "user", "content": asked}, SAID], **beside}
    prompt, pair = {"prompt": asked, **beside}, {"prompt": asked, "chosen": "a", "rejected": "b", **beside}
    for reads, record in ((read, chat), (read_prompts, prompt), (read_preferences, pair)):
        with pytest.raises(DataError, match=said):
            list(reads([record]))  # type: ignore[operator]


def test_keys_that_are_not_read_are_named_once() -> None:
    records = read([{"messages": [ASKED, SAID], "id": n, "images": None, "x": None} for n in range(3)])
    assert len(list(records)) == 3 and list(records.seen.ignored) == ["id"]
    many = read([{"text": "a", **{f"{n}" + "k" * 100: 1 for n in range(50)}}])
    assert len(list(many)) == 1 and len(many.seen.ignored) == 20 and max(map(len, many.seen.ignored)) == 60
    prompts = read_prompts([{"prompt": "Hi", "id": 1}])
    assert len(list(prompts)) == 1 and not prompts.seen.ignored  # a grader may read it
    assert list(read([{"text": "<image> is a tag"}])) == [TextRecord("<image> is a tag")]


# Other encodings, wrapped arrays, and other names


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_text_in_utf16_is_read_as_text_in_utf8(tmp_path: Path, encoding: str, packed: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    texts = {
        "a.jsonl": '{"text": "é\u0a0a🚀"}\n{"text": "b"}\n' * 2000,
        "a.json": '[{"text": "é\u0a0a🚀"},\n{"text": "b"}' + ', {"text": "c"}' * 3998 + "]",
        "a.csv": "text;id\r\né\u0a0a🚀;1\r\n" + "b;2\r\n" * 3999,
        "a.txt": "é\u0a0a🚀\n\n" + "b\n\n" * 3999,
    }
    for name, text in texts.items():
        data = (mark + text).encode(encoding)
        path = put(tmp_path, name + packed, gzip.compress(data, mtime=0) if packed else data)
        found = list(read(path))
        assert len(found) == 4000 and found[0] == TextRecord("é\u0a0a🚀"), name
    odd = (mark + '{"text": "b"}\n').encode(encoding)[:-1]
    with pytest.raises(
        DataError, match=r"^b\.jsonl: expected UTF-16, as its first bytes say; truncated data"
    ):
        list(read(put(tmp_path, "b.jsonl", odd)))
    place = put(tmp_path, "c.jsonl", (mark + '{"text": "b"}\n{"text": 3}\n').encode(encoding))
    with pytest.raises(DataError, match=r"^c\.jsonl, line 2: expected"):
        list(read(place))


@pytest.mark.parametrize("before", ["", '"version": "1.0",\n', '"n": -1.5e3, "ok": true,\n "x": "[{",'])
@pytest.mark.parametrize("after", ["", ', "more": {"a": [1]}', '\n, "v": 2\n'])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_array_in_an_object_is_read(tmp_path: Path, before: str, after: str, step: int) -> None:
    text = "\n {" + before + '"data": [{"text": "a]"},\n {"text": "b"}]' + after + "}\n"
    path = put(tmp_path, "a.json", text)
    assert list(read(path)) == [TextRecord("a]"), TextRecord("b")]
    (wrapper, _, _) = text.partition('[{"text')
    chunks = (text.encode()[at : at + step] for at in range(0, len(text.encode()), step))
    elements = Elements(chunks, "a", LIMITS, 5, wrapper.encode())
    assert len(list(elements)) == 2 and elements.place == f"record 2, line {3 + before.count(chr(10))}"


AROUND = "a.json: expected the object around the list of records to end after it;"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"data": [{"text": "a"},\n {"text": 3}]}', 'a.json, record 2, line 2: expected "text"'),
        ('{"data": [{"text": "a"}]', AROUND),
        ('{"data": [{"text": "a"}]}}', AROUND),
        ('{"data": [{"text": "a"}]}\n{"data": [{"text": "a"}]}', AROUND),
        ('{"data": [{"text": "a"}], "x": "' + "y" * 2**17 + '"}', AROUND),
        ('{"data": [{"text": "a"}', "a.json, record 1, line 1: expected the list to end with ];"),
        ('{"data": []}', 'a.json, line 1: expected a JSON object with "messages"'),
    ],
)  # fmt: skip
def test_a_fault_of_a_wrapped_array_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read(put(tmp_path, "a.json", text)))
    assert str(caught.value).startswith(said)


def test_a_line_with_a_list_of_its_own_is_no_array(tmp_path: Path) -> None:
    line = json.dumps({"data": [{"x": 1}], "prompt": "Hi"}) + "\n"
    found = list(read_prompts(put(tmp_path, "a.jsonl", line * 2)))
    assert [one.reference for one in found] == [{"data": [{"x": 1}]}] * 2


def test_a_response_is_a_completion(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "response": "b", "id": 1}, {"prompt": "a", "completion": "c"}]
    records = read(put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert list(records) == [CompletionRecord("a", "b"), CompletionRecord("a", "c")]
    assert list(records.seen.ignored) == ["id"]
    assert list(read(put(tmp_path, "a.csv", "Prompt,Response\na,b\n"))) == [CompletionRecord("a", "b")]
    chat = {"prompt": [ASKED], "response": [SAID]}
    (found,) = read([chat])
    assert isinstance(found, ChatRecord) and found.messages[-1] == ANSWER
    with pytest.raises(DataError, match='expected "response" to'):
        list(read([{"prompt": "a", "response": 3}]))
