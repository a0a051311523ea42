"""Served answers against transformers' `generate` and PEFT, one request at a time; float32."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.files import read_adapter
from coserve.errors import RequestError
from coserve.train.example import Example
from models import VOCABULARY, greedy, logits_of, prompts, tiny, with_lora

ADAPTERS: dict[str, dict[str, object]] = {
    "all": {"r": 4, "lora_alpha": 6},
    "narrow": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 16, "lora_alpha": 16, "target_modules": ["o_proj", "down_proj", "k_proj"]},
    "root": {"r": 7, "lora_alpha": 3, "use_rslora": True, "target_modules": ["gate_proj", "up_proj"]},
}
NAMES = (None, *ADAPTERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        made[name] = tmp_path_factory.mktemp(name)
        with_lora(tiny("mistral"), seed=seed, strength=0.6, **fields).save_pretrained(str(made[name]))
    return made


@cache
def oracle(adapter: str | None) -> object:
    model = tiny("mistral")
    return (
        model
        if adapter is None
        else with_lora(model, list(ADAPTERS).index(adapter), 0.6, **ADAPTERS[adapter])
    )


def engine_with(folders: dict[str, Path], **settings: object) -> Engine:
    scheduler = {
        "max_prefill_rows": 24,
        "min_prefill_rows": 4,
        "max_training_rows": 32,
        "min_training_rows": 4,
        "slowdown": None,  # so that jobs get somewhere while the few tokens of a test are answered
    }
    options = {"calibrate": False, "page_size": 4, "cache_tokens": 4096, "scheduler": scheduler, **settings}
    engine = Engine(tiny("mistral"), EngineConfig(**options))
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    return engine


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    adapter: str | None
    tokens: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, ignore_eos=True)


@cache
def wanted(asked: Asked) -> list[int]:
    return greedy(oracle(asked.adapter), asked.prompt, asked.tokens)


def requests(seed: str, count: int, longest: int = 60, most: int = 18) -> list[Asked]:
    """Lengths from 1 up (the sliding window has 20), adapters in turn."""
    draws = random.Random(seed)
    lengths = [draws.choice([1, 2, draws.randint(3, longest)]) for _ in range(count)]
    return [
        Asked(tuple(prompt), NAMES[i % len(NAMES)], draws.randint(2, most))
        for i, prompt in enumerate(prompts(draws, lengths))
    ]


def start_jobs(engine: Engine, seed: str) -> None:
    draws = random.Random(seed)
    for name, rank in (("one", 4), ("two", 9)):
        data = [
            Example(tuple(p), (*p[1:], -100))
            for p in prompts(draws, [draws.randint(2, 70) for _ in range(64)])
        ]
        training = TrainingConfig(batch_size=4, epochs=1000, learning_rate=1e-3)
        engine.finetune(data, name, LoRAConfig(rank=rank), training)


def test_crowd_over_four_adapters_while_two_jobs_train(folders: dict[str, Path]) -> None:
    """32 requests that arrive over time; every token is that of `generate`."""
    engine = engine_with(folders)
    start_jobs(engine, "crowd")
    asked = requests("crowd", 32)
    answers = []
    for request in asked:
        answers.append(engine.generate(request.prompt, request.adapter, request.sampling))
        engine.step()
    for answer in answers:
        answer.result()
    assert [answer.tokens for answer in answers] == [wanted(request) for request in asked]
    stats = engine.scheduler.stats
    assert stats.fused_steps > 10 and stats.kept_rows > 0 and stats.backward_rows > 0
    assert all(job.status == "running" for job in engine.jobs.values())


def test_preemption_changes_no_token(folders: dict[str, Path]) -> None:
    """20 pages of 4 tokens, ten requests of up to 50: sequences lose their pages and are computed again."""
    engine = engine_with(folders, cache_tokens=80)
    start_jobs(engine, "preempt")
    asked = requests("preempt", 10, longest=30, most=20)
    answers = [engine.generate(request.prompt, request.adapter, request.sampling) for request in asked]
    for answer in answers:
        answer.result()
    assert [answer.tokens for answer in answers] == [wanted(request) for request in asked]
    assert engine.scheduler.stats.preemptions > 0


def test_seeded_draws_are_the_same_alone_and_in_a_crowd(folders: dict[str, Path]) -> None:
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ]
    asked = requests("seeded", 12)
    sampling = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=100 + i, **settings[i % 4])
        for i in range(len(asked))
    ]
    alone = []
    quiet = engine_with(folders)
    for request, params in zip(asked, sampling, strict=True):
        alone.append(quiet.generate(request.prompt, request.adapter, params).result().tokens)
    busy = engine_with(folders, cache_tokens=200)
    start_jobs(busy, "seeded")
    crowd = [
        busy.generate(request.prompt, request.adapter, params)
        for request, params in zip(asked, sampling, strict=True)
    ]
    assert [answer.result().tokens for answer in crowd] == alone
    # Drawn, not the likeliest; and another seed draws otherwise.
    assert sum(tokens[:2] != wanted(request)[:2] for tokens, request in zip(alone, asked, strict=True)) > 3
    other = SamplingParams(max_tokens=12, ignore_eos=True, seed=7, temperature=1.0)
    assert quiet.generate(asked[0].prompt, asked[0].adapter, other).result().tokens != alone[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_adapter_harms_only_its_own_requests(folders: dict[str, Path], value: float) -> None:
    """Neither its neighbours in the batch nor those who get its pages afterwards; few pages, so many do. No
    file with such weights is read: training can still end there."""
    engine = engine_with(folders, cache_tokens=240)
    good = read_adapter(folders["all"], "broken", engine.base, engine.base.dtype, engine.base.device)
    spoilt = {name: torch.full_like(tensor, value) for name, tensor in good.parameters().items()}
    engine.adapters.add(good.with_parameters(spoilt))
    asked = requests("broken", 30, longest=25)
    answers, bad = [], []
    for i, request in enumerate(asked):
        if i % 2 == 0 and i < 20:
            bad.append(engine.generate(request.prompt, "broken", request.sampling))
        answers.append(engine.generate(request.prompt, request.adapter, request.sampling))
        engine.step()
    engine.run()
    assert [answer.tokens for answer in answers] == [wanted(request) for request in asked]
    for answer in bad:
        with pytest.raises(RequestError, match="numbers that are not finite"):
            answer.result()


def test_logprobs_are_those_of_the_model(folders: dict[str, Path]) -> None:
    """Of prompts cut into chunks of 5 rows and of answers; chosen and best five, within 1e-4 of float32
    log-probabilities down to -20 (a few last bits of the logits behind them)."""
    scheduler = {"max_prefill_rows": 5, "min_prefill_rows": 5}
    engine = engine_with(folders, scheduler=scheduler)
    asked = [Asked(r.prompt, r.adapter, r.tokens) for r in requests("logprobs", 10, longest=45)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    answers = [engine.generate(request.prompt, request.adapter, params) for request in asked]
    engine.run()
    for request, answer in zip(asked, answers, strict=True):
        tokens = [*request.prompt, *answer.tokens]
        logprobs = logits_of(oracle(request.adapter), tokens).log_softmax(-1)
        scored = [*answer.prompt_logprobs, *answer.logprobs]
        assert len(answer.prompt_logprobs) == len(request.prompt) - 1
        assert len(scored) == len(tokens) - 1
        for row, of_row in enumerate(scored):
            assert of_row.chosen == pytest.approx(float(logprobs[row, tokens[row + 1]]), abs=1e-4)
            best = logprobs[row].topk(5)
            assert [value for _, value in of_row.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            for token, value in of_row.top:
                assert value == pytest.approx(float(logprobs[row, token]), abs=1e-4)


def test_prompt_logprobs_are_reported_once_despite_preemption(folders: dict[str, Path]) -> None:
    engine = engine_with(folders, cache_tokens=60, scheduler={"max_prefill_rows": 6, "min_prefill_rows": 6})
    asked = requests("once", 8, longest=25, most=20)
    params = [SamplingParams(max_tokens=r.tokens, ignore_eos=True, prompt_logprobs=0) for r in asked]
    answers = [engine.generate(r.prompt, r.adapter, p) for r, p in zip(asked, params, strict=True)]
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    for request, answer in zip(asked, answers, strict=True):
        logprobs = logits_of(oracle(request.adapter), request.prompt).log_softmax(-1)
        values = [float(logprobs[row, token]) for row, token in enumerate(request.prompt[1:])]
        assert [p.chosen for p in answer.prompt_logprobs] == pytest.approx(values, abs=1e-4)
        assert answer.tokens == wanted(request)


def test_answers_stay_on_the_version_they_began_with(folders: dict[str, Path]) -> None:
    """Training publishes while an answer is under way; the answer is that of its first version alone."""
    engine = engine_with({})
    draws = random.Random("versions")
    data = [Example(tuple(p), (*p[1:], -100)) for p in prompts(draws, [20] * 40)]
    training = TrainingConfig(batch_size=2, learning_rate=0.1, warmup_ratio=0.0, schedule="constant")
    job = engine.finetune(data, "moving", LoRAConfig(rank=4), training)
    while len(job.history) < 3:
        engine.step()
    (prompt,) = prompts(draws, [12])
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.adapters.save("moving", folder := folders["all"].parent / "moving")
    answer = engine.generate(prompt, "moving", params)
    started = answer.sequence.request.adapter
    answer.result()
    assert job.history[-1].version != started, "the adapter moved on meanwhile"
    frozen = engine_with({"moving": folder})
    assert answer.tokens == frozen.generate(prompt, "moving", params).result().tokens
    assert answer.tokens != engine.generate(prompt, "moving", params).result().tokens


def test_vocabulary_is_covered() -> None:
    """The prompts above draw from all of it but the end token."""
    assert {t for r in requests("crowd", 32) for t in r.prompt} == set(range(1, VOCABULARY))
