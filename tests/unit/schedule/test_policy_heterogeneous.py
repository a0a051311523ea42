"""FineInfer's algorithm 2, line by line. `timetable` says what takes how long: a token 1 s, an iteration 3 s,
of which one beside an inference iteration shares a second: t_f - t_i is 2 seconds.

Comments in the timetables give the lines of the algorithm; d_r is a request's deferred time, d_rb its bound.
"""

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
from timetable import Ask, Tune, play, table

TRAINING = {"a": Tune()}


def bound(seconds: float) -> SLO:
    return SLO(deferral=seconds)


def test_training_goes_along_until_it_would_bring_a_request_to_its_bound() -> None:
    asks = {"x": Ask(0.5, 4, bound(8))}
    assert play("heterogeneous", asks, TRAINING, until=12) == table("""
        0  train a             # 11: Q_i and B_i are empty: F
        3  prefill x, train a  # 14: 2.5 + 2 < 8; 21: one forward pass of both
        4  train a             # 22, 23: back, and the optimizer step
        6  decode x, train a   # 14: 4.5 + 2 < 8
        7  train a
        9  decode x            # 14: 6.5 + 2 >= 8; 27
        10 decode x
        11 train a
    """)


@pytest.mark.parametrize(("seconds", "trains"), [(3.999, False), (4.0, False), (4.001, True)])
def test_exactly_at_the_bound_is_too_late(seconds: float, trains: bool) -> None:
    """Line 14 has >=, not >: at 3 x has waited 2 seconds, and 2 + 2 = 4."""
    lines = play("heterogeneous", {"x": Ask(1, 1, bound(seconds))}, TRAINING, until=4)
    assert lines[1] == ("3 prefill x, train a" if trains else "3 prefill x")


def test_requests_enter_at_once_and_the_nearest_bound_decides() -> None:
    asks = {"x": Ask(1, 4, bound(30)), "y": Ask(4.5, 2, bound(3))}
    assert play("heterogeneous", asks, TRAINING, until=10) == table("""
        0  train a
        3  prefill x, train a
        4  train a
        6  decode x, prefill y  # 9: y enters; 14: y 1.5 + 2 >= 3
        7  decode x y
        8  decode x, train a    # 14: only x is left, with 2 + 2 + 2 < 30
        9  train a
    """)


def test_time_without_training_defers_nobody() -> None:
    """d_r grows by t_f - t_i of iterations with training alone (25), not by the iterations themselves."""
    asks = {"x": Ask(0, 9, bound(3)), "y": Ask(0, 3, bound(1))}
    jobs = {"a": Tune(at=0.5)}
    assert play("heterogeneous", asks, jobs, until=8) == table("""
        0  prefill x y
        1  decode x y          # 14: y 0 + 2 >= 1
        2  decode x y
        3  decode x, train a   # 14: x 0 + 2 < 3, although it is there for 3 seconds
        4  train a
        6  decode x            # 14: x 2 + 2 >= 3
        7  decode x
    """)


def test_one_iteration_is_an_optimizer_step() -> None:
    """However many micro-batches it has: their passes forward share one with the requests; t_f is 5 here."""
    asks = {"x": Ask(1, 2, bound(9)), "y": Ask(6.5, 1, bound(0))}
    assert play("heterogeneous", asks, {"a": Tune(micro_batches=2)}, until=12) == table("""
        0  train a
        5  prefill x, train a   # 14: 4 + 4 < 9
        6  train a              # y waits for the update at 10
        10 decode x, prefill y  # 14: y 3.5 + 4 >= 0
        11 train a
    """)


def test_who_states_no_bound_has_the_default() -> None:
    asks = {"x": Ask(1, 1)}
    assert "3 prefill x" in play("heterogeneous:4", asks, TRAINING, until=4)
    assert "3 prefill x, train a" in play("heterogeneous:5", asks, TRAINING, until=4)


def test_who_loses_its_pages_keeps_its_deferred_time() -> None:
    """x and y do not fit together: y, the later one, goes back to the queue and comes again."""
    asks = {"x": Ask(0.5, 12, bound(1000)), "y": Ask(0.6, 12, bound(9.5))}
    lines = play("heterogeneous", asks, TRAINING, until=34, pages=4)
    assert lines[5] == "9 decode x y, train a"  # 14: y 6.4 + 2 < 9.5
    assert lines[7] == "12 decode x y"  # 14: y 8.4 + 2 >= 9.5
    assert "17 decode x, train a" in lines  # y is preempted
    assert lines[-5:] == table("""
        29 prefill y            # 14: y 8.4 + 2 >= 9.5, still
        30 decode y
        31 decode y
        32 decode y
        33 train a
    """)


def test_without_jobs_requests_are_answered_as_ever() -> None:
    assert play("heterogeneous", {"x": Ask(0, 2, bound(0))}, {}) == table("""
        0 prefill x
        1 decode x
        2 end
    """)


@pytest.mark.parametrize("wrong", [-0.1, float("nan")])
def test_wrong_bounds_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="bound"):
        make_policy("heterogeneous", bound=wrong)
