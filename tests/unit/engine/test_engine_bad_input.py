"""Bad input: one clear error each, nothing queued, and the engine goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coserve import SLO, Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.errors import (
    AdapterError,
    AdapterMismatch,
    AdapterNotFound,
    ConfigError,
    CoserveError,
    DataError,
    EmptyPrompt,
    JobError,
    OutOfPages,
    PromptTooLong,
)
from coserve.executors.executor import ReadMemory
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import greedy, letter_tokenizer, tiny, with_lora

DATA = [Example((1, 2, 3), (2, 3, -100))] * 4


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        tiny("llama"),
        EngineConfig(calibrate=False, cache_tokens=128, swap_space="0"),
        tokenizer=letter_tokenizer(),
    )


@pytest.fixture(autouse=True)
def goes_on(engine: Engine) -> object:
    """After every test the engine has nothing left over and answers as before."""
    yield
    assert not engine.completions
    engine.run()  # what ended last is released in a step of its own
    assert not engine.scheduler.has_work
    answer = engine.generate([5, 6, 7], sampling=SamplingParams(max_tokens=4, ignore_eos=True)).result()
    assert answer.tokens == greedy(tiny("llama"), [5, 6, 7], 4)


def refusal(kind: type[CoserveError], act: Callable[[], object]) -> str:
    with pytest.raises(CoserveError) as error:
        act()
    assert type(error.value) is kind
    sentence = str(error.value)
    assert len(sentence) > 10 and "\n" not in sentence
    return sentence


def test_empty_prompt(engine: Engine) -> None:
    assert "at least one token" in refusal(EmptyPrompt, lambda: engine.generate([]))
    assert "at least one token" in refusal(EmptyPrompt, lambda: engine.generate(""))


def test_more_than_the_model_has_positions(engine: Engine) -> None:
    params = SamplingParams(max_tokens=100)
    sentence = refusal(PromptTooLong, lambda: engine.generate([1] * 200, sampling=params))
    assert "200" in sentence and "300" in sentence and "256" in sentence


def test_more_tokens_than_all_pages_hold(engine: Engine) -> None:
    params = SamplingParams(max_tokens=50)
    sentence = refusal(OutOfPages, lambda: engine.generate([1] * 100, sampling=params))
    assert "149" in sentence and "8" in sentence and "engine.swap_space" in sentence


def test_unknown_adapter(engine: Engine) -> None:
    assert "'nobody'" in refusal(AdapterNotFound, lambda: engine.generate([1], adapter="nobody"))
    assert "'nobody'" in refusal(AdapterNotFound, lambda: engine.adapters.unload("nobody"))
    start = lambda: engine.finetune(DATA, "new", start_from="nobody")  # noqa: E731
    assert "'nobody'" in refusal(AdapterNotFound, start)


def test_adapter_for_another_base(engine: Engine, tmp_path: Path) -> None:
    with_lora(tiny("llama", hidden_size=32), 0, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    sentence = refusal(AdapterMismatch, lambda: engine.adapters.load("other", tmp_path))
    assert "64 -> 64" in sentence and "(4, 32)" in sentence
    assert engine.adapters.bank.names == []


def test_rank_zero_and_unknown_targets(engine: Engine) -> None:
    assert "rank" in refusal(AdapterError, lambda: engine.finetune(DATA, "new", LoRAConfig(rank=0)))
    refused = lambda: engine.finetune(DATA, "new", LoRAConfig(targets=("no_such",)))  # noqa: E731
    assert "no_such" in refusal(AdapterMismatch, refused)


def test_a_name_that_looks_like_a_version(engine: Engine) -> None:
    assert "a@1" in refusal(AdapterError, lambda: engine.finetune(DATA, "a@1"))


def test_an_adapter_in_training_is_left_alone(engine: Engine, tmp_path: Path) -> None:
    with_lora(tiny("llama"), 0).save_pretrained(str(tmp_path))
    job = engine.finetune(DATA, "busy", LoRAConfig(rank=2))
    assert job.job in refusal(JobError, lambda: engine.finetune(DATA, "busy"))
    assert job.job in refusal(JobError, lambda: engine.adapters.unload("busy"))
    assert job.job in refusal(JobError, lambda: engine.adapters.load("busy", tmp_path))
    assert job.result().status == "succeeded"
    engine.adapters.unload("busy")


def test_malformed_data(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    good = '{"prompt": "a", "completion": "b"}\n'
    for line, said in (
        ("{oops", "line 3"),
        ('{"prompt": "a"}', '"prompt" and "completion"'),
        ("3", "a number"),
    ):
        file.write_text(good * 2 + line + "\n" + good)
        sentence = refusal(DataError, lambda: engine.finetune(file, "new"))
        assert "data.jsonl" in sentence and "line 3" in sentence and said in sentence
    file.write_text("\n")
    assert "data.jsonl" in refusal(DataError, lambda: engine.finetune(file, "new"))
    assert "none.jsonl" in refusal(DataError, lambda: engine.finetune(tmp_path / "none.jsonl", "new"))
    refusal(DataError, lambda: engine.finetune([], "new"))
    assert engine.adapters.bank.names == []


def test_settings_that_name_nothing() -> None:
    refusal(ConfigError, lambda: EngineConfig(cache_tokens=0))
    refusal(ConfigError, lambda: EngineConfig(dtype="int8"))
    refusal(ConfigError, lambda: SamplingParams(max_tokens=0))
    refusal(ConfigError, lambda: SLO(first_token=-1.0))
    for settings in ({"policy": "nobody's"}, {"scheduler": {"nonsense": 1}}, {"scheduler": {"quantum": 0.0}}):
        refusal(ConfigError, lambda s=settings: Engine(tiny("llama"), EngineConfig(calibrate=False, **s)))


def test_a_wrong_policy_is_found_out_before_a_model_is_looked_for(tmp_path: Path) -> None:
    for settings, said in (
        ({"policy": "nobody's"}, "there is no policy"),
        ({"policy": "temporal:5", "policy_options": {"n": 5}}, "n twice"),
        ({"policy": "isolated"}, "one server for answers"),
    ):
        sentence = refusal(ConfigError, lambda s=settings: Engine(tmp_path / "no-model", EngineConfig(**s)))
        assert said in sentence


def test_an_unknown_schedule_is_refused_before_anything_is_made() -> None:
    assert "schedule" in refusal(ConfigError, lambda: TrainingConfig(schedule="sideways"))


@pytest.mark.parametrize("name", ["", "a@1"])
def test_a_name_that_cannot_be_leaves_nothing_on_the_device(engine: Engine, name: str) -> None:
    sketch = fresh_adapter(engine.base, name, LoRAConfig(rank=2), 0)
    assert "name" in refusal(AdapterError, lambda: engine.adapters.add(sketch))
    assert "name" in refusal(AdapterError, lambda: engine.finetune(DATA, name))
    held = engine.executor.call(ReadMemory())
    assert not held.adapters and not held.sessions and not engine.jobs


def test_text_without_a_tokenizer() -> None:
    bare = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=128))
    assert "tokenizer" in refusal(ConfigError, lambda: bare.generate("text"))
    assert "tokenizer" in refusal(ConfigError, lambda: bare.finetune([{"text": "abc"}], "new"))
    stop = SamplingParams(stop=("x",))
    assert "tokenizer" in refusal(ConfigError, lambda: bare.generate([1], sampling=stop))
    assert not bare.completions and not bare.scheduler.has_work


def test_a_bias_on_a_token_that_is_none(engine: Engine) -> None:
    params = SamplingParams(logit_bias={96: 1.0})
    assert "96" in refusal(ConfigError, lambda: engine.generate([1], sampling=params))


@pytest.mark.parametrize("token", [96, -1])
def test_a_prompt_token_that_is_none(engine: Engine, token: int) -> None:
    """Refused when it is asked, not when a step looks it up: that would stop everybody."""
    with pytest.raises(CoserveError, match=str(token)):
        engine.generate([1, token, 2], sampling=SamplingParams(max_tokens=2))
