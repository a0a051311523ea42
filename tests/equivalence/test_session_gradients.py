"""Gradients of training sessions: as autograd finds them through PEFT, in float64.

The data of one oracle loss come in two passes, in micro-batches that the scheduler cuts, beside an answer and
with a forward in between. The gradient is read off one optimizer step that is plain descent.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, SamplingParams, TrainingConfig
from coserve.core.training import AdamParams, Datum
from coserve.train.losses import LOSSES as PASS_LOSSES
from models import Exact, tiny
from passages import make_case, worst

TOLERANCE = 1e-10
LENGTHS = (9, 14, 6, 11)
PLAIN = AdamParams(1e20, beta1=0.0, beta2=0.0, eps=1e14)  # the step is 1e6 times the gradient
DRAWS = random.Random("sessions")
NUMBERS = {
    "logprobs": [[DRAWS.uniform(-6.5, -2.5) for _ in range(n)] for n in LENGTHS],
    "advantages": [[DRAWS.uniform(-1.0, 1.0) for _ in range(n)] for n in LENGTHS],
    "weights": [[DRAWS.choice((0.0, 1.0, DRAWS.uniform(-2.0, 2.0))) for _ in range(n)] for n in LENGTHS],
}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # of tokens, before their weights
    "cross_entropy": lambda logprobs, ratio, advantages: -logprobs,
    "importance_sampling": lambda logprobs, ratio, advantages: -(ratio * advantages),
    "ppo": lambda logprobs, ratio, advantages: (
        -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    ),
    "cispo": lambda logprobs, ratio, advantages: -(ratio.detach().clamp(0.8, 1.2) * advantages * logprobs),
    "gspo": lambda logprobs, ratio, advantages: (
        -torch.minimum(
            ratio.log().mean().exp() * advantages, ratio.log().mean().exp().clamp(0.8, 1.2) * advantages
        )
    ),
}
EACH: dict[str, list[list[float]]] = {}  # losses of all rows by the oracle, when it was last called


def oracle(name: str) -> Callable[..., Tensor]:
    """The loss, an example at a time."""

    def loss(model: Callable[..., Any], tokens: list[list[int]], labels: list[list[int]]) -> Tensor:
        total, EACH[name] = torch.zeros((), dtype=torch.float64), []
        for number, (example, of) in enumerate(zip(tokens, labels, strict=True)):
            logits = model(input_ids=torch.tensor([example]), use_cache=False).logits[0].log_softmax(-1)
            weights = NUMBERS["weights"][number]
            kept = [row for row, label in enumerate(of) if label >= 0 and weights[row]]
            each = torch.zeros(len(example), dtype=torch.float64)
            if kept:
                rows = torch.tensor(kept)
                logprobs = logits[rows, torch.tensor(of)[rows]]
                sampled, advantages, weight = (
                    torch.tensor(NUMBERS[one][number], dtype=torch.float64)[rows] for one in NUMBERS
                )
                each[rows] = weight * LOSSES[name](logprobs, (logprobs - sampled).exp(), advantages)
            total = total + each.sum()
            EACH[name].append(each.tolist())
        return total

    return loss


@pytest.mark.parametrize(("model", "name"), [*(("llama", name) for name in LOSSES), ("gpt2", "ppo")])
def test_accumulated_gradients_are_those_of_autograd_through_peft(model: str, name: str) -> None:
    with Exact():
        case = make_case(model, LENGTHS, oracle(name))
        settings = {"max_training_rows": 7, "min_training_rows": 4}
        config = EngineConfig(calibrate=False, cache_tokens=64, scheduler=settings)
        engine = Engine(tiny(model, torch.float64), config)
        session = engine.open_training("mine", training=TrainingConfig(rows=24), from_adapter=case.adapter)
        before = engine.adapters.weights("mine").parameters()
        data = [
            Datum(
                example.tokens,
                example.labels,
                {one: tuple(NUMBERS[one][i]) for one in NUMBERS if one in PASS_LOSSES[name].inputs},
            )
            for i, example in enumerate(case.examples)
        ]
        answer = engine.generate([1, 2, 3], "mine", SamplingParams(max_tokens=12, ignore_eos=True))
        first = session.forward_backward(data[:3], name)
        scored = session.forward(data, name)
        second = session.forward_backward(data[3:], name)
        session.optim_step(PLAIN).result()
        after = engine.adapters.weights("mine").parameters()
        answer.result()
    gradients = {one: (before[one] - after[one]) / 1e6 for one in before}
    losses = first.result().loss + second.result().loss, scored.result().loss
    assert worst(gradients, case.wanted) <= TOLERANCE
    assert losses == pytest.approx((case.loss, case.loss), rel=TOLERANCE)
    logprobs = (*first.result().logprobs, *second.result().logprobs)
    for found, again in zip(logprobs, scored.result().logprobs, strict=True):
        assert found == pytest.approx(again, abs=TOLERANCE)
    each = (*first.result().losses, *second.result().losses)
    for found, again, wanted in zip(each, scored.result().losses, EACH[name], strict=True):
        assert found == pytest.approx(wanted, abs=TOLERANCE) and again == pytest.approx(wanted, abs=TOLERANCE)
