"""Blocks whose parameters exist within a visit only: the same answers and the same training."""

import pytest
import torch
from torch import Tensor

from coserve import Engine, LoRAConfig
from coserve.core.sequence import Direction
from coserve.model.block import Block, Resident
from methods import SMALL, engine_of
from mixed import everything, make_engine
from models import Exact

DORA = {"dora": LoRAConfig(rank=3, dora=True)}


class Away:
    """Parameters that do not exist between visits: whoever reads them there reads no numbers."""

    def __init__(self, block: Block) -> None:
        tensors = (tensor for held in block.parameters().values() for tensor in held.tensors.values())
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


def send_away(engine: Engine) -> list[Away]:
    made = []
    for block in engine.base.chain:
        assert isinstance(block.residence, Resident)
        block.residence = away = Away(block)
        made.append(away)
    return made


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"quantize": "8bit"}])
def test_other_executors_and_placements_visit_too(fields: dict[str, object]) -> None:
    def make() -> Engine:
        return engine_of("llama", config=fields, vocab_size=SMALL)

    wanted, engine = everything(make(), DORA), make()
    send_away(engine)
    found = everything(engine, DORA)
    close = 0.0 if "deterministic" in fields else 1e-3
    for key, numbers in wanted.items():
        assert float((found[key].double() - numbers.double()).abs().max()) <= close, key


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_nobody_uses_parameters_outside_of_a_visit(name: str) -> None:
    with Exact():
        wanted = everything(make_engine(name, torch.float64), DORA)
        engine = make_engine(name, torch.float64)
        blocks = send_away(engine)
        found = everything(engine, DORA)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert torch.allclose(found[key].double(), numbers.double(), rtol=1e-7, atol=1e-9), key
    assert all({Direction.INFER, Direction.BACKWARD} <= set(block.visits) for block in blocks)
