"""Adapters of every method, each with a model that knows it alone, and an engine that serves and trains all
of them at once.

What is served is compared with models that share nothing with coserve: PEFT's, and plain torch modules where
PEFT has none. (PEFT's own mixed batches are silently wrong for IA3 and prefixes.) What is trained is compared
with an engine that does nothing else.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config as PeftIA3Config
from peft import LNTuningConfig as PeftLNTuningConfig
from peft import LoraConfig
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.plan import BasePlan, BaseResult
from coserve.engine.completion import Completion
from coserve.engine.finetuning import FineTuning
from coserve.train.example import Example
from methods import SMALL, with_peft
from models import Exact, logits_of, tiny
from plain import with_biases, with_bottlenecks, with_ia3_and_lora
from rounding import SLACK, largest
from steps import run_steps_by
from virtual import own_logits, with_virtual

VIRTUAL = ("prefix", "projected prefix", "prompt", "p-tuning")
TRAINED: Mapping[str, Any] = {
    "lora": LoRAConfig(rank=4),
    "larger lora": LoRAConfig(rank=9, rslora=True, dropout=0.2),
    "ia3": IA3Config(),
    "bottleneck": BottleneckConfig(width=5, activation="gelu"),
    "bitfit": BitFitConfig(),
    "ln_tuning": LNTuningConfig(),
    "prefix": PrefixTuningConfig(5),
    "prompt": PromptTuningConfig(6),
    "p-tuning": PTuningConfig(4, hidden=16),
    "ia3 and lora": (IA3Config(), LoRAConfig(rank=3)),
    "prefix, bottleneck and bitfit": (PrefixTuningConfig(3), BottleneckConfig(width=4), BitFitConfig("all")),
}
STEPS = 2
TRAINING = TrainingConfig(
    learning_rate=5e-3, batch_size=2, max_steps=STEPS, warmup_ratio=0.0, rows=48, weight_decay=0.01,
    epsilon=1e-3,  # a bias of keys has no gradient but rounding, which AdamW would blow up to full steps
)  # fmt: skip
_SCALED = {
    "llama": ["k_proj", "v_proj", "down_proj"],
    "qwen3": ["k_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "mixtral": ["k_proj", "v_proj"],
    "gemma2": ["q_proj", "v_proj", "down_proj"],
}
_CUTS = {
    "max_training_rows": 32, "min_training_rows": 12, "max_prefill_rows": 32, "min_prefill_rows": 4,
    "slowdown": None,  # jobs get somewhere beside answers that never end
}  # fmt: skip
SAMPLING = SamplingParams(max_tokens=4, logprobs=SMALL, prompt_logprobs=SMALL, ignore_eos=True)

Logits = Callable[[Sequence[int]], Tensor]  # [rows, vocabulary] of a sequence's own tokens


def oracles(
    name: str, folder: Path | None = None, dtype: torch.dtype = torch.float64
) -> dict[str | None, Logits]:
    """Models with one adapter each, which are saved in `folder` if there is one; None is the base alone."""
    fields: dict[str, Any] = {"dtype": dtype, "vocab_size": SMALL}
    targets, task = _SCALED[name], "CAUSAL_LM"
    lora = LoraConfig(task_type=task, r=4, lora_alpha=12, target_modules=targets)
    larger = LoraConfig(task_type=task, r=11, lora_alpha=5, target_modules=targets[-1:])
    ia3 = PeftIA3Config(task_type=task, target_modules=targets, feedforward_modules=targets[-1:])
    norms = [n.removesuffix(".weight") for n, _ in tiny(name).named_parameters() if n.endswith("norm.weight")]
    norms += [path for path, _ in tiny(name).named_modules() if "ln_" in path]
    made: dict[str, Any] = {
        "lora": with_peft(name, lora, **fields),
        "larger lora": with_peft(name, larger, **fields),
        "ia3": with_peft(name, ia3, **fields),
        "ln_tuning": with_peft(name, PeftLNTuningConfig(task_type=task, target_modules=norms), **fields),
        "houlsby": with_bottlenecks(name, layout="houlsby", activation="relu", **fields),
        "pfeiffer": with_bottlenecks(name, layout="pfeiffer", activation="silu", **fields),
        "bitfit": with_biases(name, paths=norms, **fields),
        "ia3 and lora": with_ia3_and_lora(name, **fields),
    }
    for kind in VIRTUAL:
        made[kind] = with_virtual(tiny(name, dtype, vocab_size=SMALL), kind)
    if folder is not None:
        for kind, model in made.items():
            model.save_pretrained(str(folder / kind))
    alone: dict[str | None, Logits] = {None: _logits(tiny(name, dtype, vocab_size=SMALL), False)}
    return alone | {kind: _logits(model, kind in VIRTUAL) for kind, model in made.items()}


def _logits(model: Any, virtual: bool) -> Logits:
    def of(tokens: Sequence[int]) -> Tensor:
        with torch.no_grad(), Exact():
            return own_logits(model, list(tokens)) if virtual else logits_of(model, tokens)

    return of


def make_engine(name: str, dtype: torch.dtype, folder: Path | None = None, **changes: Any) -> Engine:
    """Small windows and chunks, so that everything is cut; all adapters of `folder` are loaded."""
    config = EngineConfig(calibrate=False, cache_tokens=2048, page_size=4, scheduler=_CUTS)
    engine = Engine(tiny(name, dtype, vocab_size=SMALL, **changes), config)
    for adapter in sorted(folder.iterdir()) if folder else ():
        engine.adapters.load(adapter.name, adapter)
    return engine


def make_examples(kind: str) -> list[Example]:
    draws = random.Random(f"mixed/{kind}")
    made = []
    for _ in range(2 * STEPS):
        tokens = [draws.randrange(1, SMALL) for _ in range(draws.randint(3, 30))]
        labels = [t if draws.random() < 0.8 else -100 for t in tokens[1:]]
        made.append(Example(tuple(tokens), (*labels[:-1], tokens[-1], -100)))
    return made


def start(engine: Engine, kind: str, start_from: str | None = None) -> FineTuning:
    """A job that trains `tuned kind`, on from another adapter where one is given."""
    config = TRAINED.get(kind, ())
    return engine.finetune(make_examples(kind), f"tuned {kind}", config, TRAINING, start_from)


def everything(
    engine: Engine, configs: Mapping[str, Any], training: TrainingConfig = TRAINING
) -> dict[str, Tensor]:
    """Answers of an engine while it trains an adapter of each of these settings, and the adapters."""
    jobs = [
        engine.finetune(make_examples(k), f"tuned {k}", config, training) for k, config in configs.items()
    ]
    answers = [engine.generate([1 + n, 5, 9, 2], sampling=SAMPLING) for n in range(3)]
    for job in jobs:
        job.result()
    answers += [engine.generate([3, 1, 4], f"tuned {kind}", SAMPLING) for kind in configs]
    found = {f"{kind} {name}": x for kind in configs for name, x in trained(engine, kind).items()}
    return found | {f"answer {n}": _chosen(answer.result()) for n, answer in enumerate(answers)}


def _chosen(answer: Completion) -> Tensor:
    assert len(answer.tokens) == 4
    return torch.tensor([logprobs.chosen for logprobs in answer.logprobs], dtype=torch.float64)


def trained(engine: Engine, kind: str) -> dict[str, Tensor]:
    return engine.adapters.weights(f"tuned {kind}").parameters()


@dataclass
class Mixture:
    """An engine's run, and what was in its steps together: (adapters answering, jobs training)."""

    engine: Engine
    answers: list[tuple[str | None, Completion]] = field(default_factory=list)
    steps: list[tuple[set[str | None], set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.engine.executor.run

        def watched(plan: BasePlan) -> BaseResult:
            answering = {segment.adapter for segment in plan.inference}
            self.steps.append((answering, {segment.job for segment in plan.training}))
            return run(plan)

        run_steps_by(self.engine, watched)

    def run(self, kinds: Sequence[str | None], jobs: Sequence[FineTuning] = (), prompts: int = 2) -> None:
        """At least `prompts` answers for each adapter, and more while jobs are running."""
        draws = random.Random("mixed/prompts")
        waiting = itertools.cycle(kinds)
        while len(self.answers) < prompts * len(kinds) or any(job.status == "running" for job in jobs):
            if len(self.engine.completions) < len(kinds):
                kind = next(waiting)
                prompt = [draws.randrange(1, SMALL) for _ in range(draws.randint(2, 30))]
                self.answers.append((kind, self.engine.generate(prompt, kind, SAMPLING)))
            if len(self.engine.completions) == len(kinds) or len(self.answers) >= prompts * len(kinds):
                self.engine.step()
        self.engine.run()

    def errors(self, alone: Mapping[str | None, Logits]) -> dict[str | None, float]:
        """The largest difference of any log-probability, of all of the vocabulary, by adapter; relative to it
        where it is beyond one."""
        return self._errors(alone, _served)

    def allowed(self, alone: Mapping[str | None, Logits], single: Mapping[str | None, Logits]) -> float:
        """The largest error allowed in float32: SLACK times that of `single`, the same oracles in float32 on
        the same tokens."""

        def theirs(kind: str | None, completion: Completion) -> Tensor:
            return single[kind](_tokens(completion)).log_softmax(-1)

        return SLACK * max(self._errors(alone, theirs).values())

    def _errors(
        self, alone: Mapping[str | None, Logits], answer: Callable[[str | None, Completion], Tensor]
    ) -> dict[str | None, float]:
        found: dict[str | None, float] = {}
        for kind, completion in self.answers:
            if kind in alone:
                exact = alone[kind](_tokens(completion)).log_softmax(-1)
                error = (answer(kind, completion).double() - exact) / exact.abs().clamp_min(1.0)
                found[kind] = largest([found.get(kind, 0.0), float(error.abs().max())])
        return found


def _tokens(completion: Completion) -> list[int]:
    """Tokens that something was asked after."""
    return [*completion.sequence.request.prompt, *completion.tokens][:-1]


def _served(kind: str | None, completion: Completion) -> Tensor:
    """Log-probabilities [rows, SMALL]."""
    rows = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(rows) == len(_tokens(completion))
    found = torch.full((len(rows), SMALL), float("nan"), dtype=torch.float64)
    for row, of_row in enumerate(rows):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found
