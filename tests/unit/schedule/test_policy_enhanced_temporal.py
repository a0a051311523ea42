"""The multi-LoRA report's algorithm 1, line by line. `timetable` says what takes how long.

1: a batch is due: B requests wait, or the first of them longer than t; 2: it is taken and served to its end;
3: else, if there is training: 4: a batch of it is taken and run to its end; 5, 6: else wait for 1 or 3.
"""

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
from timetable import Ask, Tune, World, play, table

TRAINING = {"a": Tune()}


def test_a_batch_that_is_full_leaves() -> None:
    asks = {"x": Ask(0.5, 2), "y": Ask(4, 3)}
    assert play("enhanced-temporal:2,100", asks, TRAINING, until=12) == table("""
        0  train a        # 3, 4: nobody waits
        3  train a        # 1: one of two, and 2.5 s of 100; 3, 4
        6  prefill x y    # 1: two of two; 2
        7  decode x y
        8  decode y       # the batch is served to its end
        9  train a        # 3, 4
    """)


def test_a_batch_whose_first_request_waited_long_enough_leaves() -> None:
    asks = {"x": Ask(0.5, 2), "y": Ask(5.5, 1)}
    assert play("enhanced-temporal:64,5", asks, TRAINING, until=11) == table("""
        0  train a
        3  train a        # 1: x waits for 2.5 s; 3, 4
        6  prefill x y    # 1: x waits for 5.5 s > 5; 2: whoever is there by now
        7  decode x
        8  train a
    """)


def test_a_batch_under_way_lets_nobody_in() -> None:
    asks = {"x": Ask(0, 3), "y": Ask(0, 1), "v": Ask(0.5, 1), "w": Ask(0.5, 2)}
    assert play("enhanced-temporal:2,100", asks, TRAINING, until=8) == table("""
        0  prefill x y    # 1, 2
        1  decode x       # 2: v and w wait, y's place is free
        2  decode x
        3  prefill v w    # 1 comes before 3: training waits
        4  decode w
        5  train a        # 3, 4
    """)


def test_requests_come_first_between_two_training_batches() -> None:
    """Only batches of training are synchronous: a job of many is paused between them."""
    asks = {"x": Ask(1, 1), "y": Ask(4, 2)}
    assert play("enhanced-temporal:1,100", asks, {"a": Tune(steps=4)}) == table("""
        0  train a
        3  prefill x
        4  prefill y    # due as well
        5  decode y
        6  train a
        9  train a
        12 train a
        15 end
    """)


def test_of_more_than_b_the_first_b_are_taken() -> None:
    """First come, first served: an urgent request is not in the batch because it is urgent."""
    urgent = SLO(first_token=0.1)
    asks = {name: Ask(at, 1) for name, at in {"p": 0.5, "q": 1.0, "r": 1.5, "s": 2.0}.items()}
    asks |= {"t": Ask(2.5, 1, urgent)}
    assert play("enhanced-temporal:2,100", asks, TRAINING, until=8) == table("""
        0  train a
        3  prefill p q    # 2: INFERENCE_BATCH_SIZE of five
        4  prefill r s    # 1: three wait
        5  train a        # 1: one waits, for 2.5 s
    """)


def test_with_nothing_due_and_nothing_to_train_it_waits() -> None:
    """Lines 5 and 6, once each: the loop does not spin."""
    asks = {"x": Ask(1, 2), "y": Ask(9, 1), "z": Ask(12, 1)}
    assert play("enhanced-temporal:2,5", asks, {}) == table("""
        1  wait          # 1: one of two, due at 6
        6  prefill x
        7  decode x
        9  wait          # due at 14
        12 prefill y z   # 1: two of two
        13 end
    """)


def test_a_wait_ends_when_there_is_something_to_train() -> None:
    asks = {"x": Ask(1, 1)}
    assert play("enhanced-temporal:2,5", asks, {"a": Tune(at=2.5, steps=1)}) == table("""
        1   wait
        2.5 train a      # 3 is met before 1
        5.5 wait
        6   prefill x    # 1
        7   end
    """)


def test_who_cancels_counts_no_longer() -> None:
    """`first_arrival` is that of the first who still waits."""
    asks = {"x": Ask(1, 1, cancelled=3), "y": Ask(2, 1), "z": Ask(3, 1), "v": Ask(20, 1)}
    assert play("enhanced-temporal:3,5", asks, {}) == table("""
        1  wait
        2  wait
        3  wait          # 1: y and z, two of three; due at 2 + 5
        7  prefill y z
        8  end
    """)[:-1] + table("20 wait\n 25 prefill v\n 26 end")


def test_a_batch_is_one_batch_however_many_steps_its_prompts_take() -> None:
    """Four prompt rows fit into a step here: the rest of the batch follows, and neither u nor training."""
    asks = {name: Ask(0, 2, prompt=4) for name in "xyz"} | {"u": Ask(0.5, 1)}
    lines = play("enhanced-temporal:3,100", asks, TRAINING, until=5, max_prefill_rows=4, min_prefill_rows=4)
    assert lines == table("""
        0  prefill x
        1  decode x, prefill y
        2  decode y, prefill z
        3  decode z
        4  train a
    """)


def test_a_batch_goes_on_where_its_first_part_is_answered_at_once() -> None:
    asks = {name: Ask(0, 1, prompt=4) for name in "xyz"}
    lines = play("enhanced-temporal:3,100", asks, TRAINING, until=4, max_prefill_rows=4, min_prefill_rows=4)
    assert lines == table("""
        0  prefill x
        1  prefill y
        2  prefill z
        3  train a
    """)


def test_who_lost_its_pages_belongs_to_its_batch() -> None:
    asks = {"x": Ask(0, 6), "y": Ask(0, 6), "v": Ask(0.5, 1), "w": Ask(0.5, 1)}
    assert play("enhanced-temporal:2,100", asks, TRAINING, until=10, pages=2) == table("""
        0  prefill x y
        1  decode x y
        2  decode x y
        3  decode x y
        4  decode x       # both need a second page, there is none, and y came last
        5  decode x
        6  prefill y      # its prompt and the four tokens it has
        7  decode y
        8  prefill v w
        9  train a
    """)


def test_a_batch_that_is_cancelled_makes_way() -> None:
    asks = {"x": Ask(0, 20, cancelled=2), "y": Ask(0, 20, cancelled=2)}
    assert play("enhanced-temporal:2,100", asks, {"a": Tune(steps=1)}) == table("""
        0  prefill x y
        1  decode x y
        2  train a
        5  end
    """)


def test_the_defaults_are_the_reports() -> None:
    """5.2.2: batches of up to 64, or five seconds."""
    crowd = {f"r{n}": Ask(1, 1) for n in range(64)}
    assert play("enhanced-temporal", crowd, {})[0].startswith("1 prefill r0 r1")
    few = {f"r{n}": Ask(1, 1) for n in range(63)}
    assert play("enhanced-temporal", few, {})[0] == "1 wait"
    assert play("enhanced-temporal", few, {})[1].startswith("6 prefill r0 r1")


def test_waiting_is_one_empty_plan_with_a_pause() -> None:
    world = World(make_policy("enhanced-temporal:2,5"), {"x": Ask(1, 1)}, {}, pages=8)
    world.run(until=20)
    pauses = [plan.idle for plan in world.executor.plans]
    assert pauses[0] == 5 and world.executor.plans[0].is_empty and not any(pauses[1:])


@pytest.mark.parametrize(
    ("option", "wrong"), [("batch", 0), ("batch", 2.5), ("delay", -1.0), ("delay", float("nan"))]
)
def test_settings_out_of_range(option: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"a batch|a whole number for batch"):
        make_policy("enhanced-temporal", **{option: wrong})
