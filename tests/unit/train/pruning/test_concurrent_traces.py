"""Traces of several threads at once, beside steps: torch's own state is the whole process's."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from coserve import LoRAConfig, SavePolicy
from coserve.model.base import Base
from coserve.train.fresh import sketch_adapter
from coserve.train.pruning import layers, plan
from coserve.train.pruning.once import TRACING, Once
from coserve.train.save_policy import Fates
from methods import engine_of

TARGETS = ("q_proj", "o_proj", "down_proj")
THREADS = 4


@pytest.fixture(scope="module")
def base() -> Base:
    return engine_of("llama").base


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Every trace is a new one, and threads take turns far more often than they do by themselves."""
    layers.SKETCHES.clear()
    layers.choice_of.clear()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def fates(base: Base, target: str, rank: int) -> Fates:
    adapter = sketch_adapter(base, "mine", LoRAConfig(rank=rank, targets=(target,)), 0)
    plan.foresee(base, adapter, SavePolicy.PRUNED)
    return plan.fates_of(base, adapter, SavePolicy.PRUNED, 16)


def test_threads_that_trace_get_what_one_thread_gets(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = set()
    change = torch.set_default_dtype

    def changed(dtype: torch.dtype) -> None:
        defaults.add(dtype)
        change(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", changed)
    found: dict[tuple[int, str], Fates] = {}
    failed: list[BaseException] = []
    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        try:
            together.wait()
            for target in TARGETS[number:] + TARGETS[:number]:
                found[number, target] = fates(base, target, 3 + number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.get_default_dtype() == torch.float32 and defaults <= {torch.float32}  # of steps meanwhile
    layers.SKETCHES.clear()
    layers.choice_of.clear()
    for target in TARGETS:
        alone = fates(base, target, 3)
        assert all(found[number, target] == alone for number in range(THREADS))


def test_what_is_known_waits_for_no_trace(base: Base) -> None:
    known = fates(base, "q_proj", 4)
    answers: list[Fates] = []
    with TRACING:  # another tenant's trace is under way
        asking = threading.Thread(target=lambda: answers.append(fates(base, "q_proj", 5)))
        asking.start()
        asking.join(30)
    asking.join()
    assert answers == [known]


def test_what_two_threads_ask_for_is_made_once() -> None:
    made: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()

    def make(key: int) -> str:
        made.append(key)
        begun.set()
        goes_on.wait(30)
        return str(key)

    once = Once(make, 2)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(once(7))) for _ in range(2)]
    threads[0].start()
    begun.wait(30)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join()
    assert results == ["7", "7"] and made == [7]
    assert [once(8), once(9), once(8), once(7)] == ["8", "9", "8", "7"]
    assert made == [7, 8, 9, 7]  # the oldest of three was forgotten


def test_a_main_thread_that_traces_says_that_it_lives(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that waits for a trace; another thread's trace goes on beside a loop that hangs."""
    beats: list[None] = []
    monkeypatch.setattr(TRACING, "on_progress", lambda: beats.append(None))
    tracing = threading.Thread(target=fates, args=(base, "q_proj", 4))
    tracing.start()
    tracing.join()
    assert not beats
    fates(base, "o_proj", 4)
    assert beats
    beats.clear()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with TRACING:
            held.set()
            done.wait(0.8)

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait(30)
    with TRACING:
        holding.join()
    assert beats
