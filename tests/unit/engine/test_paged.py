"""Requests for adapters that lie on disk: who waits, who does not, and what becomes of whom."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coserve import Engine, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.files import read_adapter
from coserve.engine.completion import Completion
from coserve.errors import AdapterError, AdapterNotFound, ConfigError, OutOfMemory
from coserve.kernels.native.lora import computes
from coserve.memory.ledger import Account
from coserve.train.example import Example
from paged import Script, make_engine, scripted, stored

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = [5, 9, 3]
DATA = [Example(tuple(range(5, 21)), (*range(6, 21), -100))] * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of five adapters of one shape."""
    engine, root = make_engine(), tmp_path_factory.mktemp("adapters")
    return [stored(engine, root / str(seed), seed=seed) for seed in range(5)]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[int]]:
    """Each adapter's answer where all are in memory."""
    engine = make_engine()
    for number, folder in enumerate(folders):
        engine.adapters.load(f"a{number}", folder)
    return [engine.generate(PROMPT, f"a{number}", FOUR).result().tokens for number in range(len(folders))]


@pytest.fixture(scope="module")
def cost(folders: list[Path]) -> int:
    return make_engine().adapters.look_at("a", folders[0]).cost


def paged(
    patch: pytest.MonkeyPatch, folders: list[Path], memory: int | str = "auto", **config: Any
) -> tuple[Engine, Script]:
    engine, script = scripted(patch, adapter_memory=memory, **config)
    for number, folder in enumerate(folders):
        engine.adapters.register(f"a{number}", folder)
    return engine, script


def finish(engine: Engine, script: Script) -> None:
    """Steps until nothing is left; whatever is read is there at once."""
    for _ in range(500):
        if not engine.has_work:
            return
        script.hand_over()
        engine.step()
    pytest.fail("somebody waits for ever")


def ask(engine: Engine, number: int, tokens: int = 4) -> Completion:
    return engine.generate(PROMPT, f"a{number}", SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_a_miss_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], expected: list[list[int]], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders, 2 * cost)
    assert script.begun == [] and len(engine.adapters.cache) == 0, "nothing is read before somebody asks"
    first = ask(engine, 0)
    assert script.begun == ["a0"], "reading begins when the request is queued"
    base = engine.generate(PROMPT, sampling=FOUR).result()
    assert len(base.tokens) == 4 and not first.tokens and engine.stats().waiting == 1
    script.hand_over()
    assert first.result().tokens == expected[0]
    cold, warm = ask(engine, 1), ask(engine, 0)
    assert warm.result().tokens == expected[0] and not cold.tokens
    script.hand_over()
    assert cold.result().tokens == expected[1]
    paging = engine.stats().paging
    assert (paging.hits, paging.misses, paging.loaded, paging.dropped) == (1, 2, 2, 0)
    assert paging.resident == ("a0", "a1") and paging.known == len(folders)


def test_those_that_are_not_used_leave_and_come_again_as_they_were(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], expected: list[list[int]], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders, 2 * cost)
    for number in (0, 1, 2, 0, 3, 4, 1, 2):
        handle = ask(engine, number)
        finish(engine, script)
        assert handle.tokens == expected[number]
        assert sum(engine.adapters.cache.nbytes()) <= 2 * cost
        assert engine.executor.worker.slot_pools.adapters <= 2
    assert script.begun == ["a0", "a1", "a2", "a0", "a3", "a4", "a1", "a2"]
    assert engine.stats().paging.resident == ("a1", "a2")


def test_many_that_wait_are_all_served_and_no_byte_more_is_used(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], expected: list[list[int]], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders, 2 * cost)
    handles = [(number, ask(engine, number)) for number in (0, 1, 2, 3, 4, 2, 0, 1, 4, 3, 3, 0)]
    assert script.begun == ["a0", "a1"], "the next one's turn comes when one of them is there"
    finish(engine, script)
    assert engine.executor.worker.slot_pools.adapters <= 2, "who leaves gives its slot back"
    assert all(handle.tokens == expected[number] for number, handle in handles)


def test_a_running_answer_keeps_its_adapter_and_who_waits_for_bytes_gets_them(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    """One place, and somebody new asks for who is there before the last one has ended."""
    engine, script = paged(monkeypatch, folders, cost)
    ask(engine, 0, tokens=12)
    cold: Completion | None = None
    for turn in range(200):
        script.hand_over()
        engine.step()
        if turn == 6:
            cold = ask(engine, 1)
        if turn % 6 == 5 and turn < 90:
            ask(engine, 0, tokens=12)
        if cold is not None and cold.finish_reason is not None:
            break
    assert turn < 60, "the stream of requests for a0 kept a1 out"
    finish(engine, script)


def begun(engine: Engine, *handles: Completion) -> list[bool]:
    """The requests that have entered, after one more step."""
    engine.step()
    return [handle.sequence.admitted_at is not None for handle in handles]


def test_those_from_disk_enter_one_by_one_beside_others(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    engine, script = paged(monkeypatch, folders)
    engine.generate(PROMPT, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    cold = [ask(engine, number) for number in (0, 1, 0)]
    script.hand_over()
    script.hand_over()
    found = [sum(begun(engine, *cold)) for _ in range(3)]
    assert found == [1, 2, 3]
    finish(engine, script)


def test_those_from_disk_enter_together_where_nobody_is_answered(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    engine, script = paged(monkeypatch, folders)
    cold = [ask(engine, number) for number in (0, 1, 0)]
    script.hand_over()
    script.hand_over()
    assert begun(engine, *cold) == [True] * 3


@pytest.mark.parametrize(("newcomers", "steps"), [(1, 2), (3, 4), (4, 5), (9, 5)])
def test_those_from_disk_let_newcomers_begin_first_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], newcomers: int, steps: int
) -> None:
    engine, script = paged(monkeypatch, folders)
    engine.generate(PROMPT, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    cold = ask(engine, 0)
    script.hand_over()
    for number in range(1, 20):
        newcomer = engine.generate(PROMPT, sampling=FOUR) if number <= newcomers else None
        entered = begun(engine, cold)[0]
        assert newcomer is None or newcomer.sequence.admitted_at is not None
        if entered:
            break
    assert number == steps
    finish(engine, script)


def test_who_gives_up_between_its_adapter_and_its_turn_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int, expected: list[list[int]]
) -> None:
    engine, script = paged(monkeypatch, folders, cost)
    engine.generate(PROMPT, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    cold = ask(engine, 0)
    script.hand_over()
    engine.generate(PROMPT, sampling=FOUR)
    assert begun(engine, cold) == [False]
    cold.cancel()
    other = ask(engine, 1)  # there is one place
    finish(engine, script)
    assert other.tokens == expected[1]


def test_a_failure_is_told_to_who_asked_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]], tmp_path: Path
) -> None:
    engine, script = scripted(monkeypatch)
    folder = stored(engine, tmp_path / "gone")
    engine.adapters.register("gone", folder)
    engine.adapters.register("there", stored(engine, tmp_path / "there", seed=0))
    for file in folder.iterdir():
        file.unlink()
    bad = [engine.generate(PROMPT, "gone", FOUR) for _ in range(2)]
    good = engine.generate(PROMPT, "there", FOUR)
    finish(engine, script)
    for handle in bad:
        with pytest.raises(AdapterError, match=r"the adapter cannot be loaded: .* cannot be read"):
            handle.result()
        with pytest.raises(AdapterError):
            list(handle)
    assert good.result().tokens == expected[0] and engine.adapters.cache.nbytes().paged > 0
    stored(engine, folder)  # other files, although of the same weights
    with pytest.raises(AdapterError, match="has changed"):
        again = engine.generate(PROMPT, "gone", FOUR)
        finish(engine, script)
        again.result()
    assert engine.stats().paging.resident == ("there",)


def test_one_that_is_cancelled_while_it_waits_is_gone_at_once(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], expected: list[list[int]]
) -> None:
    engine, script = paged(monkeypatch, folders)
    ask(engine, 0).cancel()
    engine.step()
    assert not engine.has_work and not engine.completions
    script.hand_over()
    assert ask(engine, 0).result().tokens == expected[0], "what was read for it is there"
    assert script.begun == ["a0"]
    assert not engine.adapters.cache._versions["a0@0"].users


def test_a_name_that_is_given_anew_while_the_old_one_is_read(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], expected: list[list[int]]
) -> None:
    engine, script = paged(monkeypatch, folders)
    old = ask(engine, 0)
    engine.adapters.unload("a0")
    with pytest.raises(AdapterNotFound):
        ask(engine, 0)
    engine.adapters.register("a0", folders[1])
    new = ask(engine, 0)
    finish(engine, script)
    assert (old.tokens, new.tokens) == (expected[0], expected[1])
    assert engine.stats().paging.resident == ("a0",) and len(engine.adapters.cache) == 1, (
        "the old one is gone"
    )


def test_one_that_is_forgotten_while_it_is_read_never_arrives(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    engine, script = paged(monkeypatch, folders)
    ask(engine, 0).cancel()
    engine.step()
    engine.adapters.unload("a0")
    assert engine.adapters.cache.nbytes().paged > 0
    script.hand_over()
    ask(engine, 1)
    finish(engine, script)
    assert engine.stats().paging.resident == ("a1",) and len(engine.adapters.cache) == 1


def test_pinned_ones_come_unasked_and_stay_and_have_half_of_the_room_at_most(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders, 2 * cost)
    engine.adapters.pin("a4")
    assert script.begun == ["a4"]
    for number in (0, 1, 2, 3):
        ask(engine, number)
    finish(engine, script)
    paging = engine.stats().paging
    assert "a4" in paging.resident and paging.pinned == ("a4",) and script.begun.count("a4") == 1
    with pytest.raises(OutOfMemory, match=r"pinned adapters may have .*, half of .* less than with 'a3'"):
        engine.adapters.pin("a3")
    engine.adapters.pin("a4"), engine.adapters.pin("a4", False), engine.adapters.pin("a3")
    for number in (0, 1, 2):
        ask(engine, number)
    finish(engine, script)
    paging = engine.stats().paging
    assert paging.pinned == ("a3",) and "a3" in paging.resident and "a4" not in paging.resident
    engine.adapters.unload("a3")
    assert engine.stats().paging.pinned == () and engine.adapters.cache.nbytes().paged == cost
    engine.adapters.load("always", folders[0])
    with pytest.raises(AdapterError, match="no files to be read from again"):
        engine.adapters.pin("always")
    with pytest.raises(AdapterNotFound):
        engine.adapters.pin("nobody")


def test_bytes_are_reserved_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders, 3 * cost)
    ledger = engine.memory.ledger
    engine.memory.audit()
    assert ledger.of("stored adapters", Account.ADAPTERS) == 3 * cost, "what was set is theirs"
    engine, script = paged(monkeypatch, folders)
    before = engine.memory.audit()[Account.ADAPTERS]
    ask(engine, 0)
    assert engine.memory.audit()[Account.ADAPTERS] == before + cost, "with its slot"
    handles = [ask(engine, 1), ask(engine, 2)]
    finish(engine, script)
    assert engine.memory.audit()[Account.ADAPTERS] == before + 3 * cost
    has_slots = not computes(torch.float32, torch.device("cpu"))  # else kernels read adapters where they are
    assert (engine.executor.worker.slot_pools.nbytes > 0) is has_slots and handles[0].tokens


def test_what_could_never_fit_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    with pytest.raises(OutOfMemory, match="1 bytes more than adapters may have"):
        paged(monkeypatch, folders, cost - 1)
    with pytest.raises(ConfigError, match=r"engine\.adapter_memory: .* more than engine\.memory"):
        make_engine(memory="1GiB", adapter_memory="2GiB")
    with pytest.raises(ConfigError, match=r"engine\.adapter_memory must be positive"):
        make_engine(adapter_memory=0)
    with pytest.raises(ConfigError, match=r"engine\.adapter_memory: expected a number of bytes"):
        make_engine(adapter_memory="much")


def test_without_a_limit_adapters_have_what_is_free_and_leave_for_jobs(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    engine, script = paged(monkeypatch, folders)
    for number in range(3):
        ask(engine, number)
    finish(engine, script)
    ledger = engine.memory.ledger
    engine.memory.audit()
    ledger.budget = ledger.used + cost - 1  # no fourth one fits beside them
    ask(engine, 3)
    finish(engine, script)
    assert engine.stats().paging.resident == ("a1", "a2", "a3")
    ledger.budget = ledger.used
    with pytest.raises(OutOfMemory, match="more than a job can have"):  # far more than all of them
        engine.finetune(DATA * 50, "huge", LoRAConfig(rank=64), TrainingConfig(batch_size=100))
    assert len(engine.stats().paging.resident) == 3
    adapter = read_adapter(folders[0], "mine", engine.base, engine.base.dtype, engine.base.device)
    engine.adapters.add(adapter)
    assert engine.stats().paging.resident == ("a2", "a3"), "the least recently used one left for it"


def test_a_job_that_waits_begins_when_an_answer_lets_its_adapter_go(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], cost: int
) -> None:
    settings = TrainingConfig(batch_size=2, max_steps=1)
    alone = make_engine().memory.ledger
    other = make_engine()
    other.finetune(DATA, "x", training=settings)
    needed = other.memory.ledger.used - alone.used
    engine, script = paged(monkeypatch, folders)
    engine.memory.ledger.budget = alone.used + needed + cost - 1
    running = ask(engine, 0, tokens=8)
    script.hand_over()
    engine.step()
    job = engine.finetune(DATA, "x", training=settings)
    assert job.status == "queued" and "1 bytes more than are free" in job.reason
    finish(engine, script)
    assert len(running.tokens) == 8 and job.status == "succeeded"
    assert engine.stats().paging.resident == ()


def test_a_job_begins_with_one_that_lies_on_disk_and_can_take_its_name(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path], tmp_path: Path, expected: list[list[int]]
) -> None:
    engine, script = paged(monkeypatch, folders)
    engine.adapters.save("a0", tmp_path / "saved")
    engine.adapters.register("saved", tmp_path / "saved")
    settings = TrainingConfig(learning_rate=1e-2, batch_size=2, max_steps=2)
    running = ask(engine, 1, tokens=30)
    job = engine.finetune(DATA, "a1", training=settings, start_from="a0")
    finish(engine, script)
    assert job.status == "succeeded" and len(running.tokens) == 30
    assert running.tokens[:4] == expected[1], "whoever asked for the old one got it"
    same = engine.generate(PROMPT, "saved", FOUR)
    finish(engine, script)
    assert same.tokens == expected[0]
    trained = engine.generate(PROMPT, "a1", FOUR)
    assert trained.result().tokens and "a1" not in engine.stats().paging.resident


def test_an_answer_that_was_complete_already_needs_no_adapter(
    monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    engine, script = paged(monkeypatch, folders)
    done = engine.generate(PROMPT, "a0", FOUR, continued=[1, 2, 3, 4])
    engine.step()
    assert done.finish_reason is not None and not engine.has_work and script.begun == []


def test_answers_go_on_while_a_thread_reads(
    folders: list[Path], expected: list[list[int]], cost: int
) -> None:
    """The reader that is no script."""
    engine = make_engine(adapter_memory=2 * cost)
    for number, folder in enumerate(folders):
        engine.adapters.register(f"a{number}", folder)
    handles = [ask(engine, number % 5) for number in range(15)]
    assert all(handle.result().tokens == expected[number % 5] for number, handle in enumerate(handles))
