"""Files of traces: three formats, and one error with line and field for what is wrong in them."""

import json
from pathlib import Path

import pytest

from coserve.errors import DataError
from coserve.workload.trace_formats import TraceRow, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.6805900,1000,1
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 472, "output_length": 26, "hash_ids": [46]}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def mooncake(at: float, prompt: float, blocks: list[int] | None = None) -> str:
    return json.dumps({"timestamp": at, "input_length": prompt, "output_length": 2, "hash_ids": blocks or []})


def test_azure_counts_from_its_first_request(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE))
    assert [(row.prompt, row.answer) for row in rows] == [(374, 44), (396, 109), (1000, 1)]
    assert [row.at for row in rows] == pytest.approx([0.0, 4.314579, 5.0])


def test_azure_2024_has_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert read_trace(write(tmp_path, text)) == [TraceRow(0.0, 2162, 5)]


def test_burstgpt_is_in_seconds(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, BURST)) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 230)]


def test_mooncake_is_in_milliseconds_and_has_blocks(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, MOONCAKE))
    assert (first.at, first.blocks, second.prompt, second.answer) == (0.0, (46, 47), 472, 26)
    assert second.at == pytest.approx(3.053)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AZURE + "2023-11-16 18:15:52,many,3", "line 5: expected ContextTokens to be a number of tokens"),
        (AZURE + "yesterday,1,2", "line 5: expected TIMESTAMP to be a time, got 'yesterday'"),
        (AZURE + "2023-11-16 18:15:52,1", "line 5: expected GeneratedTokens to be a number"),
        (AZURE + "2023-11-16 18:15:52,,1", "line 5: expected ContextTokens to be a number"),
        (AZURE + "2023-11-16 18:15:51,9,9", "line 5: TIMESTAMP goes backwards: 2023-11-16 18:15:51 comes"),
        (BURST + "44,ChatGPT,9,9,18,x", "line 4: Timestamp goes backwards: 44 comes 1 s before"),
        (BURST + "nan,ChatGPT,9,9,18,x", "line 4: expected Timestamp to be a time"),
        (BURST + "50,ChatGPT,9,0,9,x", "line 4: expected Response tokens to be a number of tokens, at least"),
        (MOONCAKE + "[1]", "line 3: expected a JSON object"),
        (MOONCAKE + mooncake(1e5, 1.5), "line 3: expected input_length"),
        (MOONCAKE + mooncake(1e5, 900, [1]), "line 3: expected hash_ids"),
        (MOONCAKE + mooncake(1, 9), "line 3: timestamp goes backwards"),
        ("a,b\n1,2\n", "line 1: expected the columns of a trace"),
        (AZURE.splitlines()[0], "at least one request"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        read_trace(write(tmp_path, text))
    assert said in str(caught.value) and "trace.csv" in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a trace: No such file"):
        read_trace(tmp_path / "none.csv")


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="expected text in UTF-8"):
        read_trace(path)
