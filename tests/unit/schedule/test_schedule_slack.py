from dataclasses import replace

import pytest

from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.places import Places
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.slack import INFINITE, Slack, measure, own_slowdown
from coserve.schedule.step_costs import StepCosts
from steps import step_costs

CONFIG = SchedulerConfig(layers=4, max_positions=512, slowdown=1.5, reliability=0.9)
NOW = 10.0


def model(error: float = 0.0) -> StepCosts:
    """Ten milliseconds for a step with inference, one for each row."""
    cost = step_costs(
        dict.fromkeys(CostModel().weights, 0.0) | {"forward_layers": 0.01, "forward_rows": 0.001}
    )
    for _ in range(16):
        cost.misses.observe(1.0 + error, trains=True)
    return cost


def decoding(slo: SLO, key: int = 1, output: int = 1, arrival: float = 9.0) -> Sequence:
    request = Request("r", (1,) * 20, SamplingParams(max_tokens=11), slo=slo, arrival=arrival)
    sequence = Sequence(key, request, output=[1] * output, computed=19 + output)
    sequence.first_token_at = sequence.last_token_at = NOW - 0.005
    return sequence


def waiting(slo: SLO, key: int = 2, arrival: float = NOW) -> Sequence:
    return Sequence(key, Request("r", (1,) * 20, SamplingParams(max_tokens=11), slo=slo, arrival=arrival))


def slack(
    running: list[Sequence],
    line: list[Sequence],
    error: float = 0.0,
    utilization: float = 0.0,
    config: SchedulerConfig = CONFIG,
    places: Places | None = None,
) -> Slack:
    it, builder = RequestQueues(BaseCache(config, PagePool(8, 64))), PlanBuilder(NOW)
    it.running = running
    for sequence in line:
        it.join(sequence)
    for sequence in running:
        builder.add(sequence, 1)
    return measure(builder, it, model(error), config, utilization, places or Places())


def test_who_states_nothing_gets_a_share() -> None:
    found = slack([decoding(SLO())], [])
    assert found.inference == pytest.approx(0.011)
    assert found.training == pytest.approx(0.5 * (0.005 + 0.011))  # since its first token, and the next
    assert found.deferral == INFINITE


def test_between_tokens() -> None:
    assert slack([decoding(SLO(between_tokens=0.05))], []).training == pytest.approx(0.05 - 0.005 - 0.011)


def test_what_steps_took_beyond_their_prediction_is_a_margin() -> None:
    found = slack([decoding(SLO(between_tokens=0.05))], [], error=0.25)
    assert found.training == pytest.approx((0.05 - 0.005) / 1.25 - 0.011)


def test_of_many_steps_the_sum_is_less_unsure_than_each() -> None:
    found = slack([decoding(SLO(end_to_end=2.0))], [], error=0.25)  # ten tokens left, one second
    assert found.training == pytest.approx((1.0 / (1 + 0.25 / 10**0.5) - 10 * 0.011) / 10)
    found = slack([decoding(SLO(end_to_end=2.0), output=10)], [], error=0.25)  # the last one
    assert found.training == pytest.approx(1.0 / 1.25 - 0.011)


def test_the_smallest_slack_counts() -> None:
    bounds = [SLO(between_tokens=0.05), SLO(between_tokens=0.03), SLO(between_tokens=0.5)]
    found = slack([decoding(slo, key) for key, slo in enumerate(bounds)], [])
    assert found.training == pytest.approx(0.03 - 0.005 - 0.013)


def test_a_broken_bound_leaves_nothing() -> None:
    assert slack([decoding(SLO(between_tokens=0.001))], []).training == 0.0


def test_first_token_of_one_who_waits() -> None:
    found = slack([decoding(SLO(between_tokens=1.0))], [waiting(SLO(first_token=0.1))])
    assert found.training == pytest.approx(0.1 - 0.011 - (0.01 + 0.020 + 0.001))  # beside a decode row


def test_those_ahead_in_the_line_count_too() -> None:
    line = [waiting(SLO(first_token=0.1), 2), waiting(SLO(first_token=0.1), 3)]
    found = slack([decoding(SLO(between_tokens=1.0))], line)
    assert found.training == pytest.approx(0.1 - 0.011 - (0.01 + 0.040 + 0.001))


def test_first_token_is_over_once_it_came() -> None:
    assert slack([decoding(SLO(first_token=0.001, between_tokens=1.0))], []).training > 0.9


def test_end_to_end_is_shared_out_over_the_tokens_left() -> None:
    found = slack([decoding(SLO(end_to_end=2.0), output=1)], [])
    assert found.training == pytest.approx((1.0 - 10 * 0.011) / 10)
    assert found.whole == pytest.approx(1.0 - 10 * 0.011)  # if it is all spent at once


def test_what_is_spent_at_once_breaks_no_bound_of_a_step() -> None:
    found = slack([decoding(SLO(end_to_end=2.0, between_tokens=0.3))], [])
    assert found.whole == pytest.approx(0.3 - 0.005 - 0.011)
    found = slack([decoding(SLO(end_to_end=2.0)), decoding(SLO(), 3)], [])
    assert found.whole == pytest.approx(0.5 * (0.005 + 0.012))
    assert slack([decoding(SLO(between_tokens=0.001))], []).whole == 0.0


def test_an_end_that_has_passed_binds_no_more() -> None:
    assert slack([decoding(SLO(end_to_end=0.5))], []).training == pytest.approx(0.5 * (0.005 + 0.011))


@pytest.mark.parametrize(("slowdown", "utilization"), [(1.25, 0.0), (1.5, 0.0), (1.5, 0.6), (3.0, 0.3)])
def test_of_a_slowdown_what_earlier_steps_left_is_there(slowdown: float, utilization: float) -> None:
    direct = own_slowdown(slowdown, utilization)
    sequence = decoding(SLO(slowdown=slowdown))
    sequence.first_token_at, sequence.deferred, sequence.deferred_first = NOW - 2.0, 0.7, 0.6
    found = slack([sequence], [], utilization=utilization).training
    alone = 2.0 + 0.011 - (0.7 - 0.6)  # what its tokens would have taken
    assert found == pytest.approx(direct * alone - (2.0 + 0.011))
    sequence.deferred = 0.6 + 2.0 * (slowdown - 1)
    assert slack([sequence], [], utilization=utilization).training == 0.0


def test_a_slowdown_holds_for_the_first_token_by_itself() -> None:
    line = waiting(SLO(slowdown=1.5), arrival=NOW - 0.3)
    line.deferred = 0.1
    found = slack([decoding(SLO(between_tokens=9.0))], [line])
    alone = 0.2 + 0.011 + (0.01 + 0.020 + 0.001)
    assert found.training == pytest.approx(1.5 * alone - (alone + 0.1))


def test_the_tighter_of_a_bound_and_a_slowdown_counts() -> None:
    tight = slack([decoding(SLO(between_tokens=0.018, slowdown=9.0))], [])
    assert tight.training == pytest.approx(0.018 - 0.005 - 0.011)
    loose = slack([decoding(SLO(between_tokens=9.0, slowdown=1.5))], [])
    assert loose.training == pytest.approx(0.5 * (0.005 + 0.011))
    assert slack([decoding(SLO(slowdown=INFINITE))], []).training == INFINITE


def test_deferral_is_what_is_left_of_it() -> None:
    sequence = decoding(SLO(deferral=0.02))
    sequence.deferred = 0.015
    found = slack([sequence], [])
    assert found.training == found.deferral == pytest.approx(0.005)
    sequence.deferred = 0.03
    assert slack([sequence], []).deferral == 0.0


def test_unused_time_adds_up_but_for_bounds_on_each_token_and_on_all_deferral() -> None:
    each, some = decoding(SLO(between_tokens=0.05), key=1), decoding(SLO(deferral=0.03), key=2)
    assert slack([decoding(SLO(slowdown=1.1))], []).coming == INFINITE
    assert slack([decoding(SLO(end_to_end=2.0))], []).coming == INFINITE
    step = 0.012  # of two decode rows; this one is five milliseconds late already, the others need not be
    found = slack([each, decoding(SLO(slowdown=1.1), key=2)], [])
    assert found.coming == pytest.approx(0.9 * (0.05 - step)) and found.training < found.coming
    assert slack([each, some], []).coming == pytest.approx(0.03)
    assert slack([each], [], error=0.5).coming == pytest.approx(0.9 * (0.05 / 1.5 - 0.011))


def test_who_waits_for_a_place_has_the_steps_until_an_answer_ends_before_it() -> None:
    """One place, ten steps of 11 ms until it is free, then the prompt's step of 31: each of the eleven may be
    longer by an eleventh of what is left."""
    line = [waiting(SLO(first_token=2.0))]
    full = replace(CONFIG, max_running=1, slowdown=None)
    found = slack([decoding(SLO())], line, config=full)
    left = 2.0 - 11 * 0.011 - 0.031
    assert found.training == pytest.approx(left / 11, rel=0.02)
    assert found.whole == pytest.approx(left, rel=0.02)
    free = slack([decoding(SLO())], line, config=replace(CONFIG, max_running=2, slowdown=None))
    assert free.training == pytest.approx(2.0 - 0.011 - 0.031, rel=0.02)


def test_steps_leave_places_for_who_comes() -> None:
    """Two requests a second of eleven tokens, of which three quarters of eight places are to be enough."""
    places = Places()
    for number in range(40):
        places.arrived(NOW - 20.0 + number / 2)
    eight = replace(CONFIG, max_running=8, slowdown=None)
    bounded = [decoding(SLO(first_token=9.0))]
    found = slack(bounded, [], config=eight, places=places)
    assert found.training == pytest.approx(0.75 * 8 / (2 * 11) - 0.011, rel=0.15)
    nobody_minds = [decoding(SLO(between_tokens=5.0))]
    assert slack(nobody_minds, [], config=eight, places=places).training > 1.0
    assert slack(bounded, [], config=eight).training == INFINITE  # nobody comes


def test_a_rare_delay_of_the_host_is_left_out_of_bounds_on_each_token() -> None:
    """Beside the usual error of a step, where that leaves less than the margin of an answer's steps; of a
    tight bound at most a fifth."""
    for bound, delay in ((0.05, 3.5e-3), (0.03, 6e-3), (0.02, 4e-3)):
        found = [
            slack([decoding(SLO(between_tokens=bound))], [], config=replace(CONFIG, rare_delay=given))
            for given in (0.0, delay, 1.0)
        ]
        none, some, most = (one.training for one in found)
        assert none - some == pytest.approx(min(delay, none))
        assert none - most == pytest.approx(min(bound / 5, none))
        assert found[0].coming - found[1].coming == pytest.approx(0.9 * delay)
