import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError, DataError
from coserve.workload import arrivals, mixes, prompts, traces, traffic
from coserve.workload.requests import Workload
from coserve.workload.traces import TraceRow

GIVEN = mixes.WorkloadSettings(vocabulary=50, seconds=20.0, slo=SLO(end_to_end=2.0), seed=4)
SMALL = mixes.TrainingSpec(batch=2, length=6, examples=4)


def recorded() -> list[TraceRow]:
    """An hour: one request a second, and twice as many more while seconds 1,100 to 1,140 last."""
    draw = random.Random(0)
    times = [draw.uniform(0.0, 3600.0) for _ in range(3600)]
    times += [draw.uniform(1100.0, 1140.0) for _ in range(80)]
    return [TraceRow(at, draw.randrange(10, 4000), draw.randrange(1, 600)) for at in sorted(times)]


TRACE = recorded()


def built(given: mixes.WorkloadSettings = GIVEN) -> list[Workload]:
    """One of each kind, small."""
    kinds = traffic.service_tiers(first_token=0.1, between_tokens=0.05, end_to_end=2.0, deferral=9.0)
    with_adapters = mixes.ServedAdapters(4, 16, exponent=1.0)
    whole = replace(SMALL, weights=(3.0, 1.0))
    return [
        traffic.report(given, every=0.5, tune_every=8.0, examples=6, training=SMALL),
        traffic.fineinfer(given, deferral=0.4, training=SMALL),
        traffic.flexllm(given, rate=2.0, prompt=25, answer=6, training=replace(SMALL, targets=traffic.MLP)),
        traffic.poisson(given, rate=3.0, training=SMALL, adapters=with_adapters),
        traffic.bursty(given, rate=3.0, training=SMALL),
        traffic.azure(given, TRACE, rate=3.0, longest_prompt=40, longest_answer=20, training=SMALL),
        traffic.azure_arrivals(given, TRACE, rate=3.0, training=SMALL),
        traffic.tiers(given, kinds, rate=3.0, training=whole),
    ]


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
    begin = traces.find_peak_window(TRACE, 360.0)
    assert begin == pytest.approx(1000.0, abs=30.0)  # the peak, at 1,120, comes after a third of it
    part = traces.trace_part(
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
    part = traces.trace_part(rows, 1.0, 5.0, begin=20.5, length=5.0, longest_prompt=9, longest_answer=99)
    assert [row.at for row in part.scaled.rows] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert [(row.prompt, row.answer) for row in part.scaled.rows] == [(9, 10)] * 5


def test_a_window_with_too_few_requests_is_refused() -> None:
    rows = [TraceRow(float(at), 10, 10) for at in range(100)]
    with pytest.raises(ConfigError, match=r"6 requests are wanted, but seconds 20 to 25 .* have 5"):
        traces.trace_part(rows, 1.2, 5.0, begin=20.0, length=5.0, longest_prompt=9, longest_answer=9)
    with pytest.raises(ConfigError, match="shorter than 360 s"):
        traces.find_peak_window(rows)


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
    tokenize = prompts.word_tokenizer(vocabulary=32_000, seed=1)
    first, second, again = tokenize("one two one")
    assert first == again != second
    assert max(prompts.word_tokenizer(7)(" ".join(map(str, range(99))))) < 7
    assert tokenize("one two") != prompts.word_tokenizer(vocabulary=32_000, seed=2)("one two")
    assert tokenize("one") == [30_845]  # the same on every machine


def test_encoded_prompts_are_cut_and_never_empty() -> None:
    tokenize = prompts.word_tokenizer(10)
    assert [len(ids) for ids in prompts.encode_prompts(["a b c d", "a"], tokenize, longest=3)] == [3, 1]
    with pytest.raises(DataError, match="nothing of prompt 2"):
        prompts.encode_prompts(["a", ""], tokenize, longest=3)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_popularity_follows_the_power_law(exponent: float) -> None:
    names = [f"a{i}" for i in range(8)]
    drawn = Counter(prompts.draw_by_popularity(names, 40_000, exponent, seed=3))
    total = sum(rank**-exponent for rank in range(1, 9))
    for rank, name in enumerate(names, 1):
        assert drawn[name] / 40_000 == pytest.approx(rank**-exponent / total, rel=0.12)


# Workloads


def test_every_workload_is_decided_by_its_seed() -> None:
    first, again, other = built(), built(), built(replace(GIVEN, seed=5))
    assert first == again
    assert all(a.requests != b.requests and a.jobs != b.jobs for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("workload", built(), ids=lambda w: w.name)
def test_every_workload_is_whole(workload: Workload) -> None:
    times = [request.at for request in workload.requests]
    assert times == sorted(times)
    assert all(0.0 <= at < GIVEN.seconds for at in times)
    tokens = {token for request in workload.requests for token in request.prompt}
    tokens |= {token for job in workload.jobs for example in job.examples for token in example}
    assert tokens <= set(range(50))
    assert all(request.prompt and request.answer >= 1 for request in workload.requests)
    assert {request.adapter for request in workload.requests} - {None} <= {n for n, _ in workload.served}
    assert not {job.adapter for job in workload.jobs} & {name for name, _ in workload.served}
    assert workload.title and workload.scale


def test_names_are_not_shared() -> None:
    names = [workload.name for workload in built()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("workload", built()[2:], ids=lambda w: w.name)
def test_the_load_offered_is_exact(workload: Workload) -> None:
    assert len(workload.requests) == (40 if workload.name == "flexllm" else 60)


def test_the_report_tunes_by_the_clock() -> None:
    made = traffic.report(GIVEN, every=0.5, tune_every=8.0, examples=6, training=SMALL)
    assert [request.at for request in made.requests] == pytest.approx([i / 2 for i in range(40)])
    assert [(job.at, len(job.examples), job.batch, job.epochs) for job in made.jobs] == [
        (0.0, 6, 2, 1),
        (8.0, 6, 2, 1),
        (16.0, 6, 2, 1),
    ]
    assert len({job.adapter for job in made.jobs}) == 3
    assert len({job.examples for job in made.jobs}) == 3
    assert len(made.served) == 32 and all(rank == 32 for _, rank in made.served)
    assert len({request.adapter for request in made.requests}) > 16
    assert "every 0.5 s (there 0.1), 6 examples in batches of 2 every 8 s" in made.scale


def test_fineinfers_requests_carry_the_deferral_bound() -> None:
    made = traffic.fineinfer(GIVEN, deferral=0.4, spread=1.0, training=SMALL)
    assert {request.slo for request in made.requests} == {SLO(end_to_end=2.0, deferral=0.4)}
    assert made.jobs[0].epochs == mixes.ENDLESS
    gaps = [after.at - before.at for before, after in pairwise(made.requests)]
    assert max(gaps) <= 1.0
    assert "within 1 s of the last one (there 2), deferred by at most 0.4 s" in made.scale


def test_flexllms_shape_is_the_papers() -> None:
    made = traffic.flexllm(GIVEN, rate=1.0)
    assert {(len(request.prompt), request.answer) for request in made.requests} == {(256, 64)}
    (job,) = made.jobs
    assert {len(example) for example in job.examples} == {1024}
    assert (job.rank, job.targets) == (8, ("gate_proj", "up_proj", "down_proj"))
    assert len(traffic.azure_arrivals(GIVEN, TRACE, rate=1.0).requests[0].prompt) == 64


def test_trace_lengths_are_kept_or_fixed() -> None:
    whole = traffic.azure(GIVEN, TRACE, rate=3.0, longest_prompt=40, longest_answer=20, training=SMALL)
    fixed = traffic.azure_arrivals(GIVEN, TRACE, rate=3.0, training=SMALL)
    assert [request.at for request in whole.requests] == [request.at for request in fixed.requests]
    assert len({len(request.prompt) for request in whole.requests}) > 10
    assert {(len(request.prompt), request.answer) for request in fixed.requests} == {(64, 32)}
    assert "prompts x 0.01" in whole.scale and "time x 0.0556" in whole.scale
    assert "all lengths fixed: 64 random tokens in, 32 out" in fixed.scale


def test_texts_are_cut_and_said_again_only_where_lengths_are_recorded() -> None:
    given = replace(GIVEN, prompts=((1, 2, 3), (4, 5, 6, 7, 8)))
    made = traffic.poisson(given, rate=3.0, prompt=4, training=SMALL)
    assert {request.prompt for request in made.requests} == {(1, 2, 3), (4, 5, 6, 7)}
    assert "at most 4 tokens of one of 2 texts in" in made.scale
    filled = traffic.azure(given, TRACE, rate=3.0, longest_prompt=40, training=SMALL)
    longest = max((request.prompt for request in filled.requests), key=len)
    assert len(longest) == 40
    assert longest[:6] in {(1, 2, 3, 1, 2, 3), (4, 5, 6, 7, 8, 4)}


def test_tiers_have_their_shares_and_bounds() -> None:
    kinds = traffic.service_tiers(first_token=0.1, between_tokens=0.05, end_to_end=2.0, deferral=9.0)
    made = traffic.tiers(GIVEN, kinds, rate=3.0, training=replace(SMALL, weights=(3.0, 1.0)))
    priority, default, flex = SLO(0.1, 0.05), SLO(end_to_end=2.0), SLO(deferral=9.0)
    assert Counter(request.slo for request in made.requests) == {priority: 18, default: 24, flex: 18}
    assert [request.slo for request in made.requests[:18]] != [priority] * 18
    assert [job.weight for job in made.jobs] == [3.0, 1.0]
    assert made.jobs[0].examples != made.jobs[1].examples
    assert "30% priority (first token 0.1 s, between tokens 0.05 s)" in made.scale
    assert "jobs weigh 3 : 1" in made.scale


def test_shares_need_not_add_up_to_one() -> None:
    kinds = [mixes.Tier("a", 2.0, SLO(deferral=1.0)), mixes.Tier("b", 1.0, SLO(deferral=2.0))]
    made = traffic.tiers(GIVEN, kinds, rate=0.5, training=SMALL)
    assert Counter(request.slo.deferral for request in made.requests) == {1.0: 7, 2.0: 3}
    with pytest.raises(ConfigError, match="shares"):
        traffic.tiers(GIVEN, [], rate=0.5, training=SMALL)


def test_the_azure_trace_has_popular_adapters_on_request() -> None:
    adapters = mixes.ServedAdapters(3, 16, exponent=1.0)
    made = traffic.azure(GIVEN, TRACE, rate=10.0, training=SMALL, adapters=adapters)
    asked = Counter(request.adapter for request in made.requests)
    assert asked["served-00"] > asked["served-01"] > asked["served-02"] > 0
    assert "by a synthetic power law of exponent 1" in made.scale
    assert made.served == (("served-00", 16), ("served-01", 16), ("served-02", 16))
