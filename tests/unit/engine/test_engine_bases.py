"""Several bases in one engine: what each refuses, their names, one ledger and one line of jobs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bases import WIDE, two_engines, wide_model
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import Updated
from coserve.errors import (
    AdapterError,
    AdapterMismatch,
    ConfigError,
    CoserveError,
    JobError,
    LossNotFinite,
    ModelError,
    PromptTooLong,
)
from coserve.memory.ledger import Account
from coserve.train.example import Example
from coserve.train.save_policy import SavePolicy
from models import POSITIONS, save, tiny, with_lora

pytestmark = pytest.mark.local
ANSWER = SamplingParams(max_tokens=4, ignore_eos=True)
DATA = [Example(tuple(range(5, 69)), (*range(6, 69), -100))] * 8
LORA = LoRAConfig(rank=4)
SETTINGS = TrainingConfig(batch_size=4, rows=256, keep=SavePolicy.EVERYTHING)


def tokens(engine: Engine, adapter: str | None = None) -> list[int]:
    return engine.generate([1, 2, 3], adapter, ANSWER).result().tokens


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return two_engines()


@pytest.mark.parametrize(
    ("base", "kind", "said"),
    [
        (WIDE, ConfigError, "there is a base 'wide' already"),
        ("base", ConfigError, "there is a base 'base' already"),
        ("", ConfigError, "must not be empty"),
        ("missing", CoserveError, "nowhere"),
    ],
)
def test_a_base_that_cannot_join_changes_nothing(
    engines: tuple[Engine, Engine], base: str, kind: type[CoserveError], said: str, tmp_path: Path
) -> None:
    engine, wide = engines
    used, owners = engine.memory.ledger.used, set(engine.memory.ledger._entries)
    with pytest.raises(kind, match=said):
        engine.add_base(base, tmp_path / "nowhere" if base == "missing" else wide_model())
    assert engine.memory.ledger.used == used and set(engine.memory.ledger._entries) == owners
    assert [*engine.bases] == [engine, wide] and tokens(engine) and tokens(wide)


def test_a_base_with_damaged_weights_changes_nothing(tmp_path: Path) -> None:
    folder = save(wide_model(), tmp_path / "wide")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, executor="local"))
    before = tokens(engine)
    with pytest.raises(ModelError):
        engine.add_base(WIDE, folder)
    assert [*engine.bases] == [engine] and tokens(engine) == before
    weights.unlink()
    added = engine.add_base(WIDE, save(wide_model(), folder))  # repaired
    assert tokens(added) and tokens(engine) == before


def test_memory_that_is_too_small_for_one_more() -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, executor="local"))
    used = engine.memory.ledger.used
    engine.memory.ledger.budget = used + 1000
    with pytest.raises(ConfigError, match="too few for one more model"):
        engine.add_base(WIDE, wide_model())
    assert engine.memory.ledger.used == used and tokens(engine)


def test_a_base_that_fails_at_the_end_has_no_place_in_the_second_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, executor="local"))

    def fail(*_: Any) -> None:
        raise ConfigError("at the end")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="at the end"):
        patch.setattr("coserve.engine.engine.Sessions", fail)
        engine.add_base(WIDE, wide_model())
    own = engine.scheduler.caches.first.swapping.copies
    assert engine.scheduler.tier._copies == [own] and tokens(engine)
    assert tokens(engine.add_base(WIDE, wide_model()))


@pytest.mark.parametrize(("name", "value"), [("async_scheduling", True), ("base", "unix:/nowhere")])
def test_what_is_for_one_base_alone(name: str, value: Any) -> None:
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, executor="local"))
    engine.config = replace(engine.config, **{name: value})
    with pytest.raises(ConfigError, match=f"engine.{name} is for engines of one base"):
        engine.add_base(WIDE, wide_model())


def test_each_has_its_own_limits_pages_and_owners(engines: tuple[Engine, Engine]) -> None:
    engine, wide = engines
    assert engine.bases[WIDE] is wide and wide.bases["base"] is engine
    with pytest.raises(ConfigError, match="there is no base 'other'; there are base, wide"):
        engine.bases["other"]
    for one in engines:
        with pytest.raises(PromptTooLong, match=f"the model has {POSITIONS} positions"):
            one.generate([1] * POSITIONS, sampling=ANSWER)
    stats, pages = engine.stats(), engine.config.pages
    assert wide.stats().pages == stats.pages == 2 * pages and stats.free_pages == 2 * pages
    ledger = engine.memory.ledger
    assert ledger.of("pages of wide", Account.PAGES) == wide.executor.spec.cache_nbytes
    assert ledger.of("base of wide", Account.BASE) >= wide.base.nbytes > 0
    assert stats.memory["base"] == ledger.of("base") + ledger.of("base of wide")
    assert stats.memory["pages"] == ledger.of("pages") + ledger.of("pages of wide")


def test_adapters_belong_to_a_base(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    engine, wide = engines
    with_lora(wide_model(), seed=1).save_pretrained(tmp_path / "wide")
    with_lora(tiny("llama"), seed=1).save_pretrained(tmp_path / "small")
    with pytest.raises(AdapterMismatch):
        engine.adapters.register("one", tmp_path / "wide")
    wide.adapters.register("one", tmp_path / "wide")
    engine.adapters.register("two", tmp_path / "small")
    for base, name in ((engine, "one"), (wide, "two")):
        with pytest.raises(AdapterError, match=f"'{name}' is one of another base"):
            base.generate([1, 2], name)
        with pytest.raises(AdapterError, match=f"'{name}' is one of another base"):
            base.adapters.save(name, tmp_path / "saved")
        with pytest.raises(AdapterError, match=f"'{name}' is one of another base"):
            base.finetune(DATA, name, LORA, SETTINGS)
    with pytest.raises(AdapterError, match="'one' is one of another base"):
        engine.adapters.register("one", tmp_path / "small")
    assert tokens(wide, "one") and tokens(engine, "two") and tokens(wide) and tokens(engine)
    assert engine.stats().paging.known == 2 and engine.stats().adapters == 2
    for base, name in ((engine, "one"), (wide, "two")):  # one bank: any of them takes it away
        base.adapters.unload(name)
    assert engine.stats().adapters == 0
    assert not any(len(one.executor.worker.loaded) for one in engines)  # type: ignore[attr-defined]
    engine.adapters.register("one", tmp_path / "small")  # the name is free
    assert tokens(engine, "one")
    engine.adapters.unload("one")


def test_jobs_of_both_wait_in_one_line_for_one_ledger() -> None:
    engine, wide = two_engines(cache_tokens=256)
    ledger = engine.memory.ledger
    empty = ledger.used
    probe = wide.finetune(DATA, "b", LORA, SETTINGS)
    needed = ledger.used - empty
    probe.cancel()
    engine.adapters.unload("b")
    assert ledger.used == empty
    first = engine.finetune(DATA, "a", LORA, SETTINGS, job="first")
    ledger.budget = ledger.used + needed - 1
    second = wide.finetune(DATA, "b", LORA, SETTINGS, job="second")
    third = engine.finetune(DATA, "c", LoRAConfig(rank=1), SETTINGS, job="third")
    assert (first.status, second.status, third.status) == ("running", "queued", "queued")
    assert "until job first ends" in second.reason and "behind job second" in third.reason
    for base, name in ((wide, "first"), (engine, "second")):
        with pytest.raises(JobError, match=f"'{name}' already"):
            base.finetune(DATA, "d", LORA, SETTINGS, job=name)
    taken = sum(ledger.of(f"{what} of {WIDE}") for what in ("base", "pages", "steps"))
    assert taken and engine.memory.job_room() <= ledger.budget - taken
    for job in (third, second, first):
        assert len(job.result().history) == job.steps and job.status == "succeeded"
    engine.adapters.unload("a"), wide.adapters.unload("b"), engine.adapters.unload("c")
    assert ledger.used == empty
    assert engine.finetune(DATA, "e").job != wide.finetune(DATA, "f").job


def test_what_fails_on_one_base_leaves_the_other() -> None:
    engine, wide = two_engines(cache_tokens=256)
    explodes = replace(SETTINGS, learning_rate=1e20, warmup_ratio=0.0, epochs=4)
    good = engine.finetune(DATA, "good", LORA, replace(SETTINGS, epochs=8))
    bad = wide.finetune(DATA, "bad", LORA, explodes)
    answers = [one.generate([1, 2, 3], sampling=ANSWER) for one in (engine, wide)]
    good.result()
    assert len(good.history) == good.steps and good.status == "succeeded"
    assert bad.status == "failed" and isinstance(bad.error, LossNotFinite)
    assert [len(answer.result().tokens) for answer in answers] == [4, 4] and tokens(wide)


def test_a_cancelled_answer_frees_its_pages(engines: tuple[Engine, Engine]) -> None:
    engine, wide = engines
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    answers = [one.generate([1, 2, 3], sampling=long) for one in engines]
    engine.step(), wide.step()
    answers[1].cancel()
    engine.step()
    assert answers[1].finish_reason == "cancelled" and answers[0].finish_reason is None
    assert wide.pages.free_count == wide.pages.pages
    answers[0].cancel()
    engine.run()
    assert not engine.has_work and not wide.has_work


def test_training_sessions_on_both(engines: tuple[Engine, Engine]) -> None:
    from coserve import Datum

    data = [Datum((1, 2, 3, 4), (2, 3, 4, 5))]
    clients = [one.open_training(f"session {n}", LORA) for n, one in enumerate(engines)]
    assert clients[0].job != clients[1].job
    passes = [client.forward_backward(data) for client in clients]
    losses = [operation.result().loss for operation in passes]
    steps = [client.optim_step() for client in clients]
    assert losses[0] != losses[1] and all(step.result().version for step in steps)
    assert all(tokens(one, client.adapter) for one, client in zip(engines, clients, strict=True))
    for client in clients:
        client.close()


def test_a_step_goes_to_the_host_of_each_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that it has published and its changes of chain; no window is larger than any of them bears."""
    engines = two_engines(cache_tokens=256)
    published, advanced = Counter[str](), Counter[str]()

    def watch(one: Engine) -> None:
        publish, advance = one.adapters.publish, one.changes.advance

        def noted(updates: Iterable[Updated]) -> None:
            told = list(updates)
            published.update(f"{one.base_id} has {updated.version}" for updated in told)
            publish(told)

        def advanced_by(now: float) -> None:
            advanced[one.base_id] += 1
            advance(now)

        monkeypatch.setattr(one.adapters, "publish", noted)
        monkeypatch.setattr(one.changes, "advance", advanced_by)

    for number, one in enumerate(engines):
        watch(one)
        monkeypatch.setattr(one.training.admission, "window_rows", lambda rows=70 - number: rows)
        one.finetune(DATA, f"adapter {number}", LORA, SETTINGS)
    engines[0].run()
    wanted = {f"{one.base_id} has adapter {n}@{s}" for n, one in enumerate(engines) for s in (1, 2)}
    assert published == Counter(dict.fromkeys(wanted, 1))
    assert advanced["base"] == advanced[WIDE] > 3
    assert engines[0].scheduler.window_rows == 69
