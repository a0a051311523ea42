"""Bases of several widths in one engine: each computes what it computes in an engine of its own."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import make_examples
from transformers import PreTrainedModel

from bases import SMALL, WIDE, bases_with, check_scored, planned, wide_model
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning
from coserve.errors import EngineLost, WeightsUnreadable
from coserve.executors.remote import RemoteExecutor
from coserve.streamed.model_files import saved_bytes
from forked_executors import fork_executors
from models import Exact, logits_of, prompts, save, tiny

pytestmark = pytest.mark.local
CUTS = {
    "max_training_rows": 48, "min_training_rows": 8, "max_prefill_rows": 16, "min_prefill_rows": 4,
    "slowdown": None,  # however fast or slow this machine is, jobs get on beside the few tokens of a step
}  # fmt: skip
TRAINING = TrainingConfig(learning_rate=3e-3, batch_size=2, epochs=9, max_steps=2, rows=64, seed=3)
METHODS: dict[str, Any] = {"lora": LoRAConfig(rank=4), "prompt": PromptTuningConfig(tokens=11)}


def config() -> EngineConfig:
    settings = {"cache_tokens": 1024, "page_size": 8, "scheduler": CUTS}
    return EngineConfig(calibrate=False, executor="local", **settings)  # type: ignore[arg-type]


def train(engine: Engine, base: str) -> dict[str, FineTuning]:
    """A job of each method on a base, with names of its own."""
    data = make_examples(base, 8)
    return {
        name: engine.finetune(data, f"{name} on {base}", method, TRAINING, job=f"{base}/{name}")
        for name, method in METHODS.items()
    }


def parameters(engine: Engine, jobs: dict[str, FineTuning]) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{place}": tensor.detach().double()
        for name, job in jobs.items()
        for place, tensor in engine.adapters.weights(job.adapter).parameters().items()
    }


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest difference of a number, and of a parameter in its norm, relative to that."""
    assert found.keys() == wanted.keys() and found
    apart = {name: found[name] - wanted[name] for name in wanted}
    relative = max(float(each.norm() / wanted[name].norm()) for name, each in apart.items())
    return max(float(each.abs().max()) for each in apart.values()), relative


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance", "relative"),
    [("llama", torch.float32, 1e-5, 1e-4), ("gpt2", torch.float64, 1e-10, 1e-10)],
)
def test_answers_and_training_of_both_in_the_same_steps(
    kind: str, dtype: torch.dtype, tolerance: float, relative: float
) -> None:
    """In float32 AdamW's division magnifies rounding of small parameters, so these are bounded in full."""
    draws = random.Random(f"widths/{kind}")
    make = {SMALL: lambda: tiny("llama", dtype), WIDE: lambda: wide_model(kind, dtype)}
    with Exact() if dtype == torch.float64 else nullcontext():
        engine = Engine(make[SMALL](), config())
        engines = {SMALL: engine, WIDE: engine.add_base(WIDE, make[WIDE]())}
        with planned(engine) as plans:
            jobs = {base: train(one, base) for base, one in engines.items()}
            answers: list[tuple[str, list[int], Completion]] = []
            sampling = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=5)
            while any(job.is_under_way for each in jobs.values() for job in each.values()):
                if len(engine.completions) < 4:
                    (prompt,), base = prompts(draws, [draws.randint(2, 40)]), draws.choice((SMALL, WIDE))
                    adapter = draws.choice([None, *(job.adapter for job in jobs[base].values())])
                    handle = engines[base].generate(prompt, adapter, sampling)
                    if adapter is None:
                        answers.append((base, prompt, handle))
                draws.choice((engine, engines[WIDE])).step()  # whichever steps, all go on
            engine.run()
        for base, one in engines.items():
            alone = Engine(make[base](), config())
            own = train(alone, base)
            alone.run()
            number, norm = worst(parameters(one, jobs[base]), parameters(alone, own))
            assert number < tolerance and norm < relative, base
        models = {base: made() for base, made in make.items()}
        assert {base for base, _, _ in answers} == {SMALL, WIDE}
        for base, prompt, answer in answers:
            check(models[base], prompt, answer, tolerance)
    answering = [bases_with([plan], lambda part: part.inference) for plan in plans]
    training = [bases_with([plan], lambda part: part.training) for plan in plans]
    answered = [bases for bases in answering if len(bases) == 2]
    trained = [bases for bases in training if len(bases) == 2]
    crossed = [both for both in zip(answering, training, strict=True) if both[0] ^ both[1]]
    assert answered and trained and crossed, "steps with rows of both, answers beside the other's training"


def check(model: PreTrainedModel, prompt: list[int], answer: Completion, tolerance: float) -> None:
    """Log-probabilities of the prompt and chosen tokens are the model's own."""
    check_scored(logits_of(model, [*prompt, *answer.tokens[:-1]]), prompt, answer, tolerance)


def test_prefixes_are_shared_within_a_base_alone() -> None:
    """The same tokens in both: each finds its own pages, and answers as it does without any."""
    engine = Engine(tiny("llama"), config())
    engines = {SMALL: engine, WIDE: engine.add_base(WIDE, wide_model())}
    prompt, sampling = list(range(1, 41)), SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    first = {base: one.generate(prompt, sampling=sampling).result() for base, one in engines.items()}
    found = engine.stats().found_tokens
    for base, one in engines.items():
        again = one.generate(prompt, sampling=sampling).result()
        assert again.tokens == first[base].tokens
        for new, old in zip(again.logprobs, first[base].logprobs, strict=True):
            assert new.chosen == pytest.approx(old.chosen, abs=1e-5)
        assert engine.stats().found_tokens - found == 39
        found = engine.stats().found_tokens
    assert first[SMALL].tokens != first[WIDE].tokens


@pytest.mark.usefixtures("guessed_costs")
def test_both_have_the_second_tier() -> None:
    """Sequences of both are preempted, move there and back, or lie there as a whole."""
    few = replace(config(), page_size=4, cache_tokens=72, max_running=12, swap_space="16MiB")
    draws = random.Random("second tier")
    with Exact():
        make = {SMALL: lambda: tiny("llama", torch.float64), WIDE: lambda: wide_model("llama", torch.float64)}
        engine = Engine(make[SMALL](), few)
        engines = {SMALL: engine, WIDE: engine.add_base(WIDE, make[WIDE]())}
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, prompt_logprobs=2)
        with planned(engine) as plans:
            answers = [
                (base, prompt, engines[base].generate(prompt, None, sampling))
                for base in engines
                for prompt in prompts(draws, [96, *[draws.randint(12, 24) for _ in range(5)]])
            ]
            engine.run()
        models = {base: made() for base, made in make.items()}
        for base, prompt, answer in answers:
            check(models[base], prompt, answer, 1e-10)
    for pick in (
        lambda part: part.swap_out,
        lambda part: part.swap_in,
        lambda part: [segment for segment in part.inference if segment.offloaded],
    ):
        assert bases_with(plans, pick) == {SMALL, WIDE}
    stats, caches = engine.stats(), engine.scheduler.caches
    assert stats.swapped_in_pages and not stats.swap_failures and stats.offloaded_read_bytes
    unneeded = sum(len(caches[base].swapping.copies.evictable) for base in caches)
    held = engine.scheduler.tier.used
    assert (held > 0) is (unneeded > 0) and stats.free_pages == stats.pages and not stats.offloaded_pages_used
    copies = [len(one.executor.worker._swap_space.store._entries) for one in engines.values()]  # type: ignore[attr-defined]
    assert sum(copies) == unneeded


def test_each_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an executor that plans ahead, and has a plan under way when another base joins."""
    fork_executors(monkeypatch)
    models = {SMALL: tiny("llama"), WIDE: wide_model()}
    engine = Engine(models[SMALL], replace(config(), executor="remote"))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    draws = random.Random("processes")
    answers = [(SMALL, prompt, engine.generate(prompt, None, sampling)) for prompt in prompts(draws, [9])]
    while not answers[0][2].tokens:
        engine.step()
    assert engine.scheduler.under_way
    engines = {SMALL: engine, WIDE: engine.add_base(WIDE, models[WIDE])}
    with planned(engine) as plans:
        jobs = train(engines[WIDE], WIDE)
        for base, prompt in zip((SMALL, WIDE) * 2, prompts(draws, [5, 30, 17, 8]), strict=True):
            answers.append((base, prompt, engines[base].generate(prompt, None, sampling)))
        engine.run()
    assert any(len(bases_with([plan], lambda part: part.inference)) == 2 for plan in plans)
    for base, prompt, answer in answers:
        check(models[base], prompt, answer, 1e-5)
    alone = Engine(wide_model(), config())
    own = train(alone, WIDE)
    alone.run()
    number, norm = worst(parameters(engines[WIDE], jobs), parameters(alone, own))
    assert number < 1e-5 and norm < 1e-4
    executors = [one.executor for one in engines.values()]
    assert all(isinstance(executor, RemoteExecutor) for executor in executors)
    executors[1].process.kill()  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="process has ended"):
        engines[WIDE].generate([1, 2, 3], None, sampling).result()
    for executor in executors:
        executor.close()  # type: ignore[attr-defined]


def test_both_streamed(tmp_path: Path) -> None:
    """Neither fits into its memory; files of one go away for a while, and nothing is lost."""
    fields = {SMALL: {"seed": 0, "hidden_size": 64}, WIDE: {"seed": 3, "hidden_size": 80}}
    models = {base: tiny("llama", num_hidden_layers=8, **fields[base]) for base in fields}
    folders = {base: save(model, tmp_path / base) for base, model in models.items()}
    room = int(0.6 * saved_bytes(folders[SMALL], "none"))
    engine = Engine(folders[SMALL], replace(config(), base_memory=room))
    engines = {SMALL: engine, WIDE: engine.add_base(WIDE, folders[WIDE])}
    reads = {base: one.streaming.plan.read_nbytes for base, one in engines.items() if one.streaming}
    assert all(reads.values()) and [*reads] == [SMALL, WIDE]
    sampling, draws = (
        SamplingParams(max_tokens=10, ignore_eos=True, prompt_logprobs=1),
        random.Random("streamed"),
    )
    jobs = {base: train(one, base) for base, one in engines.items()}
    answers = [
        (base, prompt, engines[base].generate(prompt, None, sampling))
        for base, prompt in zip((SMALL, WIDE) * 2, prompts(draws, [5, 30, 17, 8]), strict=True)
    ]
    extra = engines[WIDE].finetune(make_examples("extra", 8), "extra", METHODS["lora"], TRAINING)
    engine.step()
    file = folders[SMALL] / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"")
    for turn in range(3):
        with pytest.raises(WeightsUnreadable, match=SMALL):
            for _ in range(20):
                engine.step()
        if not turn:
            extra.cancel()  # behind the other base's part of the step that waits
    file.write_bytes(content)
    engine.run()
    for base, prompt, answer in answers:
        check(models[base], prompt, answer, 1e-5)
    for base, model in models.items():
        alone = Engine(model, config())
        own = train(alone, base)
        alone.run()
        number, norm = worst(parameters(engines[base], jobs[base]), parameters(alone, own))
        assert number < 1e-5 and norm < 1e-4, base


def test_one_that_does_not_fit_beside_others_is_streamed(tmp_path: Path) -> None:
    """As an engine's only base is, which does not fit into its memory."""
    model = tiny("llama", seed=3, hidden_size=256, num_hidden_layers=8)
    folder = save(model, tmp_path / WIDE)
    engine = Engine(tiny("llama"), replace(config(), memory="1GiB", cache_tokens=64, swap_space=0))
    engine.memory.ledger.budget = engine.memory.ledger.used + saved_bytes(folder, "none") - 1
    wide = engine.add_base(WIDE, folder)
    assert wide.streaming is not None and wide.streaming.plan.read_nbytes and engine.streaming is None
    assert engine.memory.ledger.used <= engine.memory.ledger.budget
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=1)
    for base, prompt, one in ((model, [5, 6, 7], wide), (tiny("llama"), [8, 9], engine)):
        check(base, prompt, one.generate(prompt, None, sampling).result(), 1e-5)
