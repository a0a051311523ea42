"""Training files with anything in them: broken ones of every container, drawn from a seed."""

import gzip
import io
import json
import random
from collections.abc import Callable
from typing import Any

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
RECORDS: list[dict[str, Any]] = [
    {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {
        "messages": [
            CHAT[0],
            {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
            CHAT[1],
        ]
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be."},
    {"instruction": "Add", "input": "1 2", "output": "3", "history": [["a", "b"]]},
    {"prompt": "a", "completion": "b"},
    {"question": "a", "answer": "b"},
    {"text": "a"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"input": {"messages": CHAT[:1]}, "preferred_output": CHAT[1:], "non_preferred_output": CHAT[1:]},
    {"messages": CHAT[:1], "reference": {"answer": [1, 2]}},
]


def anything(draws: random.Random) -> Any:
    """A value of any kind and size."""
    deep: Any = 0
    for _ in range(draws.choice([3, 40, 900])):
        deep = [deep] if draws.random() < 0.5 else {"a": deep}
    return draws.choice([
        None, True, 0, -1, 10**30, 1e308, "", " ", "x", "\x00", "é" * 50, "x" * 300_000, "{",
        "[]", '[{"a": 1}]', [], {}, [None], [[]], [{}], {"role": "user"},
        {"role": "assistant", "content": []}, deep, {"": deep}, [CHAT], CHAT[0], CHAT, [*CHAT, 3],
        {"messages": CHAT}, {"x" * 3000: 1},
    ])  # fmt: skip


def spoiled(value: Any, draws: random.Random) -> Any:
    """The value with something else somewhere in it, or nowhere."""
    if draws.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return anything(draws)
    if isinstance(value, list):
        at = draws.randrange(len(value))
        return [*value[:at], spoiled(value[at], draws), *value[at + 1 :]]
    key = draws.choice(list(value))
    action = draws.random()
    if action < 0.1:
        return {other: inner for other, inner in value.items() if other != key}
    if action < 0.2:
        return {**value, draws.choice(["weight", "name", "tools", "id", "\x00", "x" * 500]): anything(draws)}
    return {**value, key: spoiled(value[key], draws)}


def spoil_bytes(data: bytes, draws: random.Random) -> bytes:
    """The bytes with some changed, cut off, or put in."""
    spoilt = bytearray(data)
    for _ in range(draws.choice([0, 1, 3])):
        at = draws.randrange(len(spoilt) + 1)
        spoilt[at : at + draws.choice([0, 1, 1, 4])] = draws.randbytes(draws.choice([0, 1, 4]))
    return bytes(spoilt[: draws.randrange(len(spoilt) + 1)] if draws.random() < 0.3 else spoilt)


def jsonl(draws: random.Random) -> bytes:
    fine = draws.choice(RECORDS)
    lines = [json.dumps(fine)] * draws.randrange(3)
    lines += [json.dumps(spoiled(fine, draws)) for _ in range(draws.randrange(1, 4))]
    if draws.random() < 0.1:
        lines.append("[" * 200_000)
    data = "\n".join(lines).encode()
    return spoil_bytes(data, draws) if draws.random() < 0.4 else data


def array(draws: random.Random) -> bytes:
    fine = draws.choice(RECORDS)
    records = [fine] * draws.randrange(3) + [spoiled(fine, draws) for _ in range(draws.randrange(3))]
    data = json.dumps(records, indent=draws.choice([None, 1])).encode()
    return spoil_bytes(data, draws) if draws.random() < 0.6 else data


def packed(draws: random.Random) -> bytes:
    data = gzip.compress(jsonl(draws), mtime=0)
    return spoil_bytes(data, draws) if draws.random() < 0.6 else data


def table(draws: random.Random) -> bytes:
    columns = [*draws.choice(RECORDS), *draws.choice([[], ["id"], ["messages"], [""] * 3, ["x"] * 2000])]
    cells = [
        '"a"',
        "a",
        "",
        '"',
        '""',
        '"a\n',
        json.dumps(json.dumps(CHAT)),
        "[" * 5000,
        "a" * 140_000,
        "\x00",
    ]
    if draws.random() < 0.3:
        columns, cells = (
            draws.choice([["text"], ["prompt", "completion"], ["question", "answer", "id"]]),
            cells[:2],
        )
    rows = [",".join(draws.choice(cells) for _ in range(draws.choice([len(columns)] * 3 + [1])))
            for _ in range(3)]  # fmt: skip
    return spoil_bytes("\n".join([",".join(columns), *rows]).encode(), draws)


def columns(draws: random.Random) -> bytes:
    """A Parquet file; where pyarrow is missing only what begins and ends like one."""
    try:
        from pyarrow import ArrowException, Table
        from pyarrow.parquet import write_table
    except ImportError:
        return spoil_bytes(b"PAR1" + draws.randbytes(200) + b"\x80\x00\x00\x00PAR1", draws)
    rows = [draws.choice(RECORDS)] * draws.randrange(1, 200)
    if draws.random() < 0.5:
        rows.append(spoiled(rows[0], draws))
    file = io.BytesIO()
    try:
        write_table(Table.from_pylist(rows), file, compression=draws.choice(["none", "snappy", "zstd"]))
    except (ArrowException, ValueError, TypeError, OverflowError, RecursionError, NotImplementedError):
        return b"PAR1"  # a table that nobody can write
    return spoil_bytes(file.getvalue(), draws)


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    ".jsonl": jsonl,
    ".jsonl.gz": packed,
    ".json": array,
    ".csv": table,
    ".csv.gz": lambda draws: gzip.compress(table(draws), mtime=0),
    ".txt": lambda draws: spoil_bytes(b"one\n\ntwo\n" * 20, draws),
    ".parquet": columns,
}


def bomb(megabytes: int) -> bytes:
    """A gzip file of a few kilobytes that unpacks to so much JSONL."""
    line = b'{"text": "' + b"a" * 4000 + b'"}\n'
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=9, mtime=0) as packing:
        for _ in range(megabytes * 2**20 // len(line) + 1):
            packing.write(line)
    return file.getvalue()
