"""Runs on modelled hardware: loads, what fits, sweeps, comparisons, advice, traces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.simulate.advise import Wanted, advise
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.models import model_shape
from coserve.simulate.runs import USED, FleetSettings, Simulator
from coserve.simulate.sweep import compare, figures_of, sweep
from coserve.simulate.tracing import PerfettoTrace
from coserve.workload.requests import ServedAdapters
from coserve.workload.shapes import shape_named
from coserve.workload.trace_formats import BLOCK, TraceRow

LLAMA = shape_named("8b")
LOAD = SimulatedLoad(6.0, 4.0, slo=SLO(first_token=1.0, between_tokens=0.1), training=TrainingLoad(1, 2, 256))
H100 = FleetSettings(LLAMA, "h100")


# Loads


def test_a_trace_is_replayed_as_recorded_or_at_a_rate() -> None:
    trace = tuple(TraceRow(float(at), 10 + at, 2) for at in range(10))
    recorded = SimulatedLoad(5.0, trace=trace)
    assert [request.at for request in recorded.requests(0)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(request.prompt) for request in recorded.requests(0)] == [10, 11, 12, 13, 14]
    twice = [*SimulatedLoad(20.0, 2.0, trace).requests(0)]
    assert len(twice) == 40 and twice[-1].at == pytest.approx(19.5)
    assert [r.at for r in twice] == sorted(r.at for r in twice)
    assert [*SimulatedLoad(5.0, 2.0, trace).requests(1)] != [*SimulatedLoad(5.0, 2.0, trace).requests(2)]
    assert len([*SimulatedLoad(50.0, trace=trace).requests(0)]) == 10  # it ends where it ends


def test_blocks_of_a_trace_are_common_beginnings() -> None:
    trace = (TraceRow(0.0, 600, 2, (1, 2)), TraceRow(1.0, 700, 2, (1, 3)))
    load = SimulatedLoad(5.0, trace=trace)
    first, second = load.requests(0)
    assert load.shares_prefixes and (len(first.prompt), len(second.prompt)) == (600, 700)
    assert first.prompt[:BLOCK] == second.prompt[:BLOCK] and first.prompt[BLOCK] != second.prompt[BLOCK]
    hits = Simulator(replace(H100), load).run(0)
    cold = Simulator(H100, replace(load, trace=(trace[0], replace(trace[1], blocks=(4, 3))))).run(0)
    assert hits.answers[1].first_token < cold.answers[1].first_token


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seconds": 0.0}, "positive number of seconds"),
        ({"rate": -1.0}, "positive rate"),
        ({"rate": None}, "need a trace, or a rate"),
        ({"arrivals": "odd"}, "no arrivals 'odd'; there are poisson, bursty, steady, spread"),
        ({"prompt": 0}, "at least one token"),
    ],
)
def test_loads_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(LOAD, **wrong)  # type: ignore[arg-type]


# What fits


def test_what_does_not_fit_is_told_with_what_it_takes() -> None:
    seventy = replace(H100, shape=shape_named("70b"))
    with pytest.raises(
        ConfigError, match=r"70b does not fit on 1 x NVIDIA H100.*its weights take 141 GB.*takes 4"
    ):
        Simulator(seventy, LOAD)
    held = Simulator(replace(seventy, degree=4), LOAD)
    alone = Simulator(replace(seventy, degree=4), replace(LOAD, training=TrainingLoad()))
    assert 0 < held.cache_tokens < alone.cache_tokens
    # Eight key-value heads of 128 channels in 80 layers, in bfloat16, are 320 KB a token.
    free = 4 * 80e9 * USED - shape_named("70b").parameters * 2
    assert alone.cache_tokens == pytest.approx(free / (2 * 8 * 128 * 80 * 2), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hardware": "h1000"}, "no hardware 'h1000'"),
        ({"policy": "luck"}, "no policy 'luck'"),
        ({"router": "luck"}, "no router 'luck'"),
        ({"degree": 5}, "32 heads, which 5 devices cannot share"),
        ({"engines": 0}, "at least one engine"),
        ({"hardware": "two-cores"}, "measured for one device and the shape 255m of 16 layers"),
    ],
)
def test_fleets_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Simulator(replace(H100, **wrong), LOAD)  # type: ignore[arg-type]


def test_a_models_folder_has_a_shape(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert replace(model_shape(str(tmp_path)), name="8b") == LLAMA
    for name, value, said in (
        ("hidden_size", None, "hidden_size: expected a whole number"),
        ("num_key_value_heads", "8", "num_key_value_heads: expected a whole number"),
        ("head_dim", 64, "head_dim: 64 times 32 heads is not 4096"),
        ("num_local_experts", 8, "num_local_experts: layers with experts"),
        ("torch_dtype", "int8", "dtype: expected one of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(ConfigError, match=said):
            model_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="no model 'gpt-9'"):
        model_shape("gpt-9")


# Runs


def test_decode_takes_what_the_roofline_says() -> None:
    """Llama-3.1-8B on an H100: 15 GB of weights at 80 % of 3.35 TB/s are 5.6 ms a step."""
    load = SimulatedLoad(4.0, 2.0, prompt=64, answer=64)
    figures = figures_of(Simulator(H100, load).run(0))
    assert figures.unanswered == 0 and figures.training == 0
    assert figures.time_per_token_mean == pytest.approx(7.2e-3, rel=0.1)


def test_a_seed_gives_the_same_run_and_another_another() -> None:
    simulator = Simulator(H100, LOAD)
    first, again, other = (figures_of(simulator.run(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_sweeps_have_a_cell_for_each_combination_and_compare_pairs() -> None:
    cells = [
        *sweep(
            H100, replace(LOAD, seconds=3.0), ["hybrid", "idle-only"], ["h100", "l40s"], [2.0, 8.0], [0, 1]
        )
    ]
    assert [(c.hardware, c.rate, c.policy) for c in cells] == [
        (hardware, rate, policy)
        for hardware in ("h100", "l40s")
        for rate in (2.0, 8.0)
        for policy in ("hybrid", "idle-only")
    ]
    told = cells[0].as_dict()
    assert told["interval"]["training"][0] < told["mean"]["training"] < told["interval"]["training"][1]
    found = {one.name: one for one in compare(cells[0], cells[1])}
    assert found["training"].second - found["training"].first == pytest.approx(found["training"].difference)
    assert found["training"].is_sure and found["training"].difference < 0
    assert compare(cells[0], cells[0])[0].difference == 0.0
    (single,) = sweep(H100, LOAD, ["hybrid"], ["h100"], [2.0], [0])
    assert single.as_dict()["interval"]["within"] is None


def test_advice_is_the_fewest_engines_that_hold_the_bounds() -> None:
    load = SimulatedLoad(4.0, 60.0, slo=SLO(first_token=0.4, between_tokens=0.03))
    wanted = Wanted(0.95, devices=16)
    found = advise(H100, load, wanted, ["hybrid"], ["a100-80", "h100"], degrees=(1,))
    assert found and found[0].price == min(advice.price for advice in found)
    best = found[0].settings
    assert wanted.is_met(found[0].cell)
    if best.engines > 1:
        (fewer,) = sweep(
            replace(best, engines=best.engines - 1), load, [best.policy], [best.hardware], [60.0], [0]
        )
        assert not wanted.is_met(fewer)
    dear = replace(wanted, prices={"h100": 100.0, "a100-80": 1.0})
    assert (
        advise(H100, load, dear, ["hybrid"], ["a100-80", "h100"], degrees=(1,))[0].settings.hardware
        == "a100-80"
    )


def test_advice_says_why_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="70b does not fit"):
        advise(replace(H100, shape=shape_named("70b")), LOAD, Wanted(), ["hybrid"], ["l4"], degrees=(1,))
    impossible = replace(LOAD, slo=SLO(between_tokens=1e-4))
    assert advise(H100, impossible, Wanted(devices=2), ["hybrid"], ["h100"], degrees=(1,)) == []


def test_a_trace_of_a_run_has_its_steps_and_requests(tmp_path: Path) -> None:
    load = replace(LOAD, adapters=ServedAdapters(2, 8))
    trace = PerfettoTrace()
    found = Simulator(replace(H100, engines=2), load).run(0, watch=trace.watch)
    trace.requests(found.answers)
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert 0 < len(steps) <= found.steps
    for number in range(2):
        own = [event for event in steps if event["pid"] == number]
        ends = [event["ts"] + event["dur"] for event in own]
        assert all(end <= after["ts"] + 1e-3 for end, after in zip(ends, own[1:], strict=False))
    decoded = sum(event["args"].get("decode", 0) for event in steps)
    assert decoded == sum(answer.tokens - 1 for answer in found.answers)
    assert len([event for event in events if event["ph"] == "b"]) == len(found.answers)
