"""FineInfer's algorithm 1, line by line. `timetable` says what takes how long: a token 1 s, an iteration 3 s.

Comments in the timetables give the lines of the algorithm; d_r is a request's deferred time, d_rb its bound.
"""

import random

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
from timetable import Ask, Tune, play, table

TRAINING = {"a": Tune()}


def bound(seconds: float) -> SLO:
    return SLO(deferral=seconds)


def test_a_request_is_pushed_out_until_one_more_iteration_would_reach_its_bound() -> None:
    asks = {"x": Ask(0.5, 2, bound(8))}
    assert play("deferred", asks, TRAINING, until=12) == table("""
        0  train a    # 6-26: Q_i is empty and so is B_i; 28-31: one iteration
        3  train a    # 14: 2.5 + 3 < 8
        6  prefill x  # 14: 5.5 + 3 >= 8; 19
        7  decode x   # 23; 24: x is finished; 25, 26: B_i is empty
        8  train a    # 31
        11 train a
    """)


@pytest.mark.parametrize(("seconds", "entered"), [(7.999, 6), (8.0, 6), (8.001, 9)])
def test_exactly_at_the_bound_is_near_enough(seconds: float, entered: int) -> None:
    """Line 14 has >=, not >: at 6 x has waited 5 seconds, and 5 + 3 = 8."""
    lines = play("deferred", {"x": Ask(1, 1, bound(seconds))}, TRAINING, until=13)
    assert f"{entered} prefill x" in lines


def test_who_is_not_near_stays_out_while_others_are_answered() -> None:
    asks = {"x": Ask(1, 5, bound(5)), "y": Ask(2, 1, bound(12)), "z": Ask(2, 2, bound(8))}
    assert play("deferred", asks, TRAINING, until=16) == table("""
        0  train a
        3  prefill x             # 14: x 2 + 3 >= 5, y 1 + 3 < 12, z 1 + 3 < 8
        4  decode x              # 14: y 2 + 3 < 12, z 2 + 3 < 8
        5  decode x              # 14: y 3 + 3 < 12, z 3 + 3 < 8
        6  decode x              # 14: y 4 + 3 < 12, z 4 + 3 < 8
        7  decode x, prefill z   # 14: z 5 + 3 >= 8: in the middle of inference mode; y 5 + 3 < 12
        8  decode z              # 24: x is finished; 25: z is not: inference mode goes on
        9  train a               # 25, 26: B_i is empty, y is out still; 31
        12 prefill y             # 14: 10 + 3 >= 12
        13 train a
    """)


def test_the_mode_ends_with_the_batch_whoever_waits() -> None:
    """Line 26 leaves the loop: who got near its bound in the last step waits for the iteration of line 31."""
    asks = {"x": Ask(1, 2, bound(5)), "y": Ask(1.5, 1, bound(6.5))}
    assert play("deferred", asks, TRAINING, until=12) == table("""
        0  train a
        3  prefill x   # 14: x 2 + 3 >= 5, y 1.5 + 3 < 6.5
        4  decode x    # 14: y 2.5 + 3 < 6.5; 24-26: B_i is empty
        5  train a     # 31; y, with 3.5 + 3 >= 6.5, is not looked at before
        8  prefill y   # 14
        9  train a
    """)


def test_a_batch_of_one_step_ends_the_mode_too() -> None:
    asks = {"x": Ask(1, 1, bound(5)), "y": Ask(1.5, 1, bound(5.5))}
    assert play("deferred", asks, TRAINING, until=9) == table("""
        0  train a
        3  prefill x   # 14: y 1.5 + 3 < 5.5; 24-26
        4  train a     # 31; y has 2.5 + 3 >= 5.5
        7  prefill y
        8  train a
    """)


def test_ongoing_and_new_requests_are_one_batch() -> None:
    """The mode lasts as long as new ones come in before the last one is answered (figure 2)."""
    asks = {"x": Ask(1, 3, bound(0)), "y": Ask(3.5, 3, bound(0)), "z": Ask(5.5, 3, bound(0))}
    assert play("deferred", asks, TRAINING, until=12) == table("""
        0  train a
        3  prefill x
        4  decode x, prefill y
        5  decode x y
        6  decode y, prefill z
        7  decode z
        8  decode z
        9  train a
    """)


def test_one_iteration_is_an_optimizer_step() -> None:
    """However many micro-batches it has: t_f is 1 + 4 seconds here, and nobody enters between them."""
    asks = {"x": Ask(1, 2, bound(9)), "y": Ask(9.5, 1, bound(0))}
    assert play("deferred", asks, {"a": Tune(micro_batches=2)}, until=18) == table("""
        0  train a
        5  prefill x   # 14: 4 + 5 >= 9
        6  decode x    # 25, 26
        7  train a     # 31: one iteration; y comes at 9.5
        12 prefill y
        13 train a
    """)


def test_the_iteration_that_would_be_next_is_the_one_that_counts() -> None:
    """Two jobs in turn: b's iteration takes 5 seconds, a's takes 3 (28: get_first_batch)."""
    asks = {"x": Ask(1, 1, bound(7)), "y": Ask(5, 1, bound(7))}
    jobs = {"a": Tune(), "b": Tune(micro_batches=2)}
    assert play("deferred", asks, jobs, until=13) == table("""
        0  train a
        3  prefill x   # 14: b would be next: 2 + 5 >= 7
        4  train b
        9  prefill y   # 14: a would be next: 4 + 3 >= 7
        10 train a     # which has trained less than b
    """)


def test_who_states_no_bound_has_the_default() -> None:
    asks = {"x": Ask(1, 1), "y": Ask(1, 1, bound(11)), "z": Ask(1, 1, bound(0))}
    assert play("deferred:8", asks, TRAINING, until=13) == table("""
        0  train a
        3  prefill z   # 14: 2 + 3 >= 0, but < 8 and < 11
        4  train a
        7  prefill x   # 14: 6 + 3 >= 8, but < 11
        8  train a
        11 prefill y   # 14: 10 + 3 >= 11
        12 train a
    """)


def test_with_nothing_to_train_nobody_is_deferred() -> None:
    asks = {"x": Ask(1, 2, bound(100)), "y": Ask(1.5, 2, bound(100))}
    assert play("deferred", asks, {}) == table("""
        1  prefill x
        2  decode x, prefill y
        3  decode y
        4  end
    """)


def test_the_end_of_the_last_job_ends_the_deferral() -> None:
    asks = {"x": Ask(1, 2, bound(100)), "y": Ask(2, 1, bound(0))}
    assert play("deferred", asks, {"a": Tune(steps=2)}) == table("""
        0  train a
        3  prefill y   # 14: x 2 + 3 < 100
        4  train a     # 31, the last one
        7  prefill x   # Q_f is empty
        8  decode x
        9  end
    """)


def test_a_job_that_comes_during_inference_waits_for_the_end_of_the_mode() -> None:
    asks = {"x": Ask(0, 3, bound(100)), "y": Ask(1, 1, bound(100))}
    assert play("deferred", asks, {"a": Tune(at=0.5, steps=1)}) == table("""
        0  prefill x   # nothing to train
        1  decode x    # y 0 + 3 < 100
        2  decode x    # 25, 26
        3  train a     # 31
        6  prefill y   # nothing to train
        7  end
    """)


def test_a_job_that_comes_during_the_last_step_of_the_mode_is_there_at_its_end() -> None:
    asks = {"x": Ask(0, 1, bound(0)), "y": Ask(0.5, 1, bound(0))}
    assert play("deferred", asks, {"a": Tune(at=0.5, steps=1)}) == table("""
        0  prefill x   # 25, 26
        1  train a     # 31
        4  prefill y
        5  end
    """)


def test_requests_are_looked_at_before_training_when_both_come_at_once() -> None:
    """Nothing was there: the loop is in inference mode, whose first question is who is near its bound."""
    asks = {"x": Ask(0, 1), "y": Ask(10, 1, bound(0))}
    assert play("deferred", asks, {"a": Tune(at=10, steps=1)}) == table("""
        0  prefill x
        10 prefill y   # 14
        11 train a     # 25, 26, 31
        14 end
    """)


def test_whoever_lost_its_pages_is_in_the_batch_still() -> None:
    """B_i is empty when all are answered, not when nobody has pages: y is computed anew and goes on."""
    asks = {"x": Ask(1, 9, bound(5)), "y": Ask(1.5, 9, bound(4.5)), "z": Ask(2, 1, bound(100))}
    assert play("deferred", asks, TRAINING, until=20, pages=3) == table("""
        0  train a
        3  prefill x y
        4  decode x y
        5  decode x y
        6  decode x y
        7  decode x     # both need a second page, there is one, and y came last
        8  decode x
        9  decode x
        10 decode x
        11 decode x     # 24: x is finished; 25: y is not
        12 prefill y    # its prompt and the four tokens it has
        13 decode y
        14 decode y
        15 decode y
        16 decode y     # 25, 26
        17 train a
    """)


def bursts(seed: int, requests: int = 60) -> dict[str, Ask]:
    """Arrivals with gaps of all sizes, on whole and half seconds, so that ties happen."""
    draw, at, asks = random.Random(seed), 0.0, {}
    for number in range(requests):
        at += draw.choice([0, 0, 0.5, 1, 2, 7])
        asks[f"r{number}"] = Ask(at, draw.randint(1, 4))
    return asks


@pytest.mark.parametrize("seed", range(5))
def test_a_small_bound_is_continuous_batching(seed: int) -> None:
    """3.2: a bound that has no room for one iteration admits everybody at once."""
    continuous = play("continuous", bursts(seed), TRAINING, until=300)
    assert play("deferred:0", bursts(seed), TRAINING, until=300) == continuous
    assert play("deferred:3", bursts(seed), TRAINING, until=300) == continuous
    assert play("deferred:3.5", bursts(seed), TRAINING, until=300) != continuous


def test_continuous_asks_for_no_bound() -> None:
    asks = {"x": Ask(1, 3, bound(100)), "y": Ask(3.5, 2, bound(100))}
    assert play("continuous", asks, TRAINING, until=10) == table("""
        0  train a
        3  prefill x
        4  decode x, prefill y
        5  decode x y
        6  train a
        9  train a
    """)


def iterations(policy: str, seed: int) -> int:
    return sum("train" in line for line in play(policy, bursts(seed), TRAINING, until=120))


def test_a_larger_bound_trains_more() -> None:
    """Figure 4: what is gained grows with the bound; to the letter it is little (see the class)."""
    letter = [sum(iterations(f"deferred:{most}", seed) for seed in range(5)) for most in (0, 12, 24)]
    assert letter == sorted(set(letter))
    for seed in range(5):
        trained = [iterations(f"deferred:{most},together=1", seed) for most in (0, 12, 24)]
        assert trained == sorted(set(trained))


def test_together_the_first_who_is_near_takes_all_along() -> None:
    asks = {"x": Ask(1, 2, bound(8)), "y": Ask(5, 1, bound(100)), "z": Ask(6.5, 1, bound(100))}
    assert play("deferred:0.5,together=1", asks, TRAINING, until=12) == table("""
        0  train a
        3  train a       # 14: x 2 + 3 < 8
        6  prefill x y   # 14: x 5 + 3 >= 8, and y comes along
        7  decode x      # z is not near, and nobody else who waits is
        8  train a
        11 train a
    """)


@pytest.mark.parametrize("written", ["0", "false"])
def test_not_together_can_be_written_down(written: str) -> None:
    asks = {"x": Ask(1, 2, bound(8)), "y": Ask(5, 1, bound(100))}
    letter = play("deferred:8", asks, TRAINING, until=12)
    assert play(f"deferred:8,together={written}", asks, TRAINING, until=12) == letter
    assert play("deferred:8,together=1", asks, TRAINING, until=12) != letter


@pytest.mark.parametrize("wrong", [-0.1, float("nan")])
def test_a_bound_is_some_seconds(wrong: float) -> None:
    with pytest.raises(ConfigError, match="bound of some seconds"):
        make_policy("deferred", bound=wrong)
