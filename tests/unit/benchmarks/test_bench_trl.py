"""The comparison with TRL: our half beside plain losses, and the whole where TRL is installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coserve_benchmarks.training import beside_trl
from coserve_benchmarks.training.beside_trl import Compared, Policy, Rollouts

CLOSE = 1e-5  # the model's norms compute in float32
BETA, CLIP = 0.3, 0.2


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"))


def logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Of an answer's tokens, by transformers and PEFT."""
    tokens = torch.tensor([[*prompt, *answer]])
    scores: Any = policy.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0]


def assert_close(found: Compared) -> None:
    assert found.ours == pytest.approx(found.theirs, rel=CLOSE) and found.gradient < CLOSE, found


def test_dpo_of_ours_is_a_plain_one(policy: Policy) -> None:
    prompts, chosen, rejected = [[5, 9, 40], [7, 8]], [[60, 61], [90, 91, 92, 93]], [[70, 71, 72], [80]]

    def sums(answers: list[list[int]]) -> Tensor:
        return torch.stack([logprobs(policy, *pair).sum() for pair in zip(prompts, answers, strict=True)])

    def gains(answers: list[list[int]]) -> Tensor:
        with policy.model.disable_adapter(), torch.no_grad():
            reference = sums(answers)
        return sums(answers) - reference

    rows = [[*p, *answer] for p, answer in zip(prompts * 2, chosen + rejected, strict=True)]
    ids, there = beside_trl._padded(rows)
    learned = there.clone()
    for row, prompt in enumerate(prompts * 2):
        learned[row, : len(prompt)] = 0
    batch = {"input_ids": ids, "attention_mask": there, "completion_mask": learned}

    def loss(beta: float) -> Tensor:
        return -F.logsigmoid(beta * (gains(chosen) - gains(rejected))).mean()

    assert_close(beside_trl.compare_pairs(policy, loss(BETA), batch))
    assert beside_trl.compare_pairs(policy, loss(2 * BETA), batch).gradient > 0.1  # it sees another loss


def test_kto_of_ours_is_a_plain_one(policy: Policy) -> None:
    """The divergence is estimated on prompts with the answer before."""
    prompts, answers = [[5, 9, 40], [7, 8], [30, 31, 32]], [[60, 61], [90, 91, 92, 93], [70]]
    labels = [True, False, True]
    sides = {"": answers, "KL_": [answers[-1], *answers[:-1]]}
    batch: dict[str, Any] = {"label": labels}
    for name, said in sides.items():
        ids, there = beside_trl._padded([[*p, *answer] for p, answer in zip(prompts, said, strict=True)])
        learned = there.clone()
        for row, prompt in enumerate(prompts):
            learned[row, : len(prompt)] = 0
        batch |= {f"{name}input_ids": ids, f"{name}attention_mask": there, f"{name}completion_mask": learned}

    def sums(said: list[list[int]]) -> Tensor:
        return torch.stack([logprobs(policy, *pair).sum() for pair in zip(prompts, said, strict=True)])

    def gains(said: list[list[int]]) -> Tensor:
        with policy.model.disable_adapter(), torch.no_grad():
            reference = sums(said)
        return sums(said) - reference

    def loss(beta: float) -> Tensor:
        with torch.no_grad():
            kl = gains(sides["KL_"]).mean().clamp(min=0)
        signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
        weights = torch.tensor([1.5, 0.7, 1.5], dtype=torch.float64)
        return (weights * (1 - torch.sigmoid(signs * beta * (gains(answers) - kl)))).mean()

    assert_close(beside_trl.compare_labelled(policy, loss(BETA), batch))
    assert beside_trl.compare_labelled(policy, loss(2 * BETA), batch).gradient > 0.1


def test_grpo_of_ours_is_a_plain_one(policy: Policy) -> None:
    rollouts = Rollouts.drawn(policy)

    def loss(clip: float) -> Tensor:
        total, clipped = torch.zeros((), dtype=torch.float64), 0
        for prompt, answer, sampled, advantage in zip(
            rollouts.prompts, rollouts.answers, rollouts.sampled, rollouts.advantages, strict=True
        ):
            ratio = (logprobs(policy, prompt, answer) - torch.tensor(sampled, dtype=torch.float64)).exp()
            held = ratio.clamp(1 - clip, 1 + clip)
            total = total - torch.minimum(ratio * advantage, held * advantage).sum()
            clipped += int((held != ratio).sum())
        assert clipped > 3 or clip > 1
        return total / rollouts.tokens

    assert_close(beside_trl.compare_rollouts(policy, loss(CLIP), rollouts))
    assert beside_trl.compare_rollouts(policy, loss(100.0), rollouts).gradient > 0.01


@pytest.mark.slow  # where TRL is installed
@pytest.mark.parametrize("compare", [beside_trl.compare_dpo, beside_trl.compare_kto, beside_trl.compare_grpo])
def test_ours_are_trl_s(policy: Policy, tmp_path: Path, compare: Any) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    assert_close(compare(policy, tmp_path))
