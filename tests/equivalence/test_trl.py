"""Jobs beside TRL itself, where that is installed: the loss of each step, and the weights at the end, as
TRL's own functions have them on the same batches, for each form of a loss that both have. TRL's own batches
are in `benchmarks/coserve_benchmarks/training/beside_trl.py`.

TRL's trainers are not made: their methods are called on an object that has what they read.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_objectives_of_jobs import (
    LORA,
    PLAIN,
    Plain,
    answered,
    engine_of,
    make_labelled,
    make_pairs,
    started,
)
from torch import Tensor

from coserve import TrainingConfig
from coserve.train.example import Example, epochs
from coserve.train.grading.graders import PythonGrader
from coserve.train.objectives import DPO, KTO, ORPO, Reinforcement
from coserve.train.prompts import TokenPrompt
from coserve.train.reinforced import AnswerGroup, ReinforcedSteps
from models import Exact, prompts

pytest.importorskip("trl")
pytest.importorskip("datasets")

SEED = random.SystemRandom().randrange(1 << 30)  # fresh inputs in each run; a failure tells it


class Trainer:
    """An object with the attributes that a trainer's methods read; whatever is not given is None."""

    def __init__(self, **given: Any) -> None:
        same: Callable[[Any], Any] = lambda value: value  # noqa: E731
        self.accelerator = SimpleNamespace(
            device="cpu", num_processes=1, process_index=0, gather=same, gather_for_metrics=same,
            unwrap_model=same, sync_gradients=True, reduce=lambda value, **_: value,
        )  # fmt: skip
        self._metrics = defaultdict(lambda: defaultdict(list))
        self._total_train_tokens, self._tp_size = 0, 1
        for name, value in given.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return None


class Fused:
    """A model that answers as TRL's fused head does: with the log-probabilities of labels."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any
    ) -> Any:
        logits = self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        if labels is None:
            return SimpleNamespace(logits=logits)
        wanted = labels[:, 1:]
        found = logits[:, :-1].log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(found)
        return SimpleNamespace(
            log_probs=torch.where(wanted < 0, zeros, found), entropy=zeros, mean_logits=zeros,
            is_top1=zeros.bool(), logits=logits,
        )  # fmt: skip


def padded(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch, padded on the right, and where its answers are."""
    longest = max(map(len, examples))
    ids, there, learned = (torch.zeros(len(examples), longest, dtype=torch.long) for _ in range(3))
    for row, example in enumerate(examples):
        ids[row, : len(example)], there[row, : len(example)] = torch.tensor(example.tokens), 1
        for place, label in enumerate(example.labels[:-1]):
            learned[row, place + 1] = label >= 0
    return {"input_ids": ids, "attention_mask": there, "completion_mask": learned}


def sums(plain: Plain, examples: Sequence[Example]) -> Tensor:
    with torch.no_grad():
        return torch.stack([plain.logprobs(example).sum() for example in examples])


Case = tuple[Any, list[Any], Callable[[Plain, list[int]], Tensor]]


def dpo() -> Case:
    from trl import DPOTrainer

    pairs, objective = make_pairs(seed=SEED), DPO(0.6)
    reference: list[Tensor] = []

    def loss(plain: Plain, chosen: list[int]) -> Tensor:
        sides = [[getattr(pair, side) for pair in pairs] for side in ("chosen", "rejected")]
        if not reference:
            reference.extend(sums(plain, side) for side in sides)
        batch = padded([side[i] for side in sides for i in chosen])
        batch |= {"ref_chosen_logps": reference[0][chosen], "ref_rejected_logps": reference[1][chosen]}
        model = Fused(plain.model)
        self = Trainer(
            model=model, beta=objective.beta, precompute_ref_logps=True, f_divergence_type="reverse_kl",
            loss_types=["sigmoid"], loss_weights=[1.0],
        )  # fmt: skip
        return DPOTrainer._compute_loss(self, model, batch, False)

    return objective, pairs, loss


def orpo() -> Case:
    from trl.experimental.orpo import ORPOTrainer

    pairs, objective = make_pairs(seed=SEED), ORPO(0.6)

    def loss(plain: Plain, chosen: list[int]) -> Tensor:
        batch = {}
        for side in ("chosen", "rejected"):
            own = padded([getattr(pairs[i], side) for i in chosen])
            labels = own["input_ids"].masked_fill(own["completion_mask"] == 0, -100)
            batch |= {f"{side}_input_ids": own["input_ids"], f"{side}_attention_mask": own["attention_mask"]}
            batch[f"{side}_labels"] = labels
        self = Trainer(
            beta=objective.beta, padding_value=0, is_encoder_decoder=False,
            concatenated_inputs=ORPOTrainer.concatenated_inputs, get_batch_logps=ORPOTrainer.get_batch_logps,
        )  # fmt: skip
        self.concatenated_forward = lambda *given: ORPOTrainer.concatenated_forward(self, *given)
        self.odds_ratio_loss = lambda *given: ORPOTrainer.odds_ratio_loss(self, *given)
        found: Tensor = ORPOTrainer.get_batch_loss_metrics(self, Fused(plain.model), batch)[0]
        return found

    return objective, pairs, loss


def kto() -> Case:
    from trl import KTOTrainer

    data, objective = make_labelled(seed=SEED), KTO(0.7, desirable_weight=1.5, undesirable_weight=0.8)
    own = [answered(one.prompt, one.answer) for one in data]
    longest = max(map(len, own))
    mixed = [
        answered(one.prompt, before.answer[: longest - len(one.prompt)])
        for one, before in zip(data, [data[-1], *data], strict=False)
    ]
    reference: list[Tensor] = []

    def loss(plain: Plain, chosen: list[int]) -> Tensor:
        if not reference:
            reference.extend((sums(plain, own), sums(plain, mixed)))
        batch = padded([own[i] for i in chosen])
        batch |= {f"KL_{name}": one for name, one in padded([mixed[i] for i in chosen]).items()}
        batch |= {"ref_logps": reference[0][chosen], "ref_KL_logps": reference[1][chosen]}
        batch["label"] = torch.tensor([data[i].desirable for i in chosen])
        model = Fused(plain.model)
        self = Trainer(
            model=model, beta=objective.beta, precompute_ref_logps=True, calculate_KL=True, loss_type="kto",
            desirable_weight=objective.desirable_weight, undesirable_weight=objective.undesirable_weight,
        )  # fmt: skip
        self._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(self, *given)
        return KTOTrainer._compute_loss(self, model, batch, False)

    return objective, [one.made for one in data], loss


@pytest.mark.parametrize("make", [dpo, orpo, kto])
def test_jobs_on_answers_are_trl_s(make: Callable[[], Case]) -> None:
    """ORPO's odds are in float32 in TRL. Adam divides gradients by their size, so weights whose gradients are
    nearly zero differ by more than rounding: by 1.4e-10 in one of some hundred draws."""
    objective, data, loss_of = make()
    close = {"rtol": 1e-4, "atol": 1e-6} if isinstance(objective, ORPO) else {"rtol": 1e-8, "atol": 1e-9}
    engine = engine_of()
    config = TrainingConfig(batch_size=2, epochs=2, seed=3, rows=40, **PLAIN)
    given = started(engine)
    with Exact():
        plain, wanted = Plain(given), []
        for chosen in epochs(len(data), config.batch_size, config.epochs, config.seed):
            loss = loss_of(plain, list(chosen))
            plain.descend(loss)
            wanted.append(float(loss.detach()))
        job = engine.finetune(data, "mine", LORA, config, given, objective=objective).result()
    told = torch.tensor([updated.loss for updated in job.history], dtype=torch.float64)
    torch.testing.assert_close(told, torch.tensor(wanted, dtype=torch.float64), **close, msg=f"seed {SEED}")
    plain.assert_same(engine.adapters.weights("mine"), **close)


def grpo_batch(objective: Reinforcement, groups: Sequence[AnswerGroup], model: Any) -> dict[str, Any]:
    """A step's answers with the advantages that TRL gives them."""
    from trl import GRPOTrainer

    answers = [(group.prompt, answer) for group in groups for answer in group.answers]
    args = SimpleNamespace(
        per_device_train_batch_size=len(answers), steps_per_generation=1, gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    self = Trainer(
        model=model, args=args, num_generations=objective.group_size, beta=0.0, num_iterations=1,
        scale_rewards=objective.scale_rewards, multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1), reward_func_names=["own"], reward_funcs=[None],
        _tokenizer=SimpleNamespace(pad_token_id=0), _pending_extra_logs={}, _pending_metrics={},
        _logs=defaultdict(list, rewards=defaultdict(list)),
    )  # fmt: skip
    asked, said = [list(prompt) for prompt, _ in answers], [list(answer.tokens) for _, answer in answers]
    self._generate = lambda _: (asked, said, None, said, None, {}, None, None)
    rewards = torch.tensor([[answer.reward] for _, answer in answers], dtype=torch.float64)
    self._calculate_rewards = lambda *_: rewards
    batch: dict[str, Any] = GRPOTrainer._generate_and_score_completions(self, [{"prompt": p} for p in asked])
    old = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
    for row, (_, answer) in enumerate(answers):
        old[row, : len(answer.logprobs)] = torch.tensor(answer.logprobs, dtype=torch.float64)
    return {**batch, "old_per_token_logps": old}


def grpo_loss(objective: Reinforcement, groups: Sequence[AnswerGroup], plain: Plain) -> Tensor:
    from trl import GRPOTrainer

    model = Fused(plain.model)
    batch = grpo_batch(objective, groups, model)
    answers = [(group.prompt, answer) for group in groups for answer in group.answers]
    width = batch["completion_ids"].shape[1]
    rows = [plain.logprobs(answered(prompt, answer.tokens)) for prompt, answer in answers]
    logps = torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])
    assert objective.clip is not None
    high = objective.clip if objective.clip_high is None else objective.clip_high
    self = Trainer(
        model=model, beta=0.0, loss_type=objective.loss_type, top_entropy_quantile=1.0,
        importance_sampling_level="token", epsilon_low=objective.clip, epsilon_high=high,
        max_completion_length=objective.max_tokens, current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
    )  # fmt: skip
    self._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    return GRPOTrainer._compute_loss(self, model, batch)


FORMS = list(product(("dapo", "bnpo", "grpo", "dr_grpo", "cispo"), ("group", "batch", "none")))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("loss_type", "scale"), FORMS)
def test_jobs_on_rewards_are_trl_s(loss_type: Any, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some groups have equal rewards, and steps are behind the policy that sampled, so that ratios are not
    one. TRL's correction of a deviation, 6/5 for a batch of six, is in float32."""
    engine, seen = engine_of(), list[list[AnswerGroup]]()
    offer = ReinforcedSteps.offer

    def watched(self: ReinforcedSteps, groups: Sequence[AnswerGroup]) -> None:
        seen.append([*groups])
        offer(self, groups)

    monkeypatch.setattr(ReinforcedSteps, "offer", watched)
    draws = random.Random(f"{SEED} {loss_type} {scale}")
    grader = PythonGrader(lambda answer, item: draws.choice([0.0, 0.3, 1.0]) if item["varies"] else 0.3)
    asked = [TokenPrompt(tuple(one), {"varies": n != 1}) for n, one in enumerate(prompts(draws, [3, 5, 4]))]
    config = TrainingConfig(batch_size=2, epochs=3, seed=3, rows=40, **PLAIN)
    given = started(engine)
    objective = Reinforcement(
        grader, group_size=3, max_tokens=6, clip=0.02, clip_high=0.03 if loss_type != "cispo" else 1.01,
        loss_type=loss_type, scale_rewards=scale,
    )  # fmt: skip
    with Exact():
        plain = Plain(given)
        job = engine.finetune(asked, "mine", LORA, config, given, objective=objective).result()
        for groups, updated in zip(seen, job.history, strict=True):
            loss = grpo_loss(objective, groups, plain)
            assert updated.loss == pytest.approx(float(loss.detach()), rel=1e-6, abs=2e-8), f"seed {SEED}"
            plain.descend(loss)
    close = {"rtol": 1e-4, "atol": 2e-8} if scale == "batch" else {}
    plain.assert_same(engine.adapters.weights("mine"), **close)


def test_the_defaults_are_trl_s() -> None:
    from trl import DPOConfig, GRPOConfig, KTOConfig
    from trl.experimental.orpo import ORPOConfig

    def defaults(kind: Any) -> dict[str, Any]:
        return {name: field.default for name, field in kind.__dataclass_fields__.items()}

    ours, theirs = Reinforcement(PythonGrader(lambda *_: 0.0)), defaults(GRPOConfig)
    names = {"clip": "epsilon", "clip_high": "epsilon_high", "group_size": "num_generations"}
    for name in (
        "clip",
        "clip_high",
        "loss_type",
        "scale_rewards",
        "group_size",
        "temperature",
    ):
        assert getattr(ours, name) == theirs[names.get(name, name)], name
    assert theirs["beta"] == 0.0 and theirs["importance_sampling_level"] == "token"
    assert DPO().beta == defaults(DPOConfig)["beta"] and ORPO().beta == defaults(ORPOConfig)["beta"]
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        assert getattr(KTO(), name) == defaults(KTOConfig)[name]
