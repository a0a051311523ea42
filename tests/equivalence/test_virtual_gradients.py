"""Gradients of virtual tokens, window by window, against whole sequences in float64: at most 1e-10.

The oracles are PEFT's own prompt learning, and for what PEFT cannot combine transformers' model with a cache
and embeddings given by hand.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SavePolicy, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Part, Place
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods import method_of
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.adapters.virtual import embedding_of
from coserve.core.plan import BasePlan
from coserve.core.sequence import Direction, Span
from coserve.schedule.segments import training_segment
from coserve.train.example import Example
from models import Exact, lora_parameters, prompts, tiny, with_lora
from training_runs import TrainingRun, adopt
from virtual import KINDS, encoder_of, logits_behind, own_logits, with_virtual

TOLERANCE = 1e-10
NAMES = ("llama", "gpt2", "gemma2", "mixtral")  # gemma2: sliding windows of 20 and capped scores
LENGTHS = (9, 31, 1, 14)
OURS: Mapping[str, object] = {
    "prefix": PrefixTuningConfig(7),
    "projected prefix": PrefixTuningConfig(6, projection=True, hidden=24),
    "prompt": PromptTuningConfig(9),
    "p-tuning": PTuningConfig(5, hidden=20),
    "p-tuning by LSTM": PTuningConfig(4, encoder="LSTM", hidden=12),
}
NOTHING: Mapping[str, object] = {}
_HUGE = 1e14

Gradients = dict[str, Tensor]


@dataclass
class Case:
    """Examples, an adapter with random weights, and what an oracle says of them."""

    engine: Engine  # idle; its executor is driven by hand
    examples: list[Example]
    adapter: AdapterVersion
    loss: float
    wanted: Gradients


def make_examples(name: str) -> list[Example]:
    draws = random.Random(f"virtual/{name}")
    made = []
    for tokens in prompts(draws, LENGTHS):
        labels = [t if draws.random() < 0.8 else -100 for t in tokens[1:]]
        made.append(Example(tuple(tokens), (*labels, -100)))
    return made


def loss_of(examples: Sequence[Example], logits: Callable[[list[int]], Tensor]) -> Tensor:
    count = sum(example.label_count for example in examples)
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        labels = torch.tensor(example.labels)
        own = logits(list(example.tokens))
        total = total + F.cross_entropy(own, labels, ignore_index=-100, reduction="sum") / count
    return total


def engine_of(name: str, **changes: object) -> Engine:
    return Engine(tiny(name, torch.float64, **changes), EngineConfig(calibrate=False, cache_tokens=64))


def part_of(engine: Engine, config: object, weights: Mapping[str, Tensor]) -> Part:
    """A part of these settings with PEFT's weights, whose only embedding is `prompt_embeddings` here."""
    part = method_of(config).fresh(config, engine.base, torch.Generator())
    names = [name for name, _ in part.parameters()]
    if len(names) == 1:
        weights = {"prompt_embeddings": weights["embedding.weight"]}
    (place,) = part.bypasses
    return part.with_parameters({f"{place.path}.{n}": w.detach().clone() for n, w in weights.items()})


def peft_case(name: str, kind: str, changes: Mapping[str, object] = NOTHING, **fields: object) -> Case:
    """`changes` are of the model's configuration, `fields` PEFT's."""
    examples, engine = make_examples(name), engine_of(name, **changes)
    oracle = tiny(name, torch.float64, **changes)
    oracle.set_attn_implementation("eager")
    adapted = with_virtual(oracle, kind, **fields)
    parameters = encoder_of(adapted)
    loss = loss_of(examples, lambda tokens: own_logits(adapted, tokens))
    found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    part = part_of(engine, OURS[kind], parameters)
    wanted = {n: found[_peft_name(n, engine)] for n, _ in part.parameters()}
    return Case(engine, examples, AdapterVersion("probe", 0, (part,)), float(loss.detach()), wanted)


def _peft_name(name: str, engine: Engine) -> str:
    path = embedding_of(engine.base).path
    return name.removeprefix(path + ".").replace("prompt_embeddings", "embedding.weight")


class Passage:
    """The case's examples as one micro-batch, sent through the executor window by window.

    Gradients are read off one optimizer step that is plain descent: AdamW with an epsilon that dwarfs every
    gradient and no memory subtracts learning rate / epsilon (here 1e6) times the gradient.
    """

    def __init__(self, case: Case, keep: SavePolicy = SavePolicy.INPUTS) -> None:
        self.case, base = case, case.engine.base
        self.depth = base.depth
        config = TrainingConfig(
            learning_rate=1e6 * _HUGE,
            epsilon=_HUGE,
            betas=(0.0, 0.0),
            schedule="constant",
            warmup_ratio=0.0,
            max_grad_norm=None,
            batch_size=len(LENGTHS),
            rows=sum(LENGTHS) + case.adapter.virtual.prompt_count,
            keep=keep,
        )
        self.run = TrainingRun(
            base, case.engine.executor.worker.loaded, "probe", case.adapter, case.examples, config
        )
        adopt(case.engine, self.run)
        (self.micro_batch,) = self.run.next_step(itertools.count(1))

    def go(self, direction: Direction, start: int, rows: int, span: Span) -> None:
        segment = training_segment(self.micro_batch, start, rows, direction, span)
        self.case.engine.executor.run(BasePlan(training=(segment,)))

    def travel(self, there: int, back: int, draws: random.Random | None) -> None:
        """In windows of `there` rows forward and `back` rows back, whose layers `draws` cuts at random."""
        for start, rows in self.windows(there):
            for span in self.spans(draws):
                self.go(Direction.TRAIN_FORWARD, start, rows, span)
        tail = Span(self.depth, self.depth + 1)
        self.go(Direction.LOSS, 0, self.micro_batch.length, tail)
        for start, rows in reversed(list(self.windows(back))):
            for span in reversed(list(self.spans(draws))):
                self.go(Direction.BACKWARD, start, rows, span)

    def windows(self, size: int) -> Iterator[tuple[int, int]]:
        whole = self.micro_batch.length
        for start in range(0, whole, size):
            yield start, min(size, whole - start)

    def spans(self, draws: random.Random | None) -> Iterator[Span]:
        first = 0
        while first < self.depth:
            last = self.depth if draws is None else draws.randint(first + 1, self.depth)
            yield Span(first, last)
            first = last

    def error(self) -> float:
        """The worst relative error of any gradient, and of the loss."""
        result = self.case.engine.executor.run(BasePlan(updates=(self.run.supervised.optim_step,)))
        updated = self.case.engine.executor.worker.loaded.find(result.updated["probe"].version)
        before, after = self.case.adapter.parameters(), updated.parameters()
        errors = [abs(result.updated["probe"].loss - self.case.loss) / self.case.loss]
        assert before.keys() == self.case.wanted.keys()
        for name, wanted in self.case.wanted.items():
            got = (before[name] - after[name]) / 1e6
            errors.append(float((got - wanted).norm() / wanted.norm().clamp_min(1e-30)))
        return max(errors)


# Rows of a window there and back, whether layers are cut, and the save policy.
WAYS: Mapping[str, tuple[int, int, bool, SavePolicy]] = {
    "whole": (1000, 1000, False, SavePolicy.EVERYTHING),
    "small": (6, 6, True, SavePolicy.INPUTS),
    "cut differently": (11, 4, True, SavePolicy.EVERYTHING),
    "row by row": (1, 1, False, SavePolicy.INPUTS),
}


def errors_of(case: Case, ways: Sequence[str], seed: str) -> dict[str, float]:
    found = {}
    for way in ways:
        there, back, cut, keep = WAYS[way]
        passage = Passage(case, keep)
        passage.travel(there, back, random.Random(f"{seed}/{way}") if cut else None)
        found[way] = passage.error()
    return found


@pytest.mark.sample(1, per="kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_windows_give_peft_s_gradients(name: str, kind: str) -> None:
    ways = list(WAYS) if name == "gemma2" and "by LSTM" not in kind else list(WAYS)[1:3]
    with Exact():
        errors = errors_of(peft_case(name, kind), ways, f"{name}/{kind}")
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_prompts_of_embeddings_that_are_narrower_than_layers(kind: str) -> None:
    """PEFT has to be told the width."""
    with Exact():
        case = peft_case("opt", kind, {"word_embed_proj_dim": 32}, token_dim=32)
        errors = errors_of(case, ["small"], f"narrow/{kind}")
    assert max(errors.values()) <= TOLERANCE, errors


def combined_case(name: str) -> Case:
    """Prefix, prompt and LoRA as one adapter; the cache and the embeddings are given to transformers."""
    examples, engine = make_examples(name), engine_of(name)
    oracle = tiny(name, torch.float64)
    oracle.set_attn_implementation("eager")
    lora = with_lora(oracle, seed=3)
    draws = torch.Generator().manual_seed(4)
    parts = [
        method_of(config).fresh(config, engine.base, draws)
        for config in (PrefixTuningConfig(5), PromptTuningConfig(6))
    ]
    flat, rows = (next(part.parameters())[1].double().requires_grad_() for part in parts)
    pairs = lora_parameters(lora)
    leaves = [flat, rows, *(p.requires_grad_() for pair in pairs.values() for p in pair)]
    loss = loss_of(examples, lambda tokens: logits_behind(lora, flat, rows, tokens))
    gradients = torch.autograd.grad(loss, leaves)
    config = LoRAConfig(rank=4, alpha=6.0)
    placed = {
        Place(path): LoRABypass(a.detach().clone(), b.detach().clone(), 1.5) for path, (a, b) in pairs.items()
    }
    adapter = AdapterVersion("probe", 0, (*parts, Part("lora", config, placed)))
    values = [flat, rows, *(p for pair in pairs.values() for p in pair)]
    names = list(adapter.parameters())
    adapter = adapter.with_parameters({n: v.detach().clone() for n, v in zip(names, values, strict=True)})
    wanted = dict(zip(names, gradients, strict=True))
    return Case(engine, examples, adapter, float(loss.detach()), wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_prefix_prompt_and_lora_in_one_adapter(name: str) -> None:
    with Exact():
        ways = list(WAYS) if name == "llama" else list(WAYS)[:3]
        errors = errors_of(combined_case(name), ways, name)
    assert max(errors.values()) <= TOLERANCE, errors
