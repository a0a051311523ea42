"""Losses other than plain cross-entropy: gradients as autograd finds them through PEFT, in float64."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.events import JobFailed, StepDone
from coserve.core.sequence import LossSpec, MicroBatch
from coserve.errors import ConfigError
from coserve.kernels.loss import (
    candidate_logprobs,
    candidate_vjp,
    logprob_vjp,
    target_logprobs,
    top_logprobs,
)
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.train.losses import LOSSES, loss_spec
from models import Exact, tiny
from passages import Passage, make_case
from training_runs import TrainingRun, adopt

TOLERANCE = 1e-10
LENGTHS = (9, 14, 6, 11)
ROWS = sum(LENGTHS)
BETA = 0.7
DRAWS = random.Random("losses")
NUMBERS = {name: [DRAWS.uniform(-3.0, 3.0) for _ in range(ROWS)] for name in ("weights", "reference")}


def spec_of(name: str, **settings: float) -> Callable[[MicroBatch], LossSpec]:
    """The loss with the numbers above, and none where a micro-batch is padded: nobody may read those."""

    def spec(batch: MicroBatch) -> LossSpec:
        padding = [float("nan")] * (batch.length - ROWS)
        inputs = {wanted: (*NUMBERS[wanted], *padding) for wanted in LOSSES[name].inputs}
        return loss_spec(name, inputs, **settings)

    return spec


def ones(batch: MicroBatch) -> LossSpec:
    return loss_spec("cross_entropy", {"weights": (1.0,) * batch.length})


def oracle(name: str) -> Callable[..., Tensor]:
    """The loss by its definition, one example at a time, over the number of labels."""

    def loss(model: Callable[..., Any], tokens: list[list[int]], labels: list[list[int]]) -> Tensor:
        numbers = iter(NUMBERS[LOSSES[name].inputs[0]])
        sums, count = [], sum(label >= 0 for example in labels for label in example)
        for example, of in zip(tokens, labels, strict=True):
            logits = model(input_ids=torch.tensor([example]), use_cache=False).logits[0].log_softmax(-1)
            own = torch.tensor([next(numbers) for _ in example], dtype=torch.float64)
            rows = torch.tensor([row for row, label in enumerate(of) if label >= 0], dtype=torch.long)
            logprobs = logits[rows, torch.tensor(of)[rows]]
            sums.append((-own[rows] * logprobs if name == "cross_entropy" else logprobs - own[rows]).sum())
        if name == "cross_entropy":
            return torch.stack(sums).sum() / count
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return -torch.stack([F.logsigmoid(BETA * (one - other)) for one, other in pairs]).sum() / count

    return loss


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(("name", "settings"), [("cross_entropy", {}), ("dpo", {"beta": BETA})])
def test_gradients_are_those_of_autograd(name: str, settings: Mapping[str, float], model: str) -> None:
    errors = {}
    with Exact():
        case = replace(make_case(model, LENGTHS, oracle(name)), spec=spec_of(name, **settings))
        for keep, there, back in ((SavePolicy.INPUTS, 7, 5), (SavePolicy.PRUNED, ROWS, ROWS)):
            passage = Passage(case, keep)
            passage.travel(there, back, random.Random(1))
            errors[keep] = passage.error()
    assert max(errors.values()) <= TOLERANCE, errors


def test_a_weight_of_one_is_plain_cross_entropy() -> None:
    """The fused path and the general one, on the same micro-batch."""
    with Exact():
        case = make_case("llama", LENGTHS)
        for spec in (None, ones):
            passage = Passage(replace(case, spec=spec), SavePolicy.INPUTS)
            passage.travel(16, 16)
            assert passage.error() <= TOLERANCE


def test_a_prompt_is_no_example() -> None:
    engine = Engine(tiny("llama", torch.float64), EngineConfig(calibrate=False, cache_tokens=64))
    start = fresh_adapter(engine.base, "mine", PromptTuningConfig(tokens=3), 0)
    example = Example((1, 2, 3, 4), (2, 3, 4, -100))
    run = TrainingRun(
        engine.base, LoadedAdapters(), "job", start, [example] * 2, TrainingConfig(batch_size=2)
    )
    (batch,) = run.next_step(iter([1]))
    assert run.session.micro_batches[batch.key].tail._examples.tolist()[:11] == [-1] * 3 + [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "words"),
    [
        ("mse", {}, {}, "no loss 'mse'"),
        ("dpo", {}, {"beta": 0.1}, "needs reference"),
        ("dpo", {"reference": (0.0,), "weights": (1.0,)}, {}, "needs reference"),
        ("dpo", {"reference": (0.0,)}, {"gamma": 1.0}, "no setting gamma"),
    ],
)
def test_what_a_loss_does_not_have_is_refused(
    name: str, inputs: dict[str, tuple[float, ...]], settings: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loss_spec(name, inputs, **settings)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_the_gradient_for_logits_is_that_of_autograd(dtype: torch.dtype, close: float) -> None:
    generator = torch.Generator().manual_seed(DRAWS.getrandbits(30))
    logits = (10 * torch.randn(13, 101, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(101, (13,), generator=generator)
    given = torch.randn(13, generator=generator, dtype=torch.float64)
    leaf = logits.double().requires_grad_()
    wanted = leaf.log_softmax(-1)[torch.arange(13), labels]
    (gradient,) = torch.autograd.grad(wanted, leaf, given)
    found = target_logprobs(logits, labels)
    assert torch.allclose(found.double(), wanted, atol=min(close, 1e-5))
    found = logprob_vjp(logits, labels, given.to(found.dtype))
    assert found.dtype == dtype and torch.allclose(found.double(), gradient, atol=close)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_candidates_of_each_row(dtype: torch.dtype, close: float) -> None:
    """The likeliest tokens, and the gradient of some tokens' log-probabilities at a temperature."""
    generator, heat = torch.Generator().manual_seed(DRAWS.getrandbits(30)), 1.7
    logits = (10 * torch.randn(13, 101, generator=generator, dtype=torch.float64)).to(dtype)
    candidates = torch.stack([torch.randperm(101, generator=generator)[:7] for _ in range(13)])
    given = torch.randn(13, 7, generator=generator, dtype=torch.float64)
    leaf = logits.double().requires_grad_()
    wanted = (leaf / heat).log_softmax(-1).gather(1, candidates)
    (gradient,) = torch.autograd.grad(wanted, leaf, given)
    found = candidate_logprobs(logits, candidates, heat)
    assert torch.allclose(found.double(), wanted, atol=min(close, 1e-5))
    found = candidate_vjp(logits, candidates, given.to(found.dtype), heat)
    assert found.dtype == dtype and torch.allclose(found.double(), gradient, atol=close)
    tokens, likely = top_logprobs(logits, 5)
    every = logits.double().log_softmax(-1)
    assert torch.allclose(likely.double(), every.topk(5).values, atol=min(close, 1e-5))
    assert torch.equal(every.gather(1, tokens), every.topk(5).values)


def test_a_scheduler_sends_a_coupled_loss_through_the_tail_twice() -> None:
    """Planned by a scheduler and cut as it likes, beside an answer: as all rows in one window."""
    examples = [Example(tuple(range(1, n)), (*range(2, n), -100)) for n in (9, 14, 6, 11)]
    weights = []
    for rows in (4096, 3):
        settings = {"max_training_rows": rows, "min_training_rows": min(rows, 32)}
        engine = Engine(
            tiny("llama", torch.float64), EngineConfig(calibrate=False, cache_tokens=64, scheduler=settings)
        )
        start = fresh_adapter(engine.base, "mine", LoRAConfig(rank=2), 0)
        run = TrainingRun(
            engine.base, engine.executor.worker.loaded, "j", start, examples, TrainingConfig(batch_size=4)
        )
        adopt(engine, run)
        (batch,) = run.supervised.next_step(iter([1]))
        batch.loss = loss_spec("dpo", {"reference": (-3.0,) * batch.length})
        engine.scheduler.training.add("j", [batch], update=run.supervised.optim_step)
        answer = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=4))
        done: list[StepDone] = []
        with Exact():
            while not done:
                events = engine.step()
                assert not [event for event in events if isinstance(event, JobFailed)]
                done += [event for event in events if isinstance(event, StepDone)]
        assert answer.sequence.output
        weights.append(torch.cat([p.flatten() for p in run.session.weights.current.parameters().values()]))
    assert torch.allclose(*weights, rtol=1e-9, atol=1e-12)
