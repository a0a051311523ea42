"""Temporal sharing: one fine-tuning request after n requests (the multi-LoRA report, 4.4.1; FlexLLM, 3).

`timetable` says what takes how long: a token 1 s, an optimizer step 3 s.
"""

import pytest

from coserve.errors import ConfigError
from coserve.schedule.policies import make_policy
from timetable import Ask, Tune, play, table

TRAINING = {"a": Tune()}


def test_a_whole_job_after_n_requests() -> None:
    asks = {"x": Ask(0, 3), "y": Ask(0, 2), "z": Ask(1, 3)}
    assert play("temporal:2", asks, {"a": Tune(at=0.5, steps=3)}) == table("""
        0  prefill x y
        1  decode x y, prefill z
        2  decode x z       # one of two: y
        3  train a          # two of two: x; z keeps its two tokens and waits
        6  train a
        9  train a
        12 decode z
        13 end
    """)


def test_a_mini_batch_after_n_requests() -> None:
    asks = {"x": Ask(0, 3), "y": Ask(0, 2), "z": Ask(1, 3), "w": Ask(4, 3), "v": Ask(4, 6)}
    assert play("temporal:2,grain=batch", asks, {"a": Tune(at=0.5, steps=3)}) == table("""
        0  prefill x y
        1  decode x y, prefill z
        2  decode x z             # one of two: y
        3  train a                # two of two: x
        6  decode z, prefill w v
        7  decode w v             # one of two: z
        8  decode w v
        9  train a                # two of two: w; v has three of its six
        12 decode v
        13 decode v
        14 decode v
        15 train a                # one of two, but nobody is there
        18 end
    """)


@pytest.mark.parametrize(("policy", "ends"), [("temporal:5", 9), ("temporal:5,batch", 3)])
def test_when_nobody_is_there_training_has_the_machine(policy: str, ends: int) -> None:
    """A request that arrives meanwhile waits for the end of the job, or of the mini-batch."""
    lines = play(policy, {"x": Ask(0.5, 1)}, {"a": Tune(steps=3)}, until=10)
    assert lines[0] == "0 train a" and f"{ends} prefill x" in lines


def test_the_count_begins_when_training_gives_the_machine_back() -> None:
    """Answers that ended before it do not count for the next turn."""
    asks = {"x": Ask(0, 2), "y": Ask(0, 2), "z": Ask(0, 2), "v": Ask(2.5, 1), "w": Ask(2.5, 2)}
    assert play("temporal:2,batch", asks, {"a": Tune(at=0.5)}, until=9) == table("""
        0  prefill x y z
        1  decode x y z
        2  train a          # three answers at once are one turn
        5  prefill v w
        6  decode w         # one of two: v
        7  train a
    """)


def test_jobs_take_turns_whole() -> None:
    """One fine-tuning request: the job that has the machine keeps it, whatever another has trained."""
    asks = {"x": Ask(0, 1), "y": Ask(0.5, 1)}
    assert play("temporal:1", asks, {"a": Tune(0.5, 3), "b": Tune(0.5, 2)}) == table("""
        0  prefill x
        1  train a
        4  train a
        7  train a
        10 prefill y
        11 train b
        14 train b
        17 end
    """)


def test_mini_batches_of_jobs_take_turns() -> None:
    asks = {"x": Ask(0, 1), "y": Ask(0.5, 1), "z": Ask(4.5, 1)}
    assert play("temporal:1,batch", asks, {"a": Tune(0.5), "b": Tune(0.5)}, until=9) == table("""
        0  prefill x
        1  train a
        4  prefill y
        5  train b
        8  prefill z
    """)


def test_a_static_batch_leaves_when_it_is_full_or_late() -> None:
    """As the report serves requests, whatever the schedule: B of them, or those who came within t."""
    asks = {"x": Ask(0, 2), "y": Ask(1, 1), "z": Ask(1.5, 2), "v": Ask(3.5, 1)}
    assert play("temporal:10,request,2,5", asks, {}) == table("""
        0  wait          # x is one of two
        1  prefill x y
        2  decode x      # z waits for the end of the batch
        3  wait          # z is one of two
        3.5 prefill z v
        4.5 decode z
        5.5 end
    """)


def test_a_batch_takes_no_more_than_the_rest_of_n() -> None:
    """With n = 3 and B = 2: two, one, then the job; who waits beyond that comes after it."""
    asks = {name: Ask(0, 1) for name in "pqrst"}
    assert play("temporal:3,request,2,5", asks, {"a": Tune(steps=2)}) == table("""
        0  prefill p q
        1  prefill r     # the third of three, in a batch of its own
        2  train a
        5  train a
        8  prefill s t
        9  end
    """)


def test_without_a_job_only_b_is_the_limit() -> None:
    asks = {name: Ask(0, 1) for name in "pqrst"}
    assert play("temporal:2,request,4,5", asks, {}) == table("""
        0  prefill p q r s
        1  wait
        5  prefill t
        6  end
    """)


def test_a_static_batch_is_served_to_its_end_before_training() -> None:
    asks = {"x": Ask(0, 1), "y": Ask(0, 4), "z": Ask(0.5, 1)}
    assert play("temporal:1,batch,2,0", asks, {"a": Tune(at=0.5)}, until=8) == table("""
        0  prefill x y   # there is no job yet
        1  decode y      # one of one: x; y is served to its end
        2  decode y
        3  decode y
        4  train a
        7  prefill z
    """)


def test_a_static_batch_is_one_however_many_steps_its_prompts_take() -> None:
    asks = {name: Ask(0, 1, prompt=4) for name in "xyz"}
    rows = {"max_prefill_rows": 4, "min_prefill_rows": 4}
    assert play("temporal:3,batch,3,9", asks, TRAINING, until=4, **rows) == table("""
        0  prefill x
        1  prefill y
        2  prefill z
        3  train a
    """)


def test_while_a_batch_is_awaited_training_does_not_have_the_machine() -> None:
    """It has its turn after n requests or when nobody is there; somebody is there, and was promised t."""
    asks = {"x": Ask(0, 1), "y": Ask(1, 1)}
    assert play("temporal:5,request,3,4", asks, {"a": Tune(steps=1)}) == table("""
        0  wait
        1  wait
        4  prefill x y
        5  train a       # nobody is there
        8  end
    """)


def test_a_job_that_is_taken_away_gives_the_machine_back() -> None:
    """At once, in the middle of its optimizer step; its turn is over, and the count begins anew."""
    asks = {"x": Ask(0.5, 2), "y": Ask(6, 1)}
    assert play("temporal:2", asks, {"a": Tune(removed=4), "b": Tune(at=4.5, steps=1)}) == table("""
        0  train a
        3  train a       # its second step: one second there, and gone
        4  prefill x
        5  decode x
        6  prefill y     # one of two: x
        7  train b       # two of two
        10 end
    """)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("temporal:0", "n >= 1"),
        ("temporal:2.5", "needs a whole number for n"),
        ("temporal:4,grain=token", "needs request or batch for grain"),
        ("temporal:4,batch=0", "at least one"),
        ("temporal:4,batch=3,delay=-1", "some seconds or none"),
    ],
)
def test_settings_out_of_range(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(wrong)
