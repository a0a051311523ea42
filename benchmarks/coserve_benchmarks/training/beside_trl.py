"""DPO and GRPO beside TRL: loss and gradient of the same adapter on the same batch, both in float64.

    python -m coserve_benchmarks.training.beside_trl

TRL is none of coserve's extras: install it beside (with `datasets`), it is imported only here. TRL's own
trainers make the batch of pairs and compute their losses; coserve's are those of a training session.
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

_BETA: Final = 0.3  # of DPO
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
        self._engine.load_adapter("start", folder)
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
        before = self._engine.weights("start").parameters()
        ours = session.forward_backward(data, name, settings).result().loss / count
        session.optim_step(AdamParams(_HUGE, 0.0, 0.0, _HUGE)).result()
        after = self._engine.weights(adapter).parameters()
        largest = max(float(one.abs().max()) for one in theirs.values())
        apart = max(
            float(((before[key] - after[key]) / count - theirs[key]).abs().max()) for key in parameters
        )
        return Compared(float(loss), ours, apart / largest)

    def base_logprobs(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Log-probabilities of the targets under the base: under an adapter that changes nothing yet."""
        self._runs += 1
        session = self._engine.open_training(f"run-{self._runs}", LoRAConfig(rank=1))
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
    loss = trainer.compute_loss(trainer.model, batch)
    pairs = len(batch["input_ids"]) // 2
    order = [place for pair in range(pairs) for place in (pair, pairs + pair)]
    data = []
    for place in order:
        is_there = batch["attention_mask"][place].bool()
        tokens = tuple(batch["input_ids"][place][is_there].tolist())
        learned = batch["completion_mask"][place][is_there].tolist()
        pairs_of = zip(tokens[1:], learned[1:], strict=True)
        data.append(Datum(tokens, (*(token if wanted else IGNORED for token, wanted in pairs_of), IGNORED)))
    reference = policy.base_logprobs(data)
    data = [
        Datum(one.tokens, one.targets, {"reference": logprobs})
        for one, logprobs in zip(data, reference, strict=True)
    ]
    return policy.compare(loss, data, "dpo", {"beta": _BETA}, pairs)


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
    draw = random.Random("grpo")
    prompts = [[draw.randrange(5, 500) for _ in range(size)] for size in (5, 9) for _ in range(_GROUP)]
    answers = [[draw.randrange(5, 500) for _ in range(draw.randint(3, 12))] for _ in prompts]
    data = [
        Datum((*prompt, *answer[:-1]), (*[IGNORED] * (len(prompt) - 1), *answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    sampled = [
        [logprob + draw.gauss(0.0, 0.3) for logprob in logprobs[len(prompt) - 1 :]]
        for prompt, logprobs in zip(prompts, policy.base_logprobs(data), strict=True)
    ]
    advantages = [draw.gauss(0.0, 1.0) for _ in prompts]
    count = sum(map(len, answers))
    prompt_ids, prompt_mask = _padded(prompts, left=True)
    completion_ids, completion_mask = _padded(answers)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": _padded(sampled)[0].double(),
        "num_items_in_batch": torch.tensor(count),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    data = [
        Datum(
            one.tokens,
            one.targets,
            {
                "logprobs": (*[0.0] * (len(prompt) - 1), *logprobs),
                "advantages": (*[0.0] * (len(prompt) - 1), *[advantage] * len(logprobs)),
            },
        )
        for one, prompt, logprobs, advantage in zip(data, prompts, sampled, advantages, strict=True)
    ]
    clip = {"clip_low_threshold": 1.0 - _CLIP, "clip_high_threshold": 1.0 + _CLIP}
    return policy.compare(loss, data, "ppo", clip, count)


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
        for name, compare in (("dpo", compare_dpo), ("grpo", compare_grpo)):
            found = compare(Policy(Path(folder, name)), Path(folder))
            print(f"| {name} | {found.theirs:.10f} | {found.ours:.10f} | {found.gradient:.1e} |", flush=True)


if __name__ == "__main__":
    main()
