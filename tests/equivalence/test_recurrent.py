"""Models with recurrent layers: answers and gradients are transformers' and PEFT's own.

Rows of several sequences share each pass: prompts in chunks, decode rows, adapters beside each other. The
oracle runs each sequence alone, as a whole, and without a cache.
"""

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from adapters import lora_adapter
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.sites import Kind
from coserve.core.plan import TokenLogprobs
from coserve.engine import base_memory
from coserve.errors import AdapterMismatch, CoserveError, UnsupportedModel
from coserve.kernels.native import recurrent
from coserve.kernels.native.build import library
from coserve.schedule import kept_states
from coserve.train import states
from coserve.train.example import Example
from models import Exact, logits_of, lora_parameters, prompts, save, with_lora
from passages import LORA, Case, Passage, examples, mean_loss, worst
from recurrent import SHAPES, build, with_adapter

ANSWER = 6
LENGTHS = (9, 30, 4, 1, 23, 30)
NEAR = 1e-5


def engine_of(name: str, dtype: torch.dtype = torch.float32, **fields: object) -> Engine:
    settings = {"cache_tokens": 512, "page_size": 4, "scheduler": {"max_prefill_rows": 16}, **fields}
    return Engine(build(name, dtype), EngineConfig(calibrate=False, **settings))  # type: ignore[arg-type]


@cache
def targets(name: str) -> list[str]:
    """The linears of a model's layers that an adapter may stand at."""
    base = engine_of(name).base
    return [p for p, s in base.sites.items() if s.kind is Kind.LINEAR and 0 <= s.stage < base.depth]


class Answered(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]


def expect_own(answer: object, prompt: list[int], oracle: torch.nn.Module, near: float = NEAR) -> None:
    """Each token is the oracle's likeliest, with its log-probability."""
    tokens, logprobs = answer.tokens, answer.logprobs  # type: ignore[attr-defined]
    rows = logits_of(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
    assert tokens == rows.argmax(-1).tolist()
    found = torch.tensor([each.chosen for each in logprobs], dtype=rows.dtype)
    wanted = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert float((found - wanted).abs().max()) < near


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_answers_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Two adapters and the base beside each other; later prompts arrive while others decode. In float64, of
    which `Exact` keeps all.

    Nemotron H's code for one row lacks the least time step that its code for several has (`time_step_min`),
    so its own answers with a cache are 5e-6 away from its forward of whole sequences, too.
    """
    with Exact():
        expect_own_answers(name, torch.float64, NEAR if name == "nemotron_h" else 1e-9, tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "lfm2", "mamba2"]
)
def test_mixed_answers_in_float32(name: str, tmp_path: Path) -> None:
    """Nothing is kept in float64: as models are served."""
    expect_own_answers(name, torch.float32, NEAR, tmp_path)


def expect_own_answers(name: str, dtype: torch.dtype, near: float, tmp_path: Path) -> None:
    served = engine_of(name, dtype)
    oracles: list[torch.nn.Module] = [build(name, dtype)]
    for seed in (1, 2):
        adapted = with_adapter(name, targets(name), dtype, seed)
        adapted.save_pretrained(str(tmp_path / str(seed)))
        served.adapters.load(str(seed), tmp_path / str(seed))
        oracles.append(adapted)
    asked = prompts(random.Random(name), LENGTHS)
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    given = []
    for number, prompt in enumerate(asked):
        kind = number % 3
        given.append(served.generate(prompt, adapter=str(kind) if kind else None, sampling=sampling))
        served.step()
    held = served.stats().holdings
    assert (
        held.states == served.config.max_running > held.states_used == len(served.scheduler.requests.running)
    )
    assert held.kept_states >= held.kept_states_used
    served.run()
    for number, (prompt, answer) in enumerate(zip(asked, given, strict=True)):
        expect_own(answer.result(), prompt, oracles[number % 3], near)


def case_of(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> Case:
    """Random examples, an adapter at all linears, and PEFT's gradients, each example alone."""
    tokens, labels = examples(random.Random(f"gradients/{name}"), lengths)
    adapted = with_adapter(name, targets(name), dtype)
    parameters = lora_parameters(adapted)
    loss = mean_loss(adapted, tokens, labels)
    leaves = [p.requires_grad_() for pair in parameters.values() for p in pair]
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    bypasses = {
        path: LoRABypass(a.detach().clone(), b.detach().clone(), LORA.at([path]).scale(path, LORA.rank))
        for path, (a, b) in parameters.items()
    }
    wanted = {}
    for path, pair in parameters.items():
        for letter, leaf in zip("AB", pair, strict=True):
            gradient = next(found)
            wanted[f"{path}.lora_{letter}"] = torch.zeros_like(leaf) if gradient is None else gradient
    flat = (torch.tensor(list(itertools.chain(*of))) for of in (tokens, labels))
    return Case(
        engine_of(name, dtype),
        lengths,
        *flat,
        lora_adapter("probe", 0, LORA, bypasses),
        float(loss.detach()),
        wanted,
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_in_windows_are_pefts(name: str) -> None:
    """Examples are packed and cut by windows, also into windows of one row, and put down between layers: to
    1e-8 in float64, whatever is kept."""
    with Exact():
        case = case_of(name, (9, 20, 4), torch.float64)
        passage = Passage(case, random.choice([SavePolicy.PRUNED, SavePolicy.EVERYTHING]))
        assert passage.state.store.saved.fates.nbytes > 0
        passage.travel(8, 8, random.Random(name))
        ended = passage.finish()
    assert abs(ended - case.loss) < 1e-8 * case.loss
    assert worst(passage.gradients, case.wanted, floor=0.01) < 1e-8


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_windows_back_begin_at_any_state_that_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward in windows of 16 rows and back in windows of 24, with states behind every 8 rows."""
    monkeypatch.setattr(states, "STATE_ROWS", 8)
    with Exact():
        case = case_of(name, (9, 45, 4), torch.float64)
        passage = Passage(case, SavePolicy.PRUNED)
        passage.travel(16, 24, random.Random(name))
        ended = passage.finish()
    assert abs(ended - case.loss) < 1e-8 * case.loss
    assert worst(passage.gradients, case.wanted, floor=0.01) < 1e-8


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_gradients_of_kernels_are_pefts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where recurrences of several rows are kernels: windows hand them states, and get gradients
    of these."""
    computed = []
    own = recurrent._DeltaRows.backward

    def counted(ctx: Any, *gradients: Any) -> Any:
        computed.append(ctx.has_state)
        return own(ctx, *gradients)

    case = case_of(name, (9, 20, 4), torch.float32)
    monkeypatch.setattr(recurrent._DeltaRows, "backward", staticmethod(counted))
    passage = Passage(case, SavePolicy.PRUNED)
    passage.travel(8, 8, random.Random(name))
    assert abs(passage.finish() - case.loss) < 1e-5 * case.loss
    assert worst(passage.gradients, case.wanted, floor=0.01) < 1e-3
    assert {True, False} <= set(computed) or library(torch.float32) is None


def job_examples(seed: int, lengths: tuple[int, ...]) -> list[Example]:
    tokens = prompts(random.Random(seed), lengths)
    return [Example(tuple(own), (*own[1:], -100)) for own in tokens]


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_job_in_small_windows_is_the_one_in_large_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the scheduler, beside answers: windows are cut at the same rows on both ways, or where states
    are kept."""
    for module in (states, base_memory):
        monkeypatch.setattr(module, "STATE_ROWS", 8)
    data, found = job_examples(0, (9, 40, 4, 25, 33, 12)), []
    settings = TrainingConfig(batch_size=3, rows=64, learning_rate=1e-2, epochs=2)
    with Exact():
        for window in (7, 128, None):
            served = engine_of(
                name, torch.float64, scheduler={"training_window": window, "max_prefill_rows": 16}
            )
            job = served.finetune(data, "own", LoRAConfig(rank=4), settings)
            beside = served.generate([5, 6, 7], sampling=SamplingParams(max_tokens=9, ignore_eos=True))
            served.run()
            assert beside.result() and job.error is None
            found.append([step.loss for step in job.history])
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)
    assert found[0][2] != pytest.approx(found[0][0], rel=1e-3)


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2", "mamba"])
def test_no_example_sees_its_neighbour(name: str) -> None:
    """Other tokens in the example before change nothing that an example has: not a bit, in windows of the
    same rows."""
    case = case_of(name, (9, 20), torch.float32)
    case.labels[: case.lengths[0]] = -100  # only the second one has a loss
    found = []
    for _ in range(2):
        passage = Passage(case, SavePolicy.INPUTS, order=(0, 1))
        passage.travel(8, 8)
        loss = passage.finish()
        found.append((loss, passage.gradients))
        case.tokens[: case.lengths[0]] = (case.tokens[: case.lengths[0]] + 17) % 90
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_preempted_sequences_begin_again(name: str) -> None:
    """Pages are for some of four answers."""
    with Exact():
        asked = prompts(random.Random(3), (30, 25, 20, 28))
        served, oracle = engine_of(name, torch.float64, cache_tokens=96), build(name, torch.float64)
        sampling = SamplingParams(max_tokens=2 * ANSWER, ignore_eos=True, logprobs=0)
        given = [served.generate(prompt, sampling=sampling) for prompt in asked]
        served.run()
        given.append(served.generate(asked[0], sampling=sampling))
        served.run()
        for prompt, answer in zip([*asked, asked[0]], given, strict=True):
            expect_own(answer.result(), prompt, oracle, 1e-9)
        assert served.stats().preemptions > 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_prompts_begin_with_kept_states(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, with two adapters and the base, while others decode; states and pages are for
    some of them. One that shares nothing computes all of it."""
    monkeypatch.setattr(kept_states, "EVERY", 16)
    monkeypatch.setattr(kept_states, "_LEAST", 4)
    with Exact():
        served = engine_of(name, torch.float64, cache_tokens=320, max_running=8)
        oracles: list[torch.nn.Module] = [build(name, torch.float64)]
        for seed in (1, 2):
            adapted = with_adapter(name, targets(name), torch.float64, seed)
            adapted.save_pretrained(str(tmp_path / str(seed)))
            served.adapters.load(str(seed), tmp_path / str(seed))
            oracles.append(adapted)
        draws = random.Random(name)
        beginnings = prompts(draws, (50, 50))
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0)
        asked = []
        for _ in range(18):
            begun = draws.choice(beginnings)[: draws.choice([20, 33, 50])]
            prompt, kind = [*begun, *prompts(draws, [draws.choice([1, 7])])[0]], draws.choice([0, 0, 1, 2])
            handle = served.generate(prompt, adapter=str(kind) if kind else None, sampling=sampling)
            asked.append((handle, prompt, kind))
            for _ in range(draws.randint(0, 9)):
                served.step()
        served.run()
        for handle, prompt, kind in asked:
            expect_own(handle.result(), prompt, oracles[kind], 1e-9)
        found = served.stats().found_tokens
        assert found >= 48
        served.generate(asked[0][1], sampling=sampling, scope=None).result()
        assert served.stats().found_tokens == found


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_deterministic_answers_and_jobs_are_the_same_bits(name: str) -> None:
    """Alone, in a crowd, in other chunks, after preemption and from kept states; a job beside them. And the
    answers are the model's own."""
    asked = prompts(random.Random(name), (30, 21, 1, 30))
    asked[-1][:26] = asked[0][:26]
    sampling = SamplingParams(max_tokens=2 * ANSWER, ignore_eos=True, logprobs=2)
    data, oracle = job_examples(3, (9, 40, 25, 33, 12, 7)), build(name)
    settings = TrainingConfig(batch_size=2, rows=64, learning_rate=1e-2)

    def made(chunk: int, **fields: object) -> Engine:
        scheduler = {"training_window": 16, "max_prefill_rows": chunk, "min_prefill_rows": 1}
        return engine_of(name, deterministic=True, scheduler=scheduler, **fields)

    def told(served: Engine, together: bool, trains: bool = True) -> tuple[object, object]:
        job = served.finetune(data, "own", LoRAConfig(rank=4), settings) if trains else None
        given = []
        for prompt in asked:
            given.append(served.generate(prompt, sampling=sampling))
            if not together:
                served.run()
        served.run()
        losses = [step.loss for step in job.history] if job else []
        return [(answer.result().tokens, answer.result().logprobs) for answer in given], losses

    alone, losses = told(made(16), False)
    assert len(losses) == 3  # type: ignore[arg-type]
    assert told(made(64), True) == (alone, losses)
    crowded = made(5, cache_tokens=64)
    assert told(crowded, True, trains=False) == (alone, [])
    assert crowded.stats().preemptions > 0
    for prompt, (tokens, logprobs) in zip(asked, alone, strict=True):  # type: ignore[call-overload]
        expect_own(Answered(tokens, logprobs), prompt, oracle)


@pytest.mark.local
def test_a_pass_that_failed_is_repeated_from_the_states_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out behind the layers of some passes, which have written states by then: for all together,
    and for each alone that follows."""
    name = "qwen3_5_text"
    served, oracle, passes = engine_of(name), build(name, torch.float64), itertools.count()
    sampler = served.executor.worker.fused.sampler  # type: ignore[attr-defined]
    draw = sampler.draw

    def failing(batch: object) -> object:
        drawn = draw(batch)
        if next(passes) % 3 == 1:
            raise RuntimeError("can't allocate memory")
        return drawn

    asked = prompts(random.Random(5), (9, 21, 30))
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    given = [served.generate(prompt, sampling=sampling) for prompt in asked]
    monkeypatch.setattr(sampler, "draw", failing)
    served.run()
    kept = 0
    for prompt, answer in zip(asked, given, strict=True):
        try:
            expect_own(answer.result(), prompt, oracle)
            kept += 1
        except CoserveError:  # alone, it had no memory either
            continue
    assert kept and next(passes) > 9


def test_streamed_and_quantized_bases_have_states(tmp_path: Path) -> None:
    """Streamed blocks give the same answers; a quantized base is proved against itself."""
    folder = save(build("qwen3_5_text"), tmp_path)
    asked = prompts(random.Random(7), (9, 30))
    oracle = build("qwen3_5_text")
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    settings = {
        "calibrate": False,
        "cache_tokens": 256,
        "page_size": 4,
        "scheduler": {"max_prefill_rows": 16},
    }
    streamed = Engine(folder, EngineConfig(base_memory="240KiB", **settings))  # type: ignore[arg-type]
    assert "blocks stay" in str(streamed.executor.spec.streaming)
    given = [streamed.generate(prompt, sampling=sampling) for prompt in asked]
    streamed.run()
    for prompt, answer in zip(asked, given, strict=True):
        expect_own(answer.result(), prompt, oracle)
    packed = Engine(folder, EngineConfig(quantize="4bit", **settings))  # type: ignore[arg-type]
    assert len(packed.generate(asked[1], sampling=sampling).result().tokens) == ANSWER


def test_what_does_not_go_with_states_is_refused_in_a_sentence() -> None:
    served = engine_of("falcon_h1", cache_tokens=64)
    data = job_examples(1, (5,))
    for method in (PrefixTuningConfig(3), PromptTuningConfig(3)):
        with pytest.raises(AdapterMismatch, match="virtual tokens do not go with recurrent layers"):
            served.finetune(data, "virtual", method, TrainingConfig(max_steps=1))
    with pytest.raises(AdapterMismatch, match=r"conv1d.*what it adds there is never computed"):
        served.finetune(data, "conv", LoRAConfig(targets=("conv1d",)), TrainingConfig(max_steps=1))
    with pytest.raises(CoserveError, match="the states of its recurrent layers stay on the device"):
        served.generate([1] * 80, sampling=SamplingParams(max_tokens=5)).result()
    with pytest.raises(UnsupportedModel, match="how many rows its experts multiply"):
        engine_of("qwen3_next", deterministic=True, scheduler={})


def test_peft_computes_nothing_beside_a_convolution(tmp_path: Path) -> None:
    """It takes multiples of the channels as ranks, and the model never calls the module; so its files are
    refused, and say why."""
    name = "qwen3_5_text"
    with pytest.raises(ValueError, match="rank is divisible by groups"):
        with_adapter(name, ["conv1d"])
    channels = build(name).model.layers[0].linear_attn.conv1d.groups  # type: ignore[union-attr,operator]
    model = build(name)
    adapted = with_lora(model, 1, target_modules=["conv1d"], r=channels)
    (prompt,) = prompts(random.Random(1), [20])
    assert torch.equal(logits_of(adapted, prompt), logits_of(build(name), prompt))
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterMismatch, match=r"conv1d.*what it adds there is never computed"):
        engine_of(name).adapters.load("conv", tmp_path)
