"""FineInfer's two naive ends (section 2). A token takes a second, an iteration three (see `timetable`)."""

from timetable import Ask, Tune, play, table


def test_idle_only_trains_when_nobody_is_there() -> None:
    """ "Switch to fine-tuning tasks when the system is idle", an iteration at a time."""
    asks = {"x": Ask(0, 3), "y": Ask(2.5, 2), "z": Ask(6, 1), "v": Ask(8.5, 1)}
    assert play("idle-only", asks, {"a": Tune(at=0.5, steps=3)}) == table("""
        0  prefill x
        1  decode x
        2  decode x
        3  prefill y     # x is answered, but y is there
        4  decode y
        5  train a
        8  prefill z     # waited for the end of the mini-batch
        9  prefill v
        10 train a
        13 train a
        16 end
    """)


def test_under_a_constant_stream_idle_only_trains_nothing() -> None:
    """ "The system would constantly receive new inference requests, leaving little time for fine-tuning." """
    asks = {f"r{n}": Ask(1.5 * n, 2) for n in range(40)}
    lines = play("idle-only", asks, {"a": Tune()}, until=60)
    assert not any("train" in line for line in lines)


def test_postpone_all_answers_who_ran_and_then_nobody() -> None:
    """ "Postpone all inference requests received when the system is fine-tuning new LLMs." """
    asks = {"x": Ask(0, 3), "y": Ask(1, 2), "z": Ask(4, 1)}
    assert play("postpone-all", asks, {"a": Tune(at=0.5, steps=3)}) == table("""
        0  prefill x
        1  decode x        # y is out: there is a job
        2  decode x
        3  train a
        6  train a
        9  train a         # the last one
        12 prefill y z
        13 decode y
        14 end
    """)


def test_postpone_all_waits_for_every_job() -> None:
    asks = {"x": Ask(1, 1)}
    assert play("postpone-all", asks, {"a": Tune(steps=2), "b": Tune(at=5.5, steps=1)}) == table("""
        0  train a
        3  train a
        6  train b
        9  prefill x
        10 end
    """)


def test_postpone_all_answers_who_ran_though_it_lost_its_pages() -> None:
    asks = {"x": Ask(0, 6), "y": Ask(0, 6), "z": Ask(2, 1)}
    assert play("postpone-all", asks, {"a": Tune(at=0.5, steps=1)}, pages=2) == table("""
        0  prefill x y
        1  decode x y
        2  decode x y
        3  decode x y
        4  decode x       # both need a second page, there is none, and y came last
        5  decode x
        6  prefill y      # its prompt and the four tokens it has
        7  decode y
        8  train a
        11 prefill z
        12 end
    """)


def test_nobody_waits_where_there_is_nothing_to_train() -> None:
    asks = {"x": Ask(0, 2), "y": Ask(1, 1)}
    for policy in ("idle-only", "postpone-all"):
        assert play(policy, asks, {}) == table("""
            0  prefill x
            1  decode x, prefill y
            2  end
        """)
