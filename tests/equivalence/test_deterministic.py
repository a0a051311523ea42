"""The deterministic mode: the same bits, whatever else the engine did."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import BasePlan, BaseResult, TokenLogprobs, Updated
from coserve.core.sequence import Direction
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning
from coserve.errors import ConfigError, UnsupportedModel
from coserve.executors.local import LocalExecutor
from coserve.train.example import Example
from coserve.train.save_policy import SavePolicy
from models import MIXTURES, prompts, tiny, with_lora
from steps import run_steps_by

WINDOW = 23  # rows of the training windows
DTYPES = (torch.float32, torch.bfloat16)
# Odd widths: the ends of arrays that are not computed as whole vectors differ with the number of rows.
ARCHITECTURES = {"llama": {"intermediate_size": 100}, "gemma2": {}, "gpt2": {}}
ADAPTERS = {"narrow": {"r": 3, "target_modules": ["q_proj", "up_proj"]}, "wide": {"r": 12}}
NAMES = (None, *ADAPTERS)
WAYS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.8},
    {},
    {"temperature": 1.1, "top_p": 0.8, "presence_penalty": 0.5},
    {"frequency_penalty": 0.4, "logit_bias": {5: 0.7}},
    {"temperature": 0.9, "top_k": 11, "min_p": 0.01},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        made[name] = tmp_path_factory.mktemp(name)
        with_lora(tiny("llama", **ARCHITECTURES["llama"]), seed, 0.6, **fields).save_pretrained(
            str(made[name])
        )
    return made


def engine_of(
    architecture: str, dtype: torch.dtype, folders: dict[str, Path] | None = None, **settings: object
) -> Engine:
    scheduler = {
        "training_window": WINDOW,
        "min_training_rows": 1,  # what windows would be cut to, were they cut
        "slowdown": None,
        **settings.pop("scheduler", {}),
    }
    options = {"calibrate": False, "page_size": 4, "cache_tokens": 4096, "scheduler": scheduler, **settings}
    model = tiny(architecture, dtype, **ARCHITECTURES.get(architecture, {}))
    engine = Engine(model, EngineConfig(deterministic=True, **options))
    for name, folder in (folders or {}).items():
        engine.adapters.load(name, folder)
    return engine


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    adapter: str | None
    sampling: SamplingParams


@dataclass(frozen=True)
class Told:
    """All that a caller sees of an answer."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]

    @staticmethod
    def of(answer: Completion) -> "Told":
        return Told(list(answer.tokens), list(answer.logprobs), list(answer.prompt_logprobs))


def crowd(seed: str, count: int, names: Sequence[str | None] = NAMES) -> list[Asked]:
    """Prompts of 1 to 90 tokens; every other answer is drawn, in all ways there are."""
    draws = random.Random(seed)
    lengths = [draws.choice([1, *[draws.randint(2, 90)] * 3]) for _ in range(count)]
    found = []
    for i, prompt in enumerate(prompts(draws, lengths)):
        sampling = SamplingParams(
            max_tokens=draws.randint(2, 20),
            ignore_eos=True,
            seed=i,
            logprobs=3,
            prompt_logprobs=2 if i % 3 == 0 else None,
            **WAYS[i % len(WAYS)],
        )
        found.append(Asked(tuple(prompt), names[i % len(names)], sampling))
    return found


def told_alone(engine: Engine, asked: Sequence[Asked]) -> list[Told]:
    return [Told.of(engine.generate(a.prompt, a.adapter, a.sampling).result()) for a in asked]


def told_together(engine: Engine, asked: Sequence[Asked], steps: int = 0) -> list[Told]:
    """All of them, so many steps apart."""
    answers = []
    for a in asked:
        answers.append(engine.generate(a.prompt, a.adapter, a.sampling))
        for _ in range(steps):
            engine.step()
    return [Told.of(answer.result()) for answer in answers]


def examples(seed: str, count: int) -> list[Example]:
    """Of one row more than a few windows have: a single row's product is another kernel's."""
    draws = random.Random(seed)
    drawn = prompts(draws, [draws.choice([1, 2, 3]) * WINDOW + 1 for _ in range(count)])
    return [Example(tuple(p), (*p[1:], -100)) for p in drawn]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_alone_in_a_crowd_in_other_chunks_and_after_preemption(
    folders: dict[str, Path], dtype: torch.dtype
) -> None:
    """Tokens, log-probabilities and prompt log-probabilities of 11 requests over two adapters and none."""
    asked = crowd("together", 11)
    alone = told_alone(engine_of("llama", dtype, folders), asked)
    assert told_together(engine_of("llama", dtype, folders), asked) == alone
    chunked = engine_of("llama", dtype, folders, scheduler={"max_prefill_rows": 7, "min_prefill_rows": 7})
    assert told_together(chunked, asked, steps=1) == alone
    crowded = engine_of("llama", dtype, folders, cache_tokens=180, page_size=3)
    crowded.finetune(examples("beside", 40), "beside", LoRAConfig(rank=4), TrainingConfig(batch_size=4))
    assert told_together(crowded, asked) == alone
    assert crowded.scheduler.stats.preemptions > 0 and crowded.scheduler.stats.fused_steps > 0


@pytest.mark.sample(1, per="architecture")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["gemma2", "gpt2"])
def test_other_architectures(architecture: str, dtype: torch.dtype) -> None:
    """Soft-capping, sliding windows and tanh; biases and learnt positions."""
    asked = crowd(architecture, 9, names=[None])
    alone = told_alone(engine_of(architecture, dtype), asked)
    chunked = engine_of(architecture, dtype, scheduler={"max_prefill_rows": 29})
    assert told_together(chunked, asked, steps=1) == alone


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_continued_elsewhere(folders: dict[str, Path], dtype: torch.dtype) -> None:
    """Another engine takes an answer over after k tokens, which it computes again as if they were prompt."""
    asked = [a for a in crowd("continued", 9) if a.sampling.max_tokens > 3]
    first, second = (engine_of("llama", dtype, folders) for _ in range(2))
    whole = told_alone(first, asked)
    for known in (1, 2, 3):
        answers = [
            second.generate(a.prompt, a.adapter, a.sampling, continued=told.tokens[:known])
            for a, told in zip(asked, whole, strict=True)
        ]
        for answer, told in zip(answers, whole, strict=True):
            answer.result()
            assert answer.tokens == told.tokens
            assert list(answer.logprobs) == told.logprobs[known:]


def train_quietly(engine: Engine, job: FineTuning) -> None:
    """The job alone, its windows never put down."""
    job.result()


def train_beside_traffic(engine: Engine, job: FineTuning) -> None:
    """Another job trains, answers come and go, and each step leaves training another time, so that windows
    are put down wherever that ends."""
    draws = random.Random("traffic")
    engine.finetune(examples("other", 20), "other", LoRAConfig(rank=5), TrainingConfig(batch_size=3))
    waiting = crowd("traffic", 60, names=[None])
    while job.status == "running":
        if waiting and draws.random() < 0.3:
            a = waiting.pop()
            engine.generate(a.prompt, a.adapter, a.sampling)
        seconds = draws.choice([1e-6, 2e-3, 2e-2, 0.2])
        engine.scheduler.config = replace(
            engine.scheduler.config, quantum=seconds, quantum_with_inference=seconds
        )
        engine.step()


class Watched:
    """An executor that notes the windows of one job."""

    def __init__(self, executor: LocalExecutor, job: str) -> None:
        self.run_plan, self.job = executor.run, job
        self.spans: list[tuple[Direction, int]] = []

    def run(self, plan: BasePlan) -> BaseResult:
        for segment in plan.training:
            if segment.job == self.job:
                self.spans.append((segment.direction, len(segment.span)))
        return self.run_plan(plan)

    def put_downs(self, depth: int) -> int:
        return sum(layers < depth for direction, layers in self.spans if direction is not Direction.LOSS)


def trained(
    train: Callable[[Engine, FineTuning], None], dtype: torch.dtype, training: TrainingConfig
) -> tuple[list[Updated], list[torch.Tensor], int]:
    """Every optimizer step, the weights they led to, and how often a window was put down."""
    engine = engine_of("llama", dtype, scheduler={"quantum": 100.0})
    job = engine.finetune(examples("job", 10), "job", LoRAConfig(rank=5, dropout=0.1), training)
    watched = Watched(engine.executor, job.job)
    run_steps_by(engine, watched.run)
    train(engine, job)
    weights = [p.view(torch.uint8) for p in engine.adapters.weights("job").parameters().values()]
    return job.history, weights, watched.put_downs(engine.base.depth)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "keep"),
    [*((torch.bfloat16, keep) for keep in SavePolicy), (torch.float32, SavePolicy.PRUNED)],
    ids=str,
)
def test_weights_alone_and_beside_traffic(dtype: torch.dtype, keep: SavePolicy) -> None:
    """Several micro-batches a step, examples that windows cut, dropout."""
    training = TrainingConfig(batch_size=5, rows=3 * WINDOW + 1, learning_rate=3e-3, keep=keep, max_steps=2)
    alone, weights, never = trained(train_quietly, dtype, training)
    beside, same, often = trained(train_beside_traffic, dtype, training)
    assert never == 0 and often > 5
    assert beside == alone
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_a_job_that_is_stopped_and_resumed(dtype: torch.dtype) -> None:
    """In another engine, from where it stood after two optimizer steps."""
    training = TrainingConfig(batch_size=3, rows=110, learning_rate=3e-3)
    data, lora = examples("resumed", 12), LoRAConfig(rank=5, dropout=0.1)
    whole = engine_of("llama", dtype)
    history = whole.finetune(data, "job", lora, training).result().history
    first, second = (engine_of("llama", dtype) for _ in range(2))
    job = first.finetune(data, "job", lora, training)
    while len(job.history) < 2:
        first.step()
    for _ in range(3):  # of the third step, whatever got done is done again
        first.step()
    resumed = second.finetune(data, "job", lora, training, resume=job.pause()).result()
    assert [d.grad_norm for d in resumed.history] == [d.grad_norm for d in history[len(job.history) :]]
    weights, same = (engine.adapters.weights("job").parameters() for engine in (whole, second))
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_refused(architecture: str) -> None:
    with pytest.raises(UnsupportedModel, match="expert"):
        engine_of(architecture, torch.float32)


class _LastRowApart(torch.nn.Module):
    """SiLU whose last row differs in its last bits, as with a width of 77 on processors with AVX-512: there
    the last values of the last row are not computed as a vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(x)
        y[..., -1, :] *= 1 + 2**-20
        return y


@pytest.mark.local
def test_rows_that_depend_on_their_place_are_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.act_fn = _LastRowApart()
    with pytest.raises(UnsupportedModel, match="place in the batch"):
        Engine(model, EngineConfig(deterministic=True, calibrate=False))


@pytest.mark.parametrize("scheduler", [{"micro_batches_in_flight": 2}, {"training_window": None}])
def test_settings_that_would_break_it_are_refused(scheduler: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        EngineConfig(deterministic=True, scheduler=scheduler)
