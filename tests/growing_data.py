"""Training files of which one thing is repeated, for each container and format."""

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import psutil

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1, {"y": 2}]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2]}}}
Record = Callable[[int], Any]

# A record with something in it n times.
RECORDS: Final[Mapping[str, Record]] = {
    "turns": lambda n: {"messages": [USER, ANSWER] * n},
    "turns of one role": lambda n: {"messages": [USER, *[ANSWER] * n]},
    "tools": lambda n: {"messages": [USER, ANSWER], "tools": [TOOL] * n},
    "tools in text": lambda n: {"messages": [USER, ANSWER], "tools": json.dumps([TOOL] * n)},
    "calls": lambda n: {"messages": [USER, {**ANSWER, "tool_calls": [CALL] * n}]},
    "arguments": lambda n: {
        "messages": [
            USER,
            {
                **ANSWER,
                "tool_calls": [{"function": {"name": "f", "arguments": {str(i): i for i in range(n)}}}],
            },
        ]
    },
    "unknown fields": lambda n: {"messages": [{**USER, **{f"x{i}": None for i in range(n)}}, ANSWER]},
    "columns beside": lambda n: {"text": "a", **{f"x{i}": 1 for i in range(n)}},
    "conversations": lambda n: {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}] * n
    },
    "history": lambda n: {"instruction": "a", "output": "b", "history": [["c", "d"]] * n},
    "pair": lambda n: {"chosen": [USER, *[ANSWER] * n], "rejected": [USER, *[ANSWER] * n, ANSWER]},
    "pair of OpenAI": lambda n: {
        "input": {"messages": [USER] * n},
        "preferred_output": [ANSWER],
        "non_preferred_output": [ANSWER],
    },
    "labelled": lambda n: {"prompt": [USER] * n, "completion": [ANSWER] * n, "label": True},
    "reference": lambda n: {"messages": [USER], "reference": {str(i): [i] for i in range(n)}},
    "references": lambda n: {"messages": [USER], **{f"x{i}": i for i in range(n)}},
    "nested": lambda n: {"messages": [USER], "reference": [[[[[[1] * n]]]]]},
    "text": lambda n: {"text": "word " * n},
    "quotes": lambda n: {"text": '"' * n},
    "escapes": lambda n: {"text": "\\\n\t\x01é\U0001f680" * n},
    "blanks": lambda n: {"text": "a" + " " * n},
    "question": lambda n: {"question": "a" * n, "answer": "b" * n},
    "prompt": lambda n: {"prompt": "[{" * n, "completion": "[{" * n},
    "numbers": lambda n: {"text": "a", "x": [10**9] * n},
    "key": lambda n: {"text": "a", "x" * n: 1},
}


def deep(n: int) -> bytes:
    return b'{"text": ' + b"[" * n + b"]" * n + b"}\n"


# Files in which something other than what is in a record comes n times.
TEXTS: Final[Mapping[str, tuple[str, Callable[[int], bytes]]]] = {
    "records": ("jsonl", lambda n: b'{"text": "a"}\n' * n),
    "blank lines": ("jsonl", lambda n: b'{"text": "a"}\n' + b"\n" * n),
    "blank lines of spaces": ("jsonl", lambda n: b'{"text": "a"}\n' + b" \t\r\n" * n),
    "spaces": ("jsonl", lambda n: b'{"text": "a"}\n' + b" " * n),
    "depth": ("jsonl", deep),
    "open brackets": ("jsonl", lambda n: b"[" * n),
    "broken lines": ("jsonl", lambda n: b'{"text": 3}\n' * n),
    "mixed formats": ("jsonl", lambda n: b'{"text": "a"}\n{"prompt": "a", "completion": "b"}\n' * n),
    "long number": ("jsonl", lambda n: b'{"text": "a", "x": ' + b"9" * n + b"}\n"),
    "paragraphs": ("txt", lambda n: b"one\n\n" * n),
    "lines of a paragraph": ("txt", lambda n: b"one\n" * n),
    "no text": ("txt", lambda n: b" \n" * n),
    "one line": ("txt", lambda n: b"a " * n),
    "columns": (
        "csv",
        lambda n: b"text," + b",".join(b"%d" % i for i in range(n)) + b"\n" + b"," * n + b"\n",
    ),
    "equal columns": ("csv", lambda n: b",".join([b"text"] * n) + b"\n"),
    "blank columns": ("csv", lambda n: b"text" + b"," * n + b"\n"),
    "rows": ("csv", lambda n: b"text\n" + b"one\n" * n),
    "rows of wide tables": (
        "csv",
        lambda n: b"text" + b"".join(b",%d" % i for i in range(500)) + (b"\na" + b"," * 500) * (n // 100),
    ),
    "quoted": ("csv", lambda n: b'text\n"' + b'""' * n + b'"\n'),
    "lines of a cell": ("csv", lambda n: b'text\n"' + b"a\n" * n + b'"\n'),
    "open quote": ("csv", lambda n: b'text\n"' + b"a,\n" * n),
    "short rows": ("csv", lambda n: b"text,id\n" + b"one\n" * n),
    "messages in a cell": (
        "csv",
        lambda n: b'messages\n"' + json.dumps([USER, ANSWER] * n).replace('"', '""').encode() + b'"\n',
    ),
    "what looks like messages": ("csv", lambda n: b'prompt,completion\n"' + b"[{" * n + b'",b\n'),
}


def files(n: int) -> dict[str, tuple[str, bytes]]:
    """(suffix, content) by name, with everything n times."""
    made = {name: (suffix, make(n)) for name, (suffix, make) in TEXTS.items()}
    made |= {name: ("jsonl", json.dumps(make(n)).encode() + b"\n") for name, make in RECORDS.items()}
    packed = {
        f"{name}, compressed": (f"{suffix}.gz", gzip.compress(data, 6, mtime=0))
        for name, (suffix, data) in made.items()
        if name in ("records", "blank lines", "paragraphs", "rows", "turns", "text")
    }
    return made | packed


def equal_rows(n: int) -> Any:
    import pyarrow

    return pyarrow.table({"text": pyarrow.array(["a"]).take(pyarrow.array([0] * n))})


def parquet(table: Any) -> bytes:
    from pyarrow.parquet import write_table

    file = io.BytesIO()
    write_table(table, file, compression="zstd")
    return file.getvalue()


def columns(n: int) -> dict[str, bytes]:
    """Parquet files by name, with something n times; none without pyarrow."""
    try:
        import pyarrow
    except ImportError:
        return {}
    tables = {
        "equal rows": equal_rows(n),
        "rows": pyarrow.table({"text": [f"row {i}" for i in range(n)]}),
        "columns": pyarrow.table({"text": ["a"], **{f"x{i}": [1] for i in range(n // 20)}}),
        "lists": pyarrow.table({"messages": [[USER, ANSWER] * n]}),
        "nulls": pyarrow.table({"text": ["a"] * n, "x": [None] * n}),
        "one text": pyarrow.table({"text": ["a" * n]}),
    }
    return {name: parquet(table) for name, table in tables.items()}


def slow_file(lines: int = 400_000) -> bytes:
    """Takes ten seconds or so to read."""
    return b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n' * lines


def readers(process: int) -> Iterator[psutil.Process]:
    """The sandboxes of a process that are reading training data now."""
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "coserve.jobs.child:read" in child.cmdline() and child.cpu_percent(0.1) > 1:
                yield child
