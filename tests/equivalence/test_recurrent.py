"""Models with recurrent layers: answers and gradients are transformers' and PEFT's own.

Rows of several sequences share each pass: prompts in chunks, decode rows, adapters beside each other. The oracle runs
each sequence alone, as a whole, and without a cache.
"""

import itertools
import random
from functools import cache
from pathlib import Path

import pytest
import torch

from adapters import lora_adapter
from coserve import Engine, EngineConfig, SamplingParams, SavePolicy
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.sites import Kind
from models import Exact, logits_of, lora_parameters, prompts
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


def expect_own(answer: object, prompt: list[int], oracle: torch.nn.Module, near: float = NEAR) -> None:
    """Each token is the oracle's likeliest, with its log-probability."""
    tokens, logprobs = answer.tokens, answer.logprobs  # type: ignore[attr-defined]
    assert len(tokens) == ANSWER
    rows = logits_of(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
    assert tokens == rows.argmax(-1).tolist()
    found = torch.tensor([each.chosen for each in logprobs], dtype=rows.dtype)
    wanted = rows[torch.arange(ANSWER), torch.tensor(tokens)]
    assert float((found - wanted).abs().max()) < near


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_answers_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Two adapters and the base beside each other; later prompts arrive while others decode. In float64, of which
    `Exact` keeps all.

    Nemotron H's code for one row lacks the least time step that its code for several has (`time_step_min`), so its own
    answers with a cache are 5e-6 away from its forward of whole sequences, too.
    """
    with Exact():
        expect_own_answers(name, torch.float64, NEAR if name == "nemotron_h" else 1e-9, tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "lfm2", "mamba2"]
)
def test_mixed_answers_in_float32(name: str, tmp_path: Path) -> None:
    """What models compute in float32 whatever their type is, they do here, too."""
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


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_in_windows_are_pefts(name: str) -> None:
    """Examples are packed and cut by windows, also into windows of one row, and put down between layers: to 1e-8 in
    float64."""
    with Exact():
        case = case_of(name, (9, 20, 4), torch.float64)
        passage = Passage(case, SavePolicy.PRUNED)
        passage.travel(8, 8, random.Random(name))
        ended = passage.finish()
    assert abs(ended - case.loss) < 1e-8 * case.loss
    assert worst(passage.gradients, case.wanted, floor=0.01) < 1e-8
