"""Jobs are let in by bytes: never, later, or now."""

import re
from dataclasses import replace

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.size import read_size, show_size
from coserve.engine import memory
from coserve.engine.finetuning import FineTuning
from coserve.errors import AdapterNotFound, ConfigError, JobError, OutOfMemory
from coserve.memory.compiled import built_bytes
from coserve.memory.ledger import Account
from coserve.memory.malloc import resident_bytes
from coserve.train.example import Example
from coserve.train.needs import replayed_bytes
from coserve.train.save_policy import SavePolicy
from models import tiny
from steps import run_steps_by

EXAMPLE = Example(tuple(range(5, 69)), (*range(6, 69), -100))  # 64 tokens
DATA = [EXAMPLE] * 8
LORA = LoRAConfig(rank=4)
SETTINGS = TrainingConfig(batch_size=4, rows=256, keep=SavePolicy.EVERYTHING)


def make_engine(memory: int | str = "auto") -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=256, memory=memory))


@pytest.fixture(scope="module")
def fixed() -> int:
    """Bytes of an engine without jobs."""
    return make_engine().memory.ledger.used


@pytest.fixture(scope="module")
def needed() -> int:
    """Bytes of one job more."""
    engine = make_engine()
    before = engine.memory.ledger.used
    start(engine, "one")
    return engine.memory.ledger.used - before


@pytest.fixture(scope="module")
def own(fixed: int, needed: int) -> int:
    """Bytes of another job beside it: rows of both can go back together."""
    engine = make_engine()
    start(engine, "one"), start(engine, "two")
    found = engine.memory.ledger.used - fixed - needed
    assert 0 < found <= needed
    return found


def test_what_goes_back_together_is_no_more_than_one_full_window(needed: int, own: int) -> None:
    """Of 512 rows: the third job of 256 brings none that could go along."""
    engine = make_engine()
    used = []
    for name in ("one", "two", "three"):
        before = engine.memory.ledger.used
        start(engine, name)
        used.append(engine.memory.ledger.used - before)
    assert used[:2] == [needed, own]
    backward = used[1] - used[2]
    assert backward > 0 and engine.memory.ledger.of("backward") == 2 * backward


def start(engine: Engine, name: str, training: TrainingConfig = SETTINGS, rank: int = 4) -> FineTuning:
    return engine.finetune(DATA, name, LoRAConfig(rank=rank), training, job=name)


def tokens(engine: Engine) -> list[int]:
    return engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=4, ignore_eos=True)).result().tokens


def test_a_job_has_its_bytes_before_it_begins_and_gives_them_back(fixed: int, needed: int) -> None:
    engine = make_engine()
    ledger = engine.memory.ledger
    assert ledger.used == fixed
    job = start(engine, "one")
    assert job.status == "running" and ledger.used == fixed + needed
    job.result()
    left = engine.adapters.cache.nbytes().resident
    assert left > 0 and ledger.used == fixed + left, "its adapter stays"
    engine.adapters.unload("one")
    assert ledger.used == fixed


def test_one_that_cannot_begin_now_waits_and_begins_when_it_can(fixed: int, needed: int, own: int) -> None:
    engine = make_engine(fixed + needed + own - 1)
    first, second = start(engine, "one"), start(engine, "two")
    assert (first.status, second.status) == ("running", "queued")
    assert "1 bytes more than are free, until job one ends" in second.reason
    with pytest.raises(AdapterNotFound):
        engine.generate([1, 2], "two")
    with pytest.raises(JobError, match="is being trained by two"):
        engine.finetune(DATA, "two", LORA, SETTINGS)
    with pytest.raises(JobError, match="'two' already"):
        engine.finetune(DATA, "three", LORA, SETTINGS, job="two")
    tokens(engine)
    second.result()
    assert (first.status, second.status, second.reason) == ("succeeded", "succeeded", "")
    assert len(second.history) == second.steps == 2


def test_jobs_begin_in_the_order_in_which_they_came(fixed: int, needed: int, own: int) -> None:
    """A small one that would fit does not pass a large one for ever."""
    engine = make_engine(fixed + needed + own - 1)
    jobs = [start(engine, name) for name in ("one", "two")]
    jobs.append(start(engine, "small", TrainingConfig(batch_size=1, rows=64)))
    assert [job.status for job in jobs] == ["running", "queued", "queued"]
    assert jobs[2].reason.endswith("behind job two")
    jobs[1].cancel()
    assert [job.status for job in jobs] == ["running", "cancelled", "running"]
    assert engine.training.admission.waiting == ()


def test_a_job_that_waits_can_be_given_up(fixed: int, needed: int) -> None:
    engine = make_engine(fixed + needed)
    first, second = start(engine, "one"), start(engine, "two")
    with pytest.raises(JobError, match="has not begun"):
        second.pause()
    second.cancel()
    assert second.status == "cancelled" and first.result().status == "succeeded"
    assert "two" not in engine.adapters.bank.names and not engine.has_work


def test_a_state_of_another_job_is_refused_at_once_where_it_would_wait(fixed: int, needed: int) -> None:
    engine = make_engine(fixed + needed)
    state = start(engine, "one").pause()
    engine.adapters.unload("one")
    first = start(engine, "first")
    with pytest.raises(JobError, match="another seed: 0, not 1"):
        engine.finetune(DATA, "one", LORA, replace(SETTINGS, seed=1), job="one", resume=state)
    again = engine.finetune(DATA, "one", LORA, SETTINGS, job="one", resume=state)
    assert (first.status, again.status) == ("running", "queued")
    first.cancel()
    engine.adapters.unload("first")
    assert again.result().status == "succeeded"


def test_what_nobody_will_free_is_not_waited_for(fixed: int, needed: int) -> None:
    """Loaded adapters stay until somebody unloads them."""
    engine = make_engine(fixed + needed)
    start(engine, "one").result()
    held = start(engine, "two")
    assert held.status == "queued" and "until an adapter is unloaded" in held.reason
    with pytest.raises(OutOfMemory, match="job two waits for"):
        held.result()
    engine.adapters.unload("one")
    assert held.status == "running" and held.result().status == "succeeded"


def test_one_that_never_fits_is_refused_with_what_is_missing(fixed: int, needed: int) -> None:
    engine = make_engine(fixed + needed - 10_000)
    with pytest.raises(OutOfMemory) as refused:
        start(engine, "one")
    text = str(refused.value)
    assert f"{show_size(10_000)} more than a job can have" in text and "activations" in text
    assert "it would fit with keep=inputs" in text and "batch_size=3" in text
    assert not engine.jobs and engine.memory.ledger.used == fixed
    tokens(engine)


def test_a_refusal_says_what_has_the_memory_and_how_much_is_enough(fixed: int, needed: int) -> None:
    with pytest.raises(OutOfMemory) as refused:
        start(make_engine(fixed + needed // 50), "one")
    found = re.search(
        r"others have a step .*, the base .*: engine.memory of (.*) is enough", str(refused.value)
    )
    assert found is not None
    job = start(make_engine(read_size(found[1])), "one")
    assert job.status == "running"


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55, 0.02])
def test_settings_that_are_named_do_fit_and_larger_ones_do_not(fixed: int, needed: int, share: float) -> None:
    engine = make_engine(fixed + int(share * needed))
    with pytest.raises(OutOfMemory) as refused:
        start(engine, "one", rank=16)
    _, _, advice = str(refused.value).partition("it would fit with ")
    for change in advice.split(", or ") if advice else ():
        settings = dict(pair.split("=") for pair in change.split(", "))
        for more, fits in ((0, True), (1, False)):
            fields = {
                key: int(value) + (more if key != "rows" or "max_length" not in settings else 0)
                for key, value in settings.items()
                if key not in ("keep", "too_long")
            }
            rank = fields.pop("rank", 16)
            keep = SavePolicy(settings.get("keep", "everything"))
            assert ("too_long" in settings) is ("max_length" in settings)
            training = TrainingConfig(
                **{"batch_size": 4, "rows": 256, "keep": keep, **fields},
                too_long="truncate" if settings.get("too_long") == "truncate" else "error",
            )
            if fits:
                start(engine, "one", training, rank).cancel()
            elif change != "keep=inputs":
                with pytest.raises(OutOfMemory):  # else it was not the most
                    start(engine, "one", training, rank)
    assert bool(advice) == (share > 0.1)


def test_a_job_that_goes_on_with_less_frees_the_rest_and_never_asks_for_more(
    fixed: int, needed: int, own: int
) -> None:
    engine = make_engine(fixed + needed + own * 2 // 5)
    first, second = start(engine, "one"), start(engine, "two")
    assert first.work is not None
    job = first.work.prepared
    engine.training.admission.shrink(replace(job, config=replace(SETTINGS, batch_size=8)))
    assert engine.memory.ledger.used == fixed + needed and second.status == "queued"
    leaner = replace(SETTINGS, keep=SavePolicy.INPUTS, rows=64)
    engine.training.admission.shrink(replace(job, config=leaner))
    assert second.status == "running" and first.is_under_way


def test_an_engine_that_does_not_fit_says_so_at_once(fixed: int) -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory: .* too few for the model .*engine\.cache_tokens"):
        make_engine(fixed - 5000)


def test_an_adapter_that_does_not_fit_is_refused(fixed: int, needed: int) -> None:
    engine = make_engine(fixed + needed)
    start(engine, "one").result()
    adapter = engine.adapters.weights("one")
    engine.memory.ledger.budget = engine.memory.ledger.used + adapter.nbytes - 1
    with pytest.raises(OutOfMemory, match=r"the adapter 'one' needs .*, 1 bytes more than are free"):
        engine.adapters.add(adapter)
    engine.memory.ledger.budget += 1
    engine.adapters.add(adapter)


def test_statistics_have_the_budget_what_is_used_and_what_was_measured(fixed: int) -> None:
    engine = make_engine(fixed * 3)
    start(engine, "one")
    stats = engine.stats()
    assert stats.memory_budget == fixed * 3 and set(stats.memory) == {a.value for a in Account}
    assert sum(stats.memory.values()) == engine.memory.ledger.used
    assert all(
        stats.memory[name] > 0 for name in ("base", "pages", "activations", "optimizers", "workspaces")
    )
    assert stats.memory_peak == engine.memory.meter.peak()
    assert stats.holdings.jobs == {"one": engine.memory.ledger.of("job one")}
    answer = engine.generate([1] * 9, sampling=SamplingParams(max_tokens=9, ignore_eos=True))
    while not answer.tokens:
        engine.step()
    (pages,) = engine.stats().holdings.pages.values()
    assert pages == len(engine.scheduler.requests.running[0].pages) > 0
    answer.result()
    held = engine.stats()
    assert held.holdings.pages == {} and held.holdings.waits == {} and held.holdings.states == 0
    assert held.holdings.cached_pages == engine.pages.cached_count


@pytest.mark.local
def test_a_process_counts_what_libraries_take_beside_the_model(fixed: int) -> None:
    """And a job that needs those bytes waits for others, or is refused, as with any bytes."""
    engine = make_engine(fixed * 3 + 2 * built_bytes())
    engine.executor.worker._grown = 1000  # type: ignore[attr-defined]
    room = engine.memory.job_room()
    engine.memory.count_process()
    assert engine.stats().memory["libraries"] == built_bytes() + 1000
    assert engine.memory.job_room() == room - built_bytes() - 1000
    assert engine.stats().memory_imports == engine.memory.imports > 0


def test_a_budget_without_room_for_libraries_is_refused(fixed: int) -> None:
    engine = make_engine(fixed * 3)
    with pytest.raises(ConfigError, match=r"too few beside model, cache and a step for what libraries take"):
        engine.memory.count_process()


def test_freed_memory_goes_back_where_it_exceeds_the_budget(
    fixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, returned = make_engine(fixed + 2 * built_bytes()), []
    engine.memory.count_process()
    monkeypatch.setattr(memory, "return_freed_memory", lambda: returned.append(True))
    engine.memory.imports = resident_bytes()
    engine.stats()
    assert not returned
    engine.memory.imports = resident_bytes() - engine.memory.ledger.budget - 1
    engine.stats()
    assert returned == [True]


def test_a_step_returns_freed_memory_beyond_the_budget(fixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and again where 8 MiB have come back; statistics look anew."""
    engine, resident, returned = make_engine(fixed + 2 * built_bytes()), [0], []
    monkeypatch.setattr(memory, "return_freed_memory", lambda: returned.append(resident[0]))
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident[0])
    most = engine.memory.imports + engine.memory.ledger.budget
    resident[0] = most + 1
    engine.step()
    assert not returned  # no process of the engine's own
    engine.memory.count_process()
    for grown in (0, 1, 8 << 20, (8 << 20) + 2, (16 << 20) + 2):
        resident[0] = most + grown
        engine.step()
    assert returned == [most + 1, most + (8 << 20) + 2]
    engine.stats()
    assert returned[2:] == [most + (16 << 20) + 2]


def test_what_is_free_lends_rows_to_windows_that_run_alone() -> None:
    """Of a micro-batch of 2,048 rows as many go through a layer at once as the replay fits for, and as are
    reserved at least."""
    row, most = replayed_bytes(make_engine().base, 1), 2048
    used = reserved = 0

    def largest(memory: int | str, **scheduler: int) -> int:
        nonlocal used, reserved
        config = EngineConfig(calibrate=False, cache_tokens=256, memory=memory, scheduler=scheduler)
        engine = Engine(tiny("llama"), config)
        settings = replace(SETTINGS, batch_size=32, rows=most, keep=SavePolicy.INPUTS)
        engine.finetune([EXAMPLE] * 32, "job", LORA, settings)
        used, reserved = engine.memory.ledger.used, engine.memory.ledger.of("backward")
        rows, run = list[int](), engine.executor.run

        def watched(plan: BasePlan) -> BaseResult:
            rows.extend(segment.length for segment in plan.training if not segment.direction.is_tail)
            return run(plan)

        run_steps_by(engine, watched)
        engine.run()
        return max(rows)

    assert largest("auto", max_training_rows=256) == 256
    assert largest("auto") == most
    least, lent = max(512, reserved // row), used + most * row
    assert least < 1500, "the reservation is not for all of them"
    assert largest(used) == least
    assert largest(used + (1500 - least) * row) in range(1490, 1501)
    assert largest(lent) == most
