"""Papers' settings: devices hold their models, figures are computed from the same loads, and statements say
what agrees."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from coserve.simulate.hardware import hardware_named
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.split.batching import BatchingConfig
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.simulation.papers import blockllm, flexllm, report, speculation
from coserve_benchmarks.simulation.papers.blockllm import Provisions, play
from coserve_benchmarks.simulation.papers.fineinfer import CONTINUOUS, FineInfer
from coserve_benchmarks.simulation.papers.flexllm import (
    HARDWARE,
    HEAVY,
    ISOLATED,
    NAMED,
    PIPELINES,
    POLICIES,
    SETTINGS,
    FlexLLM,
    KeptShare,
    ModelRuns,
    Setting,
)
from coserve_benchmarks.simulation.papers.speculation import (
    BOTTLENECK,
    Chain,
    ChainFigures,
    Speculation,
)
from coserve_benchmarks.simulation.papers.split_world import (
    Device,
    HostCosts,
    Link,
    Shards,
    SplitClient,
    SplitWorld,
    linears,
)
from coserve_benchmarks.simulation.papers.statement import FigureTable, PaperResult, claim, size
from coserve_benchmarks.simulation.papers.symbiosis_runs import COSTS, Symbiosis
from coserve_benchmarks.simulation.papers.symbiosis_sharded import requests_held
from coserve_benchmarks.simulation.section import paper_tables
from coserve_benchmarks.zoo.provision import Asked

# Statements


def test_a_figure_says_direction_and_size() -> None:
    near = size("gain", 1.5, 1.8, neutral=1.0)
    assert near.difference == "same direction, within a third" and near.here == "1.8"
    far = size("gain", 1.5, 2.1, "a reason", " times", neutral=1.0)
    assert far.difference == "same direction, another size; a reason" and far.there == "1.5 times"
    assert size("gain", 1.5, 0.99, neutral=1.0).difference == "the other direction"
    assert size("none", 0.0, 0.2).is_close and not size("none", 0.0, 0.5).is_close
    assert claim("more", "yes", "no", False).difference == "the other direction"
    assert claim("more", "yes", "yes", True).difference == "same direction"


def test_a_paper_is_drawn_with_its_statements() -> None:
    table = FigureTable("Shares", ("policy", "10/s"), (("`hybrid`", "80%"),))
    statement = size("kept", 80, 70, "why it is", " %")
    paper = PaperResult("A paper", "One device.", [table], [statement])
    lines = list(paper_tables({"a": paper.as_dict()}))
    assert lines[0] == "## A paper" and "| `hybrid` | 80% |" in lines
    assert "| kept | 80 % | 70 % | same direction, within a third; why it is |" in lines


# FlexLLM


@pytest.mark.parametrize(
    "setting", [*SETTINGS, *PIPELINES], ids=lambda setting: f"{setting.name}-{setting.stages}"
)
def test_the_models_fit_on_their_devices(setting: Setting) -> None:
    assert setting.engines * setting.degree * setting.stages == setting.devices
    load = SimulatedLoad(1.0, 1.0, training=TrainingLoad(setting.stages, 1, 1024))
    fleet = FleetSettings(
        shape_named(setting.shape),
        HARDWARE,
        engines=setting.engines,
        degree=setting.degree,
        stages=setting.stages,
    )
    assert Simulator(fleet, load).cache_tokens > 4096
    assert "A100" in hardware_named(HARDWARE).name


def test_a_policy_keeps_a_share_of_the_peak_and_isolation_whole_engines() -> None:
    """At a share of the capacity, not at requests a second that may be next to none of it."""
    said: list[str] = []
    runs = FlexLLM(SETTINGS[0], 8.0, say=said.append)
    peak = runs.peak()
    coserved, isolated = runs.at(HEAVY, 50.0, peak, [NAMED])
    assert 0.5 < coserved.kept < 1.1 and coserved.within > 0.9
    assert isolated.policy == ISOLATED and isolated.note == "1 of 2 engines serve"
    assert isolated.kept == pytest.approx(0.55, abs=0.1)  # the other engine trains undisturbed
    assert any("10 requests/s on 1 engines of 2" in text for text in said)


def test_prompts_beside_training_in_a_lane_keep_the_bound_between_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of prompts that was too long made tokens of all 52 answers under way late: it had the margin
    of steps without training. The host took 1 ms a step."""
    table = tmp_path / "a100.toml"
    built_in = files("coserve.simulate") / "hardware" / f"{HARDWARE}.toml"
    table.write_text(built_in.read_text().replace("host_us = 1240", "host_us = 1000"))
    monkeypatch.setattr(flexllm, "HARDWARE", str(table))
    (found,) = FlexLLM(SETTINGS[2], 12.0).coserving(HEAVY, 50.0, 1.0, [NAMED])
    assert found.within == 1.0


def test_the_policy_is_named_before_and_its_bounds_are_those_of_every_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the other one trains more, and one seed of one model misses its bounds."""

    def run(self: FlexLLM, loads: object) -> ModelRuns:
        shares = {name: KeptShare(name, HEAVY, 0.8, 1.0) for name in (*POLICIES, ISOLATED)}
        shares["hybrid"] = replace(shares["hybrid"], kept=0.9)
        return ModelRuns(self.setting, 7000.0, 50.0, {(name, HEAVY): one for name, one in shares.items()})

    def coserving(
        self: FlexLLM, load: float, capacity: float, peak: float, policies: Sequence[str], seed: int
    ) -> Iterator[KeptShare]:
        yield KeptShare(NAMED, load, 0.8 + seed / 100, 0.95 if seed == 3 else 1.0)

    monkeypatch.setattr(FlexLLM, "run", run)
    monkeypatch.setattr(FlexLLM, "piped", run)
    monkeypatch.setattr(FlexLLM, "coserving", coserving)
    monkeypatch.setattr(flexllm, "LOADS", (HEAVY,))
    for name in ("memory_series", "case_study"):
        monkeypatch.setattr(flexllm, name, lambda *_: {})
    found = flexllm.run(False, lambda text: None)
    assert found.figures[f"flexllm.kept[{NAMED}, 0.2, first token within 2 s]"][0] == 0.8
    rows = found.rows
    assert rows["flexllm.kept"].value == pytest.approx(0.82) and rows["flexllm.kept"].interval is not None
    assert rows["flexllm.attainment"].value == 0.95
    (point,) = found.series["flexllm.fig12[OPT-13B]"]
    assert point == pytest.approx([0.2 * 50 * 64, 0.8 * 7000, 0.8 * 7000])
    note = rows["flexllm.kept"].note
    assert f"`{NAMED}`, named before" in note and "1.24 ms" in note and "assumed" in note


def test_pipelines_keep_a_share_of_their_own_peak() -> None:
    found = FlexLLM(PIPELINES[0], 3.0).piped([HEAVY])
    assert {policy for policy, _ in found.kept} == {"hybrid", "adaptive"} and found.peak > 1000
    assert all(0 < one.kept < 1.2 for one in found.kept.values()) and found.capacity > 1


# FineInfer


def test_deferral_gains_and_a_streamed_base_is_read_in_each_pass() -> None:
    runs = FineInfer(20.0, 1)
    base, deferred = runs.resident(CONTINUOUS), runs.resident("deferred:0.5,together=1", 4.0)
    assert deferred.training > 1.05 * base.training and deferred.within > 0.9
    (streamed,) = runs.streamed("heterogeneous", 20.0)
    assert streamed.time_per_token_mean is not None
    # 40 layers of 0.63 GB, in float16, at 80 % of 32 GB/s.
    assert streamed.time_per_token_mean > 40 * 0.634 / 25.6
    (alone,) = runs.streamed("deferred", 20.0)
    assert streamed.training > alone.training


# The report


def test_steps_are_as_long_as_the_table_says() -> None:
    """A batch takes 3.68 s, and what the 27 % that are left train is 9,071 tokens a second."""
    from coserve.core.plan import BasePlan, InferenceSegment

    times = report.times()
    decode = times.predict(BasePlan(inference=tuple(InferenceSegment(n, 200, 1, 200, 1) for n in range(50))))
    rows = 50 * times.predict(BasePlan(inference=(InferenceSegment(0, 0, 1, 0, 1),)))
    assert decode < rows / 10  # a step is as long for one request as for all
    assert report._ANSWER * decode == pytest.approx(3.68, rel=0.05)
    load = report.workload(40.0)
    assert len(load.requests) == pytest.approx(400, abs=1) and len(load.jobs) == 2
    assert sum(map(len, load.jobs[0].examples)) / 20.0 == pytest.approx(12_324, rel=0.01)


# BlockLLM


def test_shared_blocks_are_in_memory_and_models_take_turns_in_it() -> None:
    provisions = Provisions(10)
    assert provisions.full == ["application-09"]
    load = [Asked(0.01 * n, name, (1,) * 64, 8) for n, name in enumerate(provisions.names)]
    together, swapped = play(provisions.together, load), play(provisions.swapped, load)
    assert together.p95 < swapped.p95 and together.rate > swapped.rate
    # Ten models come over one link, each in 13.5 GB / (0.8 x 32 GB/s).
    assert 8 * 10 / swapped.rate > 10 * blockllm._load_seconds() > 10 * 0.5


def test_a_model_on_its_way_leaves_the_device_to_others() -> None:
    provisions = Provisions(20)
    load = [Asked(0.0, "application-00", (1,) * 64, 300), Asked(0.6, "application-01", (1,) * 64, 8)]
    both, alone = play(provisions.swapped, load), play(provisions.swapped, load[:1])
    assert both.p95 < alone.p95 + 8 * 0.02 + 0.1  # not by the half second that the second model takes


def test_engines_on_a_device_share_its_time() -> None:
    provisions = Provisions(10)
    one = [Asked(0.0, "application-00", (1,) * 64, 32)]
    both = [*one, Asked(0.0, "application-09", (1,) * 64, 32)]
    alone, shared = play(provisions.together, one), play(provisions.together, both)
    assert shared.p95 == pytest.approx(2 * alone.p95, rel=0.1)


# Speculation


def chain(speculation: Speculation | None, arrivals: Sequence[float], tokens: int = 1) -> ChainFigures:
    """Blocks of a second, the bottleneck of four, with a tenth of one between them."""
    return Chain(lambda block, rows: 4.0 if block == BOTTLENECK else 1.0, 0.1, speculation).play(
        arrivals, tokens
    )


def test_a_prediction_that_holds_saves_the_time_of_the_next_block() -> None:
    """Of one token: seven blocks of a second, one of four, seven transfers; the one behind the bottleneck has
    computed by the time that the prediction is shown to hold, and its row need not be sent again."""
    alone = 7.0 + 4.0 + 0.7
    assert chain(None, [0.0]).p50 == pytest.approx(alone)
    assert chain(Speculation(20.0, 1.0), [0.0]).p50 == pytest.approx(alone - 1.0 - 0.1)
    assert chain(Speculation(20.0, 0.0), [0.0]).p50 == pytest.approx(alone)
    late = chain(Speculation(1.0, 1.0), [0.0]).p50  # a surrogate as slow as its block
    assert late == pytest.approx(alone)


def test_answers_are_made_token_by_token_and_rows_that_wait_pass_together() -> None:
    one = chain(None, [0.0], 5)
    assert one.p50 == pytest.approx(5 * 11.7 + 4 * 0.1) and one.rate == pytest.approx(5 / one.p50)
    both = chain(None, [0.0, 0.01, 0.02])
    assert both.p95 == pytest.approx(11.7 + 4.0, rel=0.1)  # the second and the third after the first
    mostly = chain(Speculation(20.0, 0.8), [0.0], 200)
    assert 200 * 10.6 < mostly.p50 - 199 * 0.1 < 200 * 11.7
    assert (200 * 11.7 - (mostly.p50 - 199 * 0.1)) / 1.1 == pytest.approx(160, abs=20)


def test_speculation_shortens_answers_of_a_modelled_chain() -> None:
    table, statements = speculation.run(blockllm.LLAMA_7B, blockllm._table(), True, lambda text: None)
    assert [row[0] for row in table.rows] == ["none", "surrogates", "ideal"]
    assert all(one.same_direction for one in statements)


# Symbiosis

TINY = ModelShape("t", 64, 2, 128, 4, 4, 100, 1024)


def sharded(parts: int, gbs: float) -> tuple[SplitWorld, list[Device]]:
    """A sharded executor with products of a millisecond of its hosts."""
    table = hardware_named("a100-80")
    devices = [Device(table) for _ in range(parts)]  # type: ignore[arg-type]
    base = Shards(tuple(devices), Link(gbs, 0.0))
    return SplitWorld(TINY, base, HostCosts(1e-3), BatchingConfig("lockstep")), devices


def test_shards_are_gathered_for_each_product() -> None:
    """Half of each linear's weights comes from the other device: 40,960 weights of a layer in bfloat16."""
    nbytes = TINY.layer_weights * TINY.item_bytes
    seconds = {}
    for gbs in (1e6, 1e-2):
        played, devices = sharded(2, gbs)
        seconds[gbs] = played.play([client("a", devices[0])], 10).mean_seconds
    assert seconds[1e-2] - seconds[1e6] == pytest.approx(nbytes / 2 / 1e7, rel=0.05)


def test_each_shard_computes_its_own_clients_rows_at_once() -> None:
    played, devices = sharded(2, 1e6)
    apart = played.play([client("a", devices[0]), client("b", devices[1], shard=1)], 10)
    played, devices = sharded(1, 1e6)
    alone = played.play([client("a", devices[0])], 10)
    assert apart.together == pytest.approx(2, rel=0.1)
    assert apart.mean_seconds == pytest.approx(alone.mean_seconds, rel=0.1)


def test_a_whole_model_gathers_the_next_linear_while_it_computes() -> None:
    """Iterations take the longer of gathering and computing."""
    table = hardware_named("a100-80")
    device = Device(table)  # type: ignore[arg-type]
    nbytes = TINY.layer_weights * TINY.item_bytes
    for gbs, expected in ((1e6, 2 * len(linears(TINY)) * 1e-3), (1e-3, nbytes / 2 / 1e6)):
        shards = Shards((device, device), Link(gbs, 0.0))
        own = client("a", device, 1e-3, alone=True, shards=shards)
        played = SplitWorld(TINY, device, HostCosts(0.0), BatchingConfig("none"))
        assert played.play([own], 10).mean_seconds == pytest.approx(expected, rel=0.25)


def test_requests_that_a_memory_holds() -> None:
    """Keys and values of 1,024 tokens of Llama2-7B are half a gigabyte, as the paper's 16K are 8 GB."""
    assert requests_held(40e9) == int(40e9 * 0.9 / (1024 * 512 * 1024))
    assert requests_held(512e9) > 8 * requests_held(40e9)


def world(mode: str = "none", product: float = 1e-3, call: float = 0.0) -> tuple[SplitWorld, Device]:
    table = hardware_named("a100-80")
    device = Device(table)  # type: ignore[arg-type]
    return SplitWorld(TINY, device, HostCosts(product, call), BatchingConfig(mode)), device  # type: ignore[arg-type]


def client(name: str, device: Device, host: float = 0.0, **other: object) -> SplitClient:
    return SplitClient(name, device, Link(1e6, 0.0), 1, 1, 16, host, **other)  # type: ignore[arg-type]


def test_products_follow_each_other_and_passes_are_as_long_as_their_products() -> None:
    played, device = world()
    alone = played.play([client("a", device)], 20)
    assert alone.seconds["a"] == pytest.approx(2 * len(linears(TINY)) * 1e-3, rel=0.05)
    assert alone.together == 1
    played, device = world()
    found = played.play([client("a", device), client("b", device)], 20)
    assert found.mean_seconds == pytest.approx(2 * alone.mean_seconds, rel=0.05)
    played, device = world("lockstep")
    found = played.play([client("a", device), client("b", device)], 20)
    assert found.mean_seconds == pytest.approx(alone.mean_seconds, rel=0.1)
    assert found.together == pytest.approx(2, rel=0.05)
    played, device = world("lockstep", call=1e-3)
    found = played.play([client("a", device), client("b", device)], 20)
    assert found.mean_seconds == pytest.approx(3 * alone.mean_seconds, rel=0.1)  # a product and two calls


def test_training_goes_both_ways_and_whole_models_call_nobody() -> None:
    played, device = world()
    forward = played.play([client("a", device)], 20)
    played, device = world()
    both = played.play([client("a", device, work="training")], 20)
    assert both.mean_seconds == pytest.approx(2 * forward.mean_seconds, rel=0.05)
    played, device = world()
    own = played.play([client("a", device, 1e-3, alone=True)], 20)
    assert own.together == 0 and own.mean_seconds == pytest.approx(2 * len(linears(TINY)) * 1e-3, rel=0.1)


def test_the_executors_host_is_as_long_as_table_5_says() -> None:
    found = Symbiosis(1).tokens("none")
    assert found.mean_seconds == pytest.approx(1.02, rel=0.1) and found.together == 1
    # Eight calls of each of 224 products, alone and in products of 3.7.
    assert 8 * 224 * (COSTS.call + COSTS.product + 4e-5) == pytest.approx(1.02)
    assert 8 * 224 * (COSTS.call + (COSTS.product + 4e-5) / 3.7) == pytest.approx(0.77)
