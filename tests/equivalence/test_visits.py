"""Blocks whose parameters exist within a visit only: the same answers and the same training."""

import pytest
import torch
from torch import Tensor

from coserve import Engine, LoRAConfig
from coserve.core.sequence import Direction
from coserve.engine.handles import Completion
from coserve.model.block import Block, Resident
from methods import SMALL, engine_of
from mixed import SAMPLING, TRAINED, TRAINING, make_engine, make_examples, start, trained
from models import Exact

DORA = LoRAConfig(rank=3, dora=True)
KINDS = (*TRAINED, "dora")


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


def everything(engine: Engine) -> dict[str, Tensor]:
    """What an engine answers while it trains adapters of every method, and these."""
    jobs = [start(engine, kind) for kind in TRAINED]
    jobs.append(engine.finetune(make_examples("dora"), "tuned dora", DORA, TRAINING))
    answers = [engine.generate([1 + n, 5, 9, 2], sampling=SAMPLING) for n in range(3)]
    for job in jobs:
        job.result()
    answers += [engine.generate([3, 1, 4], f"tuned {kind}", SAMPLING) for kind in KINDS]
    found = {f"{kind} {name}": x for kind in KINDS for name, x in trained(engine, kind).items()}
    return found | {f"answer {n}": _numbers(answer.result()) for n, answer in enumerate(answers)}


def _numbers(answer: Completion) -> Tensor:
    assert len(answer.tokens) == 4
    return torch.tensor([logprobs.chosen for logprobs in answer.logprobs], dtype=torch.float64)


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"quantize": "8bit"}])
def test_other_executors_and_placements_visit_too(fields: dict[str, object]) -> None:
    def make() -> Engine:
        return engine_of("llama", config=fields, vocab_size=SMALL)

    wanted, engine = everything(make()), make()
    send_away(engine)
    found = everything(engine)
    close = 0.0 if "deterministic" in fields else 1e-3
    for key, numbers in wanted.items():
        assert float((found[key].double() - numbers.double()).abs().max()) <= close, key


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_nobody_uses_parameters_outside_of_a_visit(name: str) -> None:
    with Exact():
        wanted = everything(make_engine(name, torch.float64))
        engine = make_engine(name, torch.float64)
        blocks = send_away(engine)
        found = everything(engine)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert torch.allclose(found[key].double(), numbers.double(), rtol=1e-7, atol=1e-9), key
    assert all({Direction.INFER, Direction.BACKWARD} <= set(block.visits) for block in blocks)
