"""The workloads that policies are judged on: seeded, whole, and of the load that was asked for."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.requests import Workload
from coserve_benchmarks import mixes
from coserve_benchmarks.policies import mixed, traffic
from recorded import TRACE

GIVEN = mixes.WorkloadSettings(vocabulary=50, seconds=20.0, slo=SLO(end_to_end=2.0), seed=4)
SMALL = mixes.TrainingSpec(batch=2, length=6, examples=4)


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
    kinds = [mixed.Tier("a", 2.0, SLO(deferral=1.0)), mixed.Tier("b", 1.0, SLO(deferral=2.0))]
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
