"""A model whose parameters exist within visits only: the same answers and the same training."""

import pytest
import torch
from torch import Tensor

from coserve import Engine, LoRAConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.sequence import Direction
from coserve.model.base import Base
from coserve.model.block import ModelPart, Residence, Resident
from coserve.model.load import load_base
from coserve.train.proof import prove_training
from methods import SMALL, engine_of
from mixed import TRAINED, everything, make_engine
from models import Exact, tiny

KINDS = {**TRAINED, "dora": LoRAConfig(rank=3, dora=True)}
AT_ENDS = {
    "llama": ("embed_tokens", "lm_head"),
    "gpt2": ("wte",),
    "mixtral": ("lm_head",),
    "opt": ("embed_tokens",),
}
CHANGES = {"opt": {"word_embed_proj_dim": 32}}  # a linear between the embedding and the first layer


class Away(Residence):
    """Parameters that do not exist between visits: whoever reads them there reads no numbers."""

    def __init__(self, part: ModelPart) -> None:
        tensors = (tensor for held in part.parameters().values() for tensor in held.tensors.values())
        self._held = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.visits: list[Direction] = []
        self._is_here = True
        self.leave()

    def enter(self, direction: Direction) -> None:
        assert not self._is_here, "the outermost visit brings them in"
        self._is_here = True
        self.visits.append(direction)
        for tensor, numbers in self._held:
            tensor.data.copy_(numbers)

    def leave(self) -> None:
        assert self._is_here
        self._is_here = False
        for tensor, _ in self._held:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 99)

    def outside(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def send_away(base: Base) -> list[Away]:
    made = []
    for part in (*base.chain, base.chain.ends):
        assert isinstance(part.residence, Resident)
        part.residence = away = Away(part)
        made.append(away)
    return made


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"quantize": "8bit"}])
def test_other_executors_and_placements_visit_too(fields: dict[str, object]) -> None:
    def make() -> Engine:
        return engine_of("llama", config=fields, vocab_size=SMALL)

    wanted, engine = everything(make(), KINDS), make()
    send_away(engine.executor.worker.base)
    found = everything(engine, KINDS)
    close = 0.0 if "deterministic" in fields else 1e-3
    for key, numbers in wanted.items():
        assert float((found[key].double() - numbers.double()).abs().max()) <= close, key


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", AT_ENDS)
def test_nobody_uses_parameters_outside_of_a_visit(name: str) -> None:
    kinds, changes = {"at the ends": LoRAConfig(rank=2, targets=AT_ENDS[name])}, CHANGES.get(name, {})
    kinds |= {**KINDS, "words": PromptTuningConfig(3, text=(1, 2))}
    if name == "opt":  # whose feed-forward is no module
        kinds = {kind: config for kind, config in kinds.items() if "bottleneck" not in kind}
    with Exact():
        wanted = everything(make_engine(name, torch.float64, **changes), kinds)
        engine = make_engine(name, torch.float64, **changes)
        parts = send_away(engine.executor.worker.base)
        found = everything(engine, kinds)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert torch.allclose(found[key].double(), numbers.double(), rtol=1e-7, atol=1e-9), key
    assert all({Direction.INFER, Direction.BACKWARD} <= set(part.visits) for part in parts)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gemma4_text"])
def test_the_proof_of_training_visits_too(name: str) -> None:
    base = load_base(tiny(name))
    parts = send_away(base)
    prove_training(base)
    assert sum(Direction.BACKWARD in part.visits for part in parts) > 1
