"""Sequences whose pages went to the second tier and back answer as if they had never lost them."""

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.schedule import swap_tier
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.worker import opening, swap_space
from coserve.worker.page_store import ScratchStore
from models import prompts, tiny

PAGE = 4
Answer = tuple[list[int], list[float], list[float]]  # tokens, their log-probabilities, the prompt's


pytestmark = pytest.mark.usefixtures("guessed_costs")


@dataclass(frozen=True)
class Asked:
    """A request and the step at which it comes; and after how many of its tokens it is cancelled, if so."""

    prompt: list[int]
    adapter: str | None
    sampling: SamplingParams
    at: int
    stops: int | None


def draw(draws: random.Random, count: int = 10) -> list[Asked]:
    """Requests with beginnings in common, with and without adapters and scores."""
    common = prompts(draws, [13])[0]
    asked, at = [], 0
    for prompt in prompts(draws, [draws.randint(1, 24) for _ in range(count)]):
        sampling = SamplingParams(
            max_tokens=draws.randint(4, 24), ignore_eos=True, logprobs=0,
            prompt_logprobs=draws.choice((None, 0)), temperature=draws.choice((0.0, 1.0)),
            seed=draws.randrange(1000),
        )  # fmt: skip
        prompt = draws.choice((prompt, common + prompt[:5]))
        adapter = draws.choice((None, "lora", "prefix"))
        asked.append(Asked(prompt, adapter, sampling, at, draws.choice((None, None, None, 3))))
        at += draws.randint(0, 3)
    return asked


def run(asked: list[Asked], tokens: int, swap: str, **settings: Any) -> tuple[list[Answer], Engine]:
    """Answers of an engine with so many cached tokens, while a job trains."""
    config = EngineConfig(
        calibrate=False, page_size=PAGE, cache_tokens=tokens, max_running=6, swap_space=swap,
        scheduler={"max_prefill_rows": 16}, dtype="float32", **settings,
    )  # fmt: skip
    engine = Engine(tiny("llama"), config)
    engine.adapters.add(fresh_adapter(engine.base, "lora", LoRAConfig(rank=2), 1))
    engine.adapters.add(fresh_adapter(engine.base, "prefix", PrefixTuningConfig(6), 2))
    examples = [Example(tuple(x), (*x[1:], -100)) for x in prompts(random.Random(0), [11, 19])]
    engine.finetune(examples, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2, epochs=2))
    answers = []
    for step in range(asked[-1].at + 1):
        for one in asked:
            if one.at == step:
                answers.append(engine.generate(one.prompt, one.adapter, one.sampling))
        engine.step()
    while engine.has_work:
        for one, answer in zip(asked, answers, strict=True):
            if one.stops is not None and len(answer.tokens) >= one.stops:
                answer.cancel()
        engine.step()
    found = [
        (
            a.tokens[: o.stops],
            [p.chosen for p in a.logprobs][: o.stops],
            [p.chosen for p in a.prompt_logprobs],
        )
        for a, o in zip(answers, asked, strict=True)
    ]
    swapping = engine.scheduler.caches.first.swapping
    assert engine.pages.free_count == engine.pages.pages and swapping.copies.used == len(
        swapping.copies.evictable
    )
    return found, engine


def draw_pressed(seed: object) -> list[Asked]:
    """Requests that do not all fit: sequences with some pages are preempted."""
    for attempt in range(20):
        asked = draw(random.Random(f"{seed} {attempt}"))
        if run(asked, 72, "0", deterministic=True)[1].stats().recomputed_tokens > 20:
            return asked
    raise AssertionError("requests for 72 pages fit in 20 of 20 draws")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("sharing", "store"), [(True, "auto"), (False, "auto"), (True, "int8")])
def test_answers_are_the_same_bits_however_pages_were_lost(sharing: bool, store: str) -> None:
    """In the deterministic mode, in which computing again gives the same bits too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    asked = draw_pressed(seed)
    settings = {"deterministic": True, "prefix_sharing": sharing, "cache_dtype": store}
    whole, alone = run(asked, 1200, "1GiB", **settings)
    swapped, one = run(asked, 72, "1GiB", **settings)
    again, other = run(asked, 72, "0", **settings)
    assert alone.stats().preemptions == 0
    assert one.stats().swapped_in_pages > 0 and other.stats().swapped_in_pages == 0
    assert other.stats().recomputed_tokens > one.stats().recomputed_tokens
    assert swapped == whole and again == whole


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_the_same_beside_any_other_rows(ahead: bool) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    asked = draw_pressed(seed)
    whole, _ = run(asked, 1200, "0", async_scheduling=ahead)
    swapped, engine = run(asked, 72, "1GiB", async_scheduling=ahead)
    assert engine.stats().swapped_in_pages > 0
    assert [tokens for tokens, *_ in swapped] == [tokens for tokens, *_ in whole]
    for (_, *found), (_, *wanted) in zip(swapped, whole, strict=True):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_prompt_whose_pages_went_to_the_tier_is_answered_with_the_same_bits() -> None:
    """Asked again after others that took all pages, through the base and through an adapter."""
    draws = random.Random(secrets.randbits(32))
    same, *others = prompts(draws, [40, *[60] * 5])
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    asked = [Asked(same, name, sampling, 0, None) for name in (None, "lora")]
    asked += [Asked(other, None, sampling, 20 * at, None) for at, other in enumerate(others, 1)]
    asked += [Asked(same, name, sampling, 160, None) for name in ("lora", None)]
    whole, _ = run(asked, 1200, "0", deterministic=True)
    found, engine = run(asked, 100, "1GiB", deterministic=True)
    assert engine.stats().prefix_pages_swapped_in >= 8 and engine.stats().preemptions == 0
    assert found == whole and whole[0] == whole[-1] and whole[1] == whole[-2]


@pytest.mark.local  # blocks this process's disk
def test_answers_go_on_while_a_disk_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the preempted one are overwritten meanwhile, and come back as they were."""
    is_free, put = threading.Event(), ScratchStore.put
    waited = list[bool]()

    def blocked(store: ScratchStore, name: int, first: int, rows: Tensor) -> None:
        waited.append(is_free.wait(20))  # alone it would never end
        put(store, name, first, rows)

    def answers(blocks: bool) -> list[list[int]]:
        """Tokens of two that grow beyond all pages, of which the second is preempted."""
        is_free.clear()
        config = EngineConfig(
            calibrate=False, page_size=PAGE, cache_tokens=10 * PAGE, deterministic=True, prefix_sharing=False
        )  # fmt: skip
        engine = Engine(tiny("llama"), config)
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        first, second = (engine.generate([7, 8, n] * 4, sampling=sampling) for n in (3, 4))
        while first.finish_reason is None:
            engine.step()
        if blocks:
            assert engine.stats().preemptions and waited == [], "the first one did not wait for the disk"
            assert engine.stats().swapped_out_pages == 0 and second.finish_reason is None
        is_free.set()
        engine.run()
        assert not blocks or (waited == [True] and engine.stats().swapped_in_pages > 0)
        return [first.tokens, second.tokens]

    plain = answers(blocks=False)
    waited.clear()
    monkeypatch.setattr(ScratchStore, "put", blocked)
    assert answers(blocks=True) == plain


@pytest.mark.local  # blocks this process's disk
@pytest.mark.parametrize("bases", [1, 2])
@pytest.mark.parametrize("staged", [1, 1000])
@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_disk_that_blocks_for_ever_costs_nobody_an_answer(
    verb: str, staged: int, bases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies for which staging memory has room or not; a long sequence enters meanwhile, and has keys and
    values elsewhere, and the sequence whose copy does not move is computed again."""
    is_free, real, waited = threading.Event(), getattr(ScratchStore, verb), list[bool]()
    draws = random.Random(f"blocked {verb}")
    asked = prompts(draws, [12, 12, 9, 96, 11])

    def blocked(store: ScratchStore, name: Any, *rest: Any) -> Any:
        if not isinstance(name, tuple):  # a copy
            waited.append(is_free.wait(30))
        return real(store, name, *rest)

    def answers(blocks: bool) -> list[list[int]]:
        config = EngineConfig(
            calibrate=False, page_size=PAGE, cache_tokens=10 * PAGE if blocks else 1024, dtype="float64",
            prefix_sharing=False,
        )  # fmt: skip
        engine = Engine(tiny("llama", torch.float64), config)
        last = engine if bases == 1 else engine.add_base("wide", tiny("llama", torch.float64, seed=3))
        for base in engine.scheduler.caches:
            engine.scheduler.caches[base].swapping.copies.staged = staged
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        found = [engine.generate(prompt, sampling=sampling) for prompt in asked[:2]]
        while blocks and not (found[1].sequence.loading if verb == "get" else engine.stats().preemptions):
            engine.step()
        found += [engine.generate(prompt, sampling=sampling) for prompt in asked[2:4]]
        found.append(last.generate(asked[4], sampling=sampling))
        until = time.monotonic() + 20
        while any(one.finish_reason is None for one in found) and time.monotonic() < until:
            engine.step()
        assert waited == [], "no step has waited for the disk, and no call of it has returned"
        if blocks:
            assert found[3].sequence.offloaded and engine.stats().recomputed_tokens
            assert engine.stats().free_pages == engine.stats().pages
        return [one.tokens for one in found]

    plain = answers(blocks=False)
    monkeypatch.setattr(swap_tier, "STUCK", 0.3)
    monkeypatch.setattr(ScratchStore, verb, blocked)
    try:
        assert answers(blocks=True) == plain
    finally:
        is_free.set()


# Failures


def flip(descriptor: int) -> None:
    """Bits of every page that is written."""
    for start in range(0, os.fstat(descriptor).st_size, 64):
        place = start + secrets.randbelow(64)
        byte = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte[0] ^ (1 << secrets.randbelow(8))]), place)


def shorten(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


def empty(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, size)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [flip, shorten, empty])
def test_what_a_disk_loses_is_computed_again(
    how: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = draw_pressed(f"damaged {secrets.randbits(32)}")
    whole, _ = run(asked, 1200, "0", deterministic=True)
    put = ScratchStore.put

    def then_damage(store: ScratchStore, name: int, first: int, rows: Tensor) -> None:
        put(store, name, first, rows)
        how(store._file._descriptor)

    monkeypatch.setattr(ScratchStore, "put", then_damage)
    with caplog.at_level(logging.WARNING, swap_space.__name__):
        found, engine = run(asked, 72, "1GiB", deterministic=True)
    assert found == whole
    stats = engine.stats()
    assert stats.swapped_out_pages > 0 and stats.swap_failures > 0 and stats.swapped_in_pages == 0
    assert len([r for r in caplog.records if "computed again" in r.getMessage()]) == 1


def test_a_full_disk_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = draw_pressed(f"full {secrets.randbits(32)}")
    whole, _ = run(asked, 1200, "0", deterministic=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING, swap_space.__name__):
        found, engine = run(asked, 72, "1GiB", deterministic=True)
    assert found == whole
    assert engine.stats().swap_failures > 0 and engine.stats().swapped_out_pages == 0
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


def test_without_a_folder_pages_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, opening.__name__):
        engine = Engine(tiny("llama"), EngineConfig(calibrate=False, scratch=str(tmp_path / "nowhere")))
    assert engine.stats().swap_pages == 0 and "nowhere" in caplog.text
