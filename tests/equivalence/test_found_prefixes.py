"""Answers whose prompts were found in the cache are those of an engine that computes all of them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import TokenLogprobs
from coserve.engine.completion import Completion
from coserve.train.example import Example
from models import prompts, tiny, with_lora
from virtual import KINDS, with_virtual

PAGE = 4
# Windows, shared keys, experts, keys of another width than values.
NAMES = ("llama", "mistral", "gemma2", "gpt2", "mixtral", "deepseek_v3")
TOLERANCE = 1e-4  # of log-probabilities down to -20, in float32
Make = Callable[..., Engine]


pytestmark = pytest.mark.usefixtures("guessed_costs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Adapters for a model, by what they are called."""
    made: dict[str, dict[str, Path]] = {}

    def of(name: str) -> dict[str, Path]:
        if name not in made:
            made[name] = {"one": tmp_path_factory.mktemp("one"), "two": tmp_path_factory.mktemp("two")}
            for seed, folder in enumerate(made[name].values()):
                with_lora(tiny(name), seed, 0.6).save_pretrained(str(folder))
            if name == "llama":
                for kind in ("prefix", "prompt"):
                    made[name][kind] = tmp_path_factory.mktemp(kind)
                    with torch.no_grad():
                        with_virtual(tiny(name), kind).save_pretrained(str(made[name][kind]))
        return made[name]

    return of


@pytest.fixture
def make(folders: Callable[[str], dict[str, Path]]) -> Make:
    def engine(name: str, dtype: torch.dtype = torch.float32, **settings: object) -> Engine:
        options = {"calibrate": False, "page_size": PAGE, "cache_tokens": 2048, **settings}
        made = Engine(tiny(name, dtype), EngineConfig(**options))
        for adapter, folder in folders(name).items():
            made.adapters.load(adapter, folder)
        return made

    return engine


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    adapter: str | None
    sampling: SamplingParams


def family(seed: str, count: int, adapters: Sequence[str | None]) -> list[Asked]:
    """Prompts that begin alike, parts of one another, and the same ones again."""
    draws = random.Random(seed)
    texts = prompts(draws, [45, 45, 20])
    texts[1][:24] = texts[0][:24]
    asked: list[Asked] = []
    for number in range(count):
        text = draws.choice(texts)
        prompt = [
            *text[: draws.choice([8, 23, 24, len(text)])],
            *prompts(draws, [draws.choice([0, 0, 1, 6])])[0],
        ]
        how = {"temperature": 0.9, "repetition_penalty": 1.2} if number % 3 == 0 else {}
        scored = 0 if number % 5 == 4 else None
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 14), ignore_eos=True, seed=number, logprobs=0,
            prompt_logprobs=scored, **how,
        )  # fmt: skip
        asked.append(Asked(tuple(prompt), adapters[number % len(adapters)], sampling))
    return asked


def told(engine: Engine, asked: Sequence[Asked], steps: int) -> list[Completion]:
    """All answers, so many steps apart."""
    answers = []
    for one in asked:
        answers.append(engine.generate(one.prompt, one.adapter, one.sampling))
        for _ in range(steps):
            engine.step()
    return [answer.result() for answer in answers]


def scores(rows: Sequence[TokenLogprobs]) -> list[float]:
    return [row.chosen for row in rows]


def check_same(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert scores(one.logprobs) == pytest.approx(scores(other.logprobs), abs=TOLERANCE)
        assert scores(one.prompt_logprobs) == pytest.approx(scores(other.prompt_logprobs), abs=TOLERANCE)


def start_job(engine: Engine) -> None:
    draws = random.Random("job")
    data = [Example(tuple(p), (*p[1:], -100)) for p in prompts(draws, [30] * 40)]
    engine.finetune(data, "trained", LoRAConfig(rank=3), TrainingConfig(batch_size=3, epochs=100))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_an_engine_that_shares_nothing(make: Make, name: str) -> None:
    """Two adapters and none, in chunks, beside training."""
    asked = family(name, 24, [None, "one", None, "two"])
    wanted = told(make(name, prefix_sharing=False), asked, steps=0)
    engine = make(name, scheduler={"max_prefill_rows": 24, "min_prefill_rows": 4})
    start_job(engine)
    check_same(told(engine, asked, steps=1), wanted)
    stats = engine.scheduler.stats
    assert stats.asked_tokens == sum(len(one.prompt) for one in asked)
    assert 0.3 < stats.found_tokens / stats.asked_tokens < 0.9
    check_same(told(engine, asked, steps=0), wanted)
    assert stats.fused_steps > 0


def test_answers_where_pages_are_few(make: Make) -> None:
    """Sequences lose their pages, cached ones are taken by others."""
    asked = family("few", 30, [None, "one"])
    wanted = told(make("mistral", prefix_sharing=False), asked, steps=0)
    engine = make("mistral", cache_tokens=88)
    check_same(told(engine, asked, steps=0), wanted)
    assert engine.scheduler.stats.preemptions > 0 and engine.scheduler.stats.found_tokens > 50


@pytest.mark.parametrize("cache_tokens", [2048, 120])
def test_answers_behind_virtual_tokens(make: Make, cache_tokens: int) -> None:
    """Seven given ones and nine that pass through the model: a page and a rest, two pages and one."""
    asked = family("virtual", 30, [None, "prefix", "prompt", "prefix", "one"])
    wanted = told(make("llama", prefix_sharing=False), asked, steps=0)
    engine = make("llama", cache_tokens=cache_tokens)
    check_same(told(engine, asked, steps=1), wanted)
    assert engine.scheduler.stats.found_tokens > (250 if cache_tokens > 200 else 30)
    assert KINDS["prefix"][1]["num_virtual_tokens"] == 7 and KINDS["prompt"][1]["num_virtual_tokens"] == 9


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_tokens", [2048, 120])
def test_bits_of_the_deterministic_mode(make: Make, dtype: torch.dtype, cache_tokens: int) -> None:
    """A token's keys and values have the same bits whoever computed them, and when."""
    asked = family("bits", 25, [None, "one", "prefix", None, "prompt"])
    settings = {"deterministic": True, "scheduler": {"training_window": 16}}
    wanted = told(make("llama", dtype, prefix_sharing=False, **settings), asked, steps=0)
    engine = make("llama", dtype, cache_tokens=cache_tokens, **settings)
    for one, other in zip(told(engine, asked, steps=1), wanted, strict=True):
        assert one.tokens == other.tokens
        assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)
    assert engine.scheduler.stats.found_tokens > 30


def test_another_adapter_under_an_old_name_finds_nothing(
    make: Make, folders: Callable[[str], dict[str, Path]]
) -> None:
    engine, wanted = make("llama"), make("llama", prefix_sharing=False)
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    (prompt,) = prompts(random.Random("name"), [30])
    engine.generate(prompt, "one", asked).result()
    for changed in (engine, wanted):
        changed.adapters.unload("one")
        changed.adapters.load("one", folders("llama")["two"])
    again = engine.generate(prompt, "one", asked).result()
    assert again.tokens == wanted.generate(prompt, "one", asked).result().tokens
    assert again.sequence.cached == 0 and again.sequence.request.adapter == "one@1"


def test_tenants_find_nothing_of_each_other(make: Make) -> None:
    engine = make("llama")
    asked = SamplingParams(max_tokens=2, ignore_eos=True)
    (prompt,) = prompts(random.Random("tenants"), [30])
    found = [
        engine.generate(prompt, sampling=asked, scope=scope).result().sequence.cached
        for scope in ("a", "b", "a", None, None, "", "")
    ]
    assert found == [0, 0, 28, 0, 0, 0, 28]


def test_training_neither_finds_nor_leaves_anything(make: Make) -> None:
    """On a text that lies in the cache, a job's losses and gradients are those of an engine without one."""
    data = [Example(tuple(p), (*p[1:], -100)) for p in prompts(random.Random("text"), [32] * 6)]
    training = TrainingConfig(batch_size=3, epochs=2, learning_rate=1e-2)
    histories = []
    for sharing in (True, False):
        engine = make("llama", prefix_sharing=sharing)
        sampling = SamplingParams(max_tokens=1)
        for one in data:
            engine.generate(one.tokens, sampling=sampling).result()
        free = engine.stats().free_pages
        job = engine.finetune(data, "job", LoRAConfig(rank=3), training)
        while job.status == "running":
            engine.step()
            assert engine.stats().free_pages == free == engine.config.pages
        histories.append([(step.loss, step.grad_norm) for step in job.history])
        assert [engine.generate(d.tokens, "job", sampling).result().sequence.cached for d in data] == [0] * 6
        assert [engine.generate(d.tokens, None, sampling).result().sequence.cached for d in data] == [
            31 * sharing
        ] * 6
    assert histories[0] == histories[1] and len(histories[0]) == 4
