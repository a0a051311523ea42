"""Many LoRA adapters in one step: each answers as PEFT's model with that adapter alone does.

Ranks and targets differ, and so do how many rows each has; answers come and go, so that adapters enter and
leave the slots, which are few here. One adapter is broken, and spoils nobody else's answers.
"""

import itertools
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from coserve import Engine, EngineConfig
from coserve.adapters import slot_pools
from coserve.adapters.lora_batch import LoraBatch
from coserve.worker import cuda_graphs
from coserve.worker.cuda_graphs import Run
from coserve.worker.fused_pass import FusedPass
from methods import SHAPES, SMALL, with_peft
from mixed import SAMPLING, Logits, Mixture, make_engine
from models import Exact, logits_of, tiny

KINDS = {
    "one": {"r": 1, "lora_alpha": 3},
    "three": {"r": 3, "lora_alpha": 12},
    "four": {"r": 4, "lora_alpha": 4, "use_rslora": True},
    "four again": {"r": 4, "lora_alpha": 9},
    "eight": {"r": 8, "lora_alpha": 16},
    "seven": {"r": 7, "lora_alpha": 5},
    "first linear": {"r": 8, "lora_alpha": 16},
    "first linear too": {"r": 6, "lora_alpha": 16},
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
}
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj", "c_fc"],
    "gemma2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def oracles(
    name: str, folder: Path | None = None, dtype: torch.dtype = torch.float64
) -> dict[str | None, Logits]:
    """PEFT's models, each with one adapter, which are saved in `folder` if there is one; None is the base
    alone."""
    alone: dict[str | None, Logits] = {None: logits_with(tiny(name, dtype, vocab_size=SMALL))}
    for kind, fields in KINDS.items():
        targets = TARGETS[name][:1] if kind.startswith("first") else TARGETS[name]
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **fields)
        adapted = with_peft(name, config, dtype, vocab_size=SMALL)
        if folder is not None:
            adapted.save_pretrained(str(folder / kind))
        alone[kind] = logits_with(adapted)
    return alone


def logits_with(model: torch.nn.Module) -> Logits:
    def of(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad(), Exact():
            return logits_of(model, tokens)

    return of  # type: ignore[return-value]


@cache
def single() -> dict[str | None, Logits]:
    return oracles("llama", dtype=torch.float32)


@pytest.mark.local
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHAPES)
def test_each_answers_as_it_does_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 to 1e-9; and steps did take adapters of several pools together."""
    together: list[int] = []
    made = LoraBatch.__init__

    def counted(self: LoraBatch, adapters: Any, slots: Any = ()) -> None:
        made(self, adapters, slots)
        together.append(len(slots))

    monkeypatch.setattr(LoraBatch, "__init__", counted)
    alone = oracles(name, tmp_path)
    with Exact():
        mixture = Mixture(make_engine(name, torch.float64, tmp_path))
        mixture.run(list(alone), prompts=3)
    errors = mixture.errors(alone)
    assert errors.keys() == alone.keys() and max(errors.values()) <= 1e-9, errors
    assert max(together) >= 2, "several pools in one step"


@pytest.mark.local
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHAPES)
def test_decode_steps_from_what_a_graph_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps as on a GPU, whose graphs read nothing but the tensors that were there when they were
    captured: the plain twin computes from these anew. Rows are padded to buckets, tables grow, and steps have
    rows of several pools and of none."""
    replays: list[int] = []  # of each graph

    def record(work: Run) -> Run:
        def replay() -> torch.Tensor:
            replays[number] += 1
            return work()

        number = len(replays)
        replays.append(0)
        return replay

    pools: list[int] = []
    assign = slot_pools.LoraSlotPools.assign

    def noted(self: Any, *given: Any) -> Any:
        found = assign(self, *given)
        pools.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(FusedPass, "recorder", lambda _: record)
    monkeypatch.setattr(slot_pools, "_FIRST_SLOTS", 1)
    monkeypatch.setattr(cuda_graphs, "_WORTH", 1)
    monkeypatch.setattr(slot_pools.LoraSlotPools, "assign", noted)
    alone = oracles(name, tmp_path)
    with Exact():
        engine = make_engine(name, torch.float64, tmp_path)
        for kinds in ([*alone], ["three", None, "eight"], ["four"], [None]):
            mixture = Mixture(engine)
            mixture.run(kinds, prompts=3)
            errors = mixture.errors(alone)
            assert errors.keys() == {*kinds} and max(errors.values()) <= 1e-9, errors
    assert len([times for times in replays if times]) >= 4 and sum(replays) >= 12 and max(pools) >= 2


@pytest.mark.local
def test_a_broken_adapter_spoils_its_own_answers_only(tmp_path: Path) -> None:
    alone = oracles("llama", tmp_path)
    engine = make_engine("llama", torch.float32, tmp_path)
    broken = engine.adapters.weights("four again")
    for tensor in broken.parameters().values():
        tensor.fill_(math.nan)
    mixture = Mixture(engine)
    mixture.run(["eight", "four", "four again", "three"], prompts=2)
    spoilt = [answer for kind, answer in mixture.answers if kind == "four again"]
    assert all(math.isnan(row.top[0][1]) for answer in spoilt for row in answer.logprobs), "it is broken"
    mixture.answers = [(kind, answer) for kind, answer in mixture.answers if kind != "four again"]
    errors = mixture.errors(alone)
    assert len(errors) == 3 and max(errors.values()) <= mixture.allowed(alone, single()), errors


def test_few_slots_are_enough_and_versions_that_are_gone_hold_none(tmp_path: Path) -> None:
    """Two sequences run at once, so that a pool has two slots, and its adapters take turns there."""
    alone = oracles("llama", tmp_path)
    engine = Engine(
        tiny("llama", torch.float64, vocab_size=SMALL),  # whose adapters no kernel reads where they are
        EngineConfig(dtype="float64", calibrate=False, cache_tokens=1024, page_size=4, max_running=2),
    )
    kinds = ["four", "four again", "three", "eight", "seven"]
    for kind in kinds:
        engine.adapters.load(kind, tmp_path / kind)
    draws = random.Random(5)
    mixture = Mixture(engine)
    for kind in itertools.islice(itertools.cycle(kinds), 12):
        prompt = [draws.randrange(1, SMALL) for _ in range(draws.randint(2, 12))]
        mixture.answers.append((kind, engine.generate(prompt, kind, SAMPLING)))
    engine.run()
    errors = mixture.errors(alone)
    assert errors.keys() == set(kinds) and max(errors.values()) <= mixture.allowed(alone, single()), errors
    assert engine.executor.worker.slot_pools.nbytes > 0
    for kind in kinds:
        engine.adapters.unload(kind)
    assert not engine.executor.worker.slot_pools.adapters
