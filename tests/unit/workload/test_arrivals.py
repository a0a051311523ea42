from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from coserve.errors import ConfigError, DataError
from coserve.workload import arrivals, prompts
from coserve.workload.trace_formats import TraceRow
from coserve_benchmarks import mixes
from recorded import TRACE

# Arrivals


@pytest.mark.parametrize("variation", [1.0, 2.0, 4.0])
def test_bursts_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    times = arrivals.gamma_times(rate=5.0, seconds=4000.0, variation=variation, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == 20_000
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] < 4000.0
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.06)


def test_bursts_of_any_size_stay_within_the_load() -> None:
    for seed in range(20):
        times = arrivals.gamma_times(rate=0.5, seconds=4.0, variation=300.0, seed=seed)
        assert len(times) == 2
        assert all(0.0 <= at < 4.0 for at in times)


@pytest.mark.parametrize("variation", [0.9, 0.0, float("nan"), float("inf")])
def test_what_is_steadier_than_poisson_is_no_burst(variation: float) -> None:
    with pytest.raises(ConfigError, match="coefficient of variation of at least 1"):
        arrivals.gamma_times(1.0, 10.0, variation)


def test_the_next_request_comes_within_the_spread() -> None:
    times = arrivals.spread_times(spread=2.0, seconds=4000.0, seed=2)
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert min(gaps) >= 0.0
    assert max(gaps) <= 2.0
    assert fmean(gaps) == pytest.approx(1.0, rel=0.05)
    assert sum(gap > 1.0 for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=0.03)
    assert 3998.0 <= times[-1] < 4000.0


def test_steady_requests_come_on_the_beat_and_before_the_end() -> None:
    assert arrivals.steady_times(gap=0.1, seconds=0.3) == pytest.approx([0.0, 0.1, 0.2])
    assert arrivals.steady_times(gap=2.0, seconds=5.0) == [0.0, 2.0, 4.0]
    assert arrivals.steady_times(gap=9.0, seconds=5.0) == [0.0]
    assert len(arrivals.steady_times(gap=0.1, seconds=60.0)) == 600


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_arrivals_need_positive_numbers(bad: float) -> None:
    for call in (
        lambda: arrivals.gamma_times(bad, 1.0, 2.0),
        lambda: arrivals.spread_times(bad, 1.0),
        lambda: arrivals.steady_times(1.0, bad),
    ):
        with pytest.raises(ConfigError, match="positive"):
            call()


def test_a_window_keeps_its_shape_when_it_is_pressed_and_thinned() -> None:
    begin = 1000.0  # the peak, at 1,120, comes after a third of it
    part = mixes.trace_part(
        TRACE, 6.0, 36.0, begin=begin, length=360.0, longest_prompt=100, longest_answer=10, seed=1
    )
    rows = part.scaled.rows
    assert len(rows) == part.kept == 216
    assert part.scaled.time_scale == pytest.approx(0.1)
    assert all(0.0 <= row.at < 36.0 for row in rows)
    assert max(row.prompt for row in rows) == 100
    assert max(row.answer for row in rows) == 10
    at_peak = sum(10.0 <= row.at < 14.0 for row in rows) / 4.0
    elsewhere = sum(row.at < 8.0 or row.at > 16.0 for row in rows) / 28.0
    assert at_peak > 2.0 * elsewhere
    said = part.arrivals()
    assert f"seconds {begin:.0f} to {begin + 360:.0f} of the trace, 216 of its {part.found}" in said
    assert "time x 0.1" in said


def test_a_window_counts_from_its_own_beginning() -> None:
    rows = [TraceRow(float(at), 10, 10) for at in range(100)]
    part = mixes.trace_part(rows, 1.0, 5.0, begin=20.5, length=5.0, longest_prompt=9, longest_answer=99)
    assert [row.at for row in part.scaled.rows] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert [(row.prompt, row.answer) for row in part.scaled.rows] == [(9, 10)] * 5


def test_a_window_with_too_few_requests_is_refused() -> None:
    rows = [TraceRow(float(at), 10, 10) for at in range(100)]
    with pytest.raises(ConfigError, match=r"6 requests are wanted, but seconds 20 to 25 .* have 5"):
        mixes.trace_part(rows, 1.2, 5.0, begin=20.0, length=5.0, longest_prompt=9, longest_answer=9)


# Prompts and popularity


def test_prompts_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('act,prompt\na,"one, with\nline"\nb,two\n')
    assert prompts.read_prompts(path) == ["one, with\nline", "two"]


def test_prompts_of_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "text": "no"}\n{"question": "b", "answer": "no"}\n\n{"text": "c"}\n'
        '{"messages": [{"role": "system", "content": "d"}, {"role": "user", "content": "e"},'
        ' {"role": "assistant", "content": "no"}]}\n'
        '{"messages": [{"role": "user", "content": "f"}]}\n'
    )
    assert prompts.read_prompts(path) == ["a", "b", "c", "d\ne", "f"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.csv", "act,text\na,b\n", r"p\.csv, line 1: expected a column `prompt`, got \['act', 'text'\]"),
        ("p.csv", 'act,prompt\na,"x\ny"\nb, \n', r"p\.csv, line 4: expected a prompt, got nothing"),
        ("p.csv", "act,prompt\na\n", r"p\.csv, line 2: expected a prompt, got nothing"),
        ("p.csv", "act,prompt\n", r"p\.csv: expected at least one prompt"),
        ("p.jsonl", "", r"p\.jsonl: expected at least one prompt"),
        ("p.jsonl", '{"text": "a"}\n{"te\n', r"p\.jsonl, line 2: expected JSON"),
        ("p.jsonl", "[1]\n", r'p\.jsonl, line 1: expected an object with "prompt", .* got list'),
        ("p.jsonl", '{"body": "a"}\n', r'line 1: expected an object with "prompt", .* got body'),
        ("p.jsonl", '{"text": 3}\n', r'line 1: expected text in "text", got int'),
        ("p.jsonl", '{"text": " "}\n', r'line 1: expected text in "text", got nothing'),
        ("p.jsonl", '{"messages": "a"}\n', r'line 1: expected "messages" to be turns .* got str'),
        ("p.jsonl", '{"messages": [{"role": "user"}]}\n', r'line 1: expected "messages" to be turns'),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', "none before the answer"),
    ],
)
def test_a_bad_row_of_prompts_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        prompts.read_prompts(tmp_path / name)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: expected a file of prompts"):
        prompts.read_prompts(tmp_path / "none.csv")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"bytes\.jsonl: expected text in UTF-8"):
        prompts.read_prompts(tmp_path / "bytes.jsonl")


def test_words_without_a_tokenizer_are_hashed() -> None:
    tokenize = mixes.word_tokenizer(vocabulary=32_000, seed=1)
    first, second, again = tokenize("one two one")
    assert first == again != second
    assert max(mixes.word_tokenizer(7)(" ".join(map(str, range(99))))) < 7
    assert tokenize("one two") != mixes.word_tokenizer(vocabulary=32_000, seed=2)("one two")
    assert tokenize("one") == [30_845]  # the same on every machine


def test_encoded_prompts_are_cut_and_never_empty() -> None:
    tokenize = mixes.word_tokenizer(10)
    assert [len(ids) for ids in mixes.encode_prompts(["a b c d", "a"], tokenize, longest=3)] == [3, 1]
    with pytest.raises(DataError, match="nothing of prompt 2"):
        mixes.encode_prompts(["a", ""], tokenize, longest=3)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_popularity_follows_the_power_law(exponent: float) -> None:
    names = [f"a{i}" for i in range(8)]
    drawn = Counter(prompts.draw_by_popularity(names, 40_000, exponent, seed=3))
    total = sum(rank**-exponent for rank in range(1, 9))
    for rank, name in enumerate(names, 1):
        assert drawn[name] / 40_000 == pytest.approx(rank**-exponent / total, rel=0.12)
