"""Whoever needs more of a base than its placements offer is refused with the reason, before it runs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.adapters.files import read_adapter
from coserve.adapters.methods import method_of
from coserve.errors import NotOffered
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.placement import Offer, Placement
from coserve.train.example import Example
from coserve.train.proof import prove_training
from methods import with_peft
from models import tiny

PATH = "model.layers.1.mlp.up_proj"


class Distant(Placement):
    """Multiplies, and offers what else it is told to."""

    def __init__(self, placement: Placement, *offers: Offer) -> None:
        self._placement, self.bias = placement, placement.bias
        self.offers = frozenset(offers)

    def forward(self, x: Tensor) -> Tensor:
        return self._placement.forward(x)

    def backward(self, grad: Tensor) -> Tensor:
        return self._placement.backward(grad) if Offer.BACKWARD in self.offers else super().backward(grad)

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def send(base: Base, *offers: Offer) -> Base:
    """One linear is computed elsewhere."""
    base.linears[PATH].placement = Distant(base.linears[PATH].placement, *offers)
    return base


@pytest.mark.parametrize(
    ("offer", "ask"),
    [
        (Offer.ROW_NORMS, lambda base: base.frozen.weights(PATH)),
        (Offer.WEIGHT, lambda base: base.frozen.dense(PATH)),
        (Offer.WEIGHT, lambda base: base.frozen.is_own(PATH, torch.zeros(96, 64), torch.float32)),
        (Offer.BACKWARD, prove_training),
    ],
)
def test_the_reason_says_what_is_missing_where(offer: Offer, ask: Callable[[Base], object]) -> None:
    base = send(load_base(tiny("llama")), *set(Offer) - {offer})
    with pytest.raises(NotOffered) as refused:
        ask(base)
    assert str(refused.value) == f"{PATH} is computed by a Distant, which does not offer {offer.value}"


def test_methods_that_need_no_more_than_products_are_at_home() -> None:
    base = send(load_base(tiny("llama")), Offer.BACKWARD)
    prove_training(base)
    draws = torch.Generator().manual_seed(0)
    for config in (LoRAConfig(), LoRAConfig(dora=True, targets=("gate_proj",))):
        assert method_of(config).fresh(config, base, draws).bypasses
    for config in (LoRAConfig(dora=True), LoRAConfig(modules_to_save=("up_proj",))):
        with pytest.raises(NotOffered, match=PATH):
            method_of(config).fresh(config, base, draws)


def test_a_file_is_refused_when_it_is_read_and_a_job_when_it_is_asked_for(tmp_path: Path) -> None:
    """Not in a step, which others share."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, use_dora=True, target_modules=["up_proj"])
    with_peft("llama", config, torch.float32).save_pretrained(str(tmp_path))
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=64))
    read_adapter(tmp_path, "mine", engine.base, engine.base.dtype, engine.base.device)
    send(engine.executor.worker.base, Offer.BACKWARD)
    with pytest.raises(NotOffered, match=PATH):
        engine.adapters.load("theirs", tmp_path)
    examples = [Example((1, 2, 3), (2, 3, -100))]
    with pytest.raises(NotOffered, match=PATH):
        engine.finetune(examples, "mine", LoRAConfig(dora=True), TrainingConfig(max_steps=1))
    engine.finetune(examples, "mine", LoRAConfig(), TrainingConfig(max_steps=1)).result()
