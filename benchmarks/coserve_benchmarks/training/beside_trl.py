"""DPO, KTO and GRPO beside TRL: loss and gradient of the same adapter on the same batch, both in float64.

    python -m coserve_benchmarks.training.beside_trl

TRL is none of coserve's extras: install it beside (with `datasets`), it is imported only here. TRL's own
trainers make the batches of answers and compute their losses; coserve's are those of a training session.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve import tiny
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.core.training import AdamParams, Datum
from coserve.engine.engine import Engine
from coserve.train.config import TrainingConfig
from coserve.train.example import IGNORED
from coserve.train.preferences import estimated_kl

_BETA: Final = 0.3  # of DPO and KTO
_WEIGHTS: Final = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
_CLIP: Final = 0.2
_GROUP: Final = 4
_HUGE: Final = 1e14  # as epsilon, and without memory, AdamW subtracts rate / epsilon times the gradient
_TARGETS: Final = ("q_proj", "v_proj", "down_proj")
_WORDS: Final = ("sun", "sea", "stone", "star", "snow", "bird", "tree", "road", "house", "light")


@dataclass(frozen=True, slots=True)
class Compared:
    """A loss by TRL and by coserve, and the gradients' greatest difference over their greatest entry."""

    theirs: float
    ours: float
    gradient: float


class Policy:
    """A LoRA adapter of the embedded model in PEFT, and the same one in an engine."""

    def __init__(self, folder: Path) -> None:
        lora = PeftLoraConfig(r=8, lora_alpha=16, target_modules=list(_TARGETS), task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(_base(), lora)
        draws = torch.Generator().manual_seed(0)
        for parameter in self._parameters.values():
            drawn = 0.05 * torch.randn(parameter.shape, generator=draws)  # float32, as files are written in
            parameter.data = drawn.double()
        self.model.save_pretrained(str(folder))
        self._engine = Engine(_base(), EngineConfig(cache_tokens=2048, calibrate=False))
        self._engine.adapters.load("start", folder)
        self._runs = 0

    @property
    def _parameters(self) -> dict[str, Any]:
        """LoRA's parameters by coserve's names."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                path = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                found[path] = parameter
        return found

    def compare(self, loss: Tensor, data: Sequence[Datum], name: str, settings: Mapping[str, float],
                count: int) -> Compared:  # fmt: skip
        """TRL's `loss`, a graph of `model`, beside coserve's loss `name` of `data`, the mean over `count`."""
        parameters = self._parameters
        theirs = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        self._runs += 1
        adapter = f"run-{self._runs}"
        session = self._engine.open_training(adapter, training=TrainingConfig(), from_adapter="start")
        before = self._engine.adapters.weights("start").parameters()
        ours = session.forward_backward(data, name, settings).result().loss / count
        session.optim_step(AdamParams(_HUGE, 0.0, 0.0, _HUGE)).result()
        after = self._engine.adapters.weights(adapter).parameters()
        largest = max(float(one.abs().max()) for one in theirs.values())
        apart = max(
            float(((before[key] - after[key]) / count - theirs[key]).abs().max()) for key in parameters
        )
        return Compared(float(loss.detach()), ours, apart / largest)

    def logprobs(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Log-probabilities of the targets."""
        return self._scored(data, "start")

    def base_logprobs(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Log-probabilities of the targets under the base: under an adapter that changes nothing yet."""
        return self._scored(data, None)

    def _scored(self, data: Sequence[Datum], start: str | None) -> list[tuple[float, ...]]:
        self._runs += 1
        session = self._engine.open_training(f"run-{self._runs}", LoRAConfig(rank=1), from_adapter=start)
        plain = [Datum(one.tokens, one.targets) for one in data]
        return list(session.forward(plain, "cross_entropy").result().logprobs)


def compare_dpo(policy: Policy, folder: Path) -> Compared:
    """DPO on four pairs, whose batch TRL's trainer makes. The reference is the base."""
    trl, rows_of = import_module("trl"), import_module("datasets").Dataset.from_list
    draw = random.Random("dpo")
    rows = [
        {
            "prompt": f"Say {' '.join(draw.choices(_WORDS, k=3))}:",
            "chosen": f" {' '.join(draw.choices(_WORDS, k=draw.randint(2, 8)))}",
            "rejected": f" {' '.join(draw.choices(_WORDS, k=draw.randint(2, 8)))}",
        }
        for _ in range(4)
    ]
    args = trl.DPOConfig(
        str(folder), beta=_BETA, per_device_train_batch_size=4, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    # Without a reference TRL takes the adapter as it is, where it has been trained already.
    trainer = trl.DPOTrainer(
        policy.model, _base(), args=args, processing_class=_tokenizer(), train_dataset=rows_of(rows)
    )
    (batch,) = list(trainer.get_train_dataloader())
    _same_model(trainer.model, policy.model)
    return compare_pairs(policy, trainer.compute_loss(trainer.model, batch), batch)


def compare_pairs(policy: Policy, loss: Tensor, batch: Mapping[str, Tensor]) -> Compared:
    """DPO's `loss` beside coserve's, on a batch as TRL makes it: preferred answers, then the others, padded
    on the right. The reference is the base."""
    pairs = len(batch["input_ids"]) // 2
    order = [place for pair in range(pairs) for place in (pair, pairs + pair)]
    rows = _data_of(batch)
    data = [rows[place] for place in order]
    reference = policy.base_logprobs(data)
    data = [
        Datum(one.tokens, one.targets, {"reference": logprobs})
        for one, logprobs in zip(data, reference, strict=True)
    ]
    return policy.compare(loss, data, "dpo", {"beta": _BETA}, pairs)


def _data_of(batch: Mapping[str, Any], prefix: str = "") -> list[Datum]:
    """The rows of a batch as TRL makes it, whose completions have targets. `prefix` is that of its names."""
    data = []
    ids, there, learned = (
        batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask")
    )
    for row, is_there, is_learned in zip(ids, there.bool(), learned, strict=True):
        tokens = tuple(row[is_there].tolist())
        following = zip(tokens[1:], is_learned[is_there].tolist()[1:], strict=True)
        data.append(Datum(tokens, (*(token if wanted else IGNORED for token, wanted in following), IGNORED)))
    return data


def compare_kto(policy: Policy, folder: Path) -> Compared:
    """KTO on four labelled answers, whose batch and mixed pairs TRL's trainer makes. The reference is the
    base."""
    trl, rows_of = import_module("trl"), import_module("datasets").Dataset.from_list
    draw = random.Random("kto")
    rows = [
        {
            "prompt": f"Say {' '.join(draw.choices(_WORDS, k=3))}:",
            "completion": f" {' '.join(draw.choices(_WORDS, k=draw.randint(2, 8)))}",
            "label": number != 1,
        }
        for number in range(4)
    ]
    args = trl.KTOConfig(
        str(folder), beta=_BETA, per_device_train_batch_size=4, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, **_WEIGHTS,
    )  # fmt: skip
    trainer = trl.KTOTrainer(
        policy.model, _base(), args=args, processing_class=_tokenizer(), train_dataset=rows_of(rows)
    )
    (batch,) = list(trainer.get_train_dataloader())
    _same_model(trainer.model, policy.model)
    return compare_labelled(policy, trainer.compute_loss(trainer.model, batch), batch)


def compare_labelled(policy: Policy, loss: Tensor, batch: Mapping[str, Any]) -> Compared:
    """KTO's `loss` beside coserve's, on a batch as TRL makes it: answers, their prompts with other answers,
    and labels. The reference is the base."""
    own, mixed = _data_of(batch), _data_of(batch, "KL_")
    sides = zip(policy.logprobs(mixed), policy.base_logprobs(mixed), strict=True)
    kl = estimated_kl([sum(one) - sum(other) for one, other in sides])
    data = [
        Datum(
            one.tokens,
            one.targets,
            {"reference": logprobs, "desirable": (float(label),) * len(one.tokens)},
        )
        for one, logprobs, label in zip(own, policy.base_logprobs(own), batch["label"], strict=True)
    ]
    return policy.compare(loss, data, "kto", {"beta": _BETA, "kl": kl, **_WEIGHTS}, len(data))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Answers to prompts, as tokens, with their log-probabilities under another policy and their
    advantages."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    sampled: Sequence[Sequence[float]]
    advantages: Sequence[float]

    @classmethod
    def drawn(cls, policy: Policy) -> "Rollouts":
        """Two groups of answers, by a policy so far from this one that some ratios are clipped."""
        draw = random.Random("grpo")
        prompts = [[draw.randrange(5, 500) for _ in range(size)] for size in (5, 9) for _ in range(_GROUP)]
        answers = [[draw.randrange(5, 500) for _ in range(draw.randint(3, 12))] for _ in prompts]
        pairs = zip(prompts, policy.base_logprobs(_data(prompts, answers)), strict=True)
        sampled = [
            [logprob + draw.gauss(0.0, 0.3) for logprob in logprobs[len(prompt) - 1 :]]
            for prompt, logprobs in pairs
        ]
        return cls(prompts, answers, sampled, [draw.gauss(0.0, 1.0) for _ in prompts])

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    def data(self) -> list[Datum]:
        """The answers as a pass of `ppo` takes them."""
        made = []
        for one, logprobs, advantage in zip(
            _data(self.prompts, self.answers), self.sampled, self.advantages, strict=True
        ):
            before = [0.0] * (len(one.tokens) - len(logprobs))
            inputs = {
                "logprobs": (*before, *logprobs),
                "advantages": (*before, *[advantage] * len(logprobs)),
            }
            made.append(Datum(one.tokens, one.targets, inputs))
        return made


def _data(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Datum]:
    return [
        Datum((*prompt, *answer[:-1]), (*[IGNORED] * (len(prompt) - 1), *answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def compare_rollouts(policy: Policy, loss: Tensor, rollouts: Rollouts) -> Compared:
    """The `loss` of PPO's clip, the mean over tokens, beside coserve's on the same answers."""
    clip = {"clip_low_threshold": 1.0 - _CLIP, "clip_high_threshold": 1.0 + _CLIP}
    return policy.compare(loss, rollouts.data(), "ppo", clip, rollouts.tokens)


def compare_grpo(policy: Policy, folder: Path) -> Compared:
    """GRPO with PPO's clip and without a KL term, tokens counted alike (DAPO), on two groups of answers. Both
    get the same advantages, and log-probabilities of another policy, so that some ratios are clipped."""
    trl, rows_of = import_module("trl"), import_module("datasets").Dataset.from_list
    args = trl.GRPOConfig(
        str(folder), beta=0.0, epsilon=_CLIP, epsilon_high=_CLIP, loss_type="dapo", num_generations=_GROUP,
        per_device_train_batch_size=2 * _GROUP, max_completion_length=16, temperature=1.0, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        policy.model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        processing_class=_tokenizer(), train_dataset=rows_of([{"prompt": "Say"}] * 8),
    )  # fmt: skip
    _same_model(trainer.model, policy.model)
    trainer.current_gradient_accumulation_steps = 1  # as its loop sets it
    rollouts = Rollouts.drawn(policy)
    prompt_ids, prompt_mask = _padded(rollouts.prompts, left=True)
    completion_ids, completion_mask = _padded(rollouts.answers)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(rollouts.advantages, dtype=torch.float64),
        "old_per_token_logps": _padded(rollouts.sampled)[0].double(),
        "num_items_in_batch": torch.tensor(rollouts.tokens),
    }
    return compare_rollouts(policy, trainer._compute_loss(trainer.model, inputs), rollouts)


def _base() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float64)


def _tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _same_model(theirs: Any, ours: Any) -> None:
    """Raises AssertionError where a trainer has changed the model's type, or made another of it."""
    assert theirs is ours and all(one.dtype == torch.float64 for one in ours.parameters())
    theirs.train()  # there is no dropout


def _padded(rows: Sequence[Sequence[float]], left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as a tensor, padded with zeros, and its mask."""
    longest = max(map(len, rows))
    filled = [
        [*[0] * (longest - len(row)), *row] if left else [*row, *[0] * (longest - len(row))] for row in rows
    ]
    mask = [
        [*[0] * (longest - len(row)), *[1] * len(row)]
        if left
        else [*[1] * len(row), *[0] * (longest - len(row))]
        for row in rows
    ]
    kind = torch.long if all(isinstance(one, int) for row in rows for one in row) else torch.float64
    return torch.tensor(filled, dtype=kind), torch.tensor(mask)


def main() -> None:
    """Prints the table."""
    print(f"TRL {version('trl')}, PEFT {version('peft')}, transformers {version('transformers')}, float64\n")
    print("| loss | TRL | coserve | gradient's difference, to its greatest entry |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, compare in (("dpo", compare_dpo), ("kto", compare_kto), ("grpo", compare_grpo)):
            found = compare(Policy(Path(folder, name)), Path(folder))
            print(f"| {name} | {found.theirs:.10f} | {found.ours:.10f} | {found.gradient:.1e} |", flush=True)


if __name__ == "__main__":
    main()
