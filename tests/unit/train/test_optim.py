"""AdamW's moments: wherever they rest, the same bits."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.errors import JobError
from coserve.train.example import Example
from coserve.train.optim import Optimizer
from coserve.train.shelf import FileShelf, HostShelf, MakeShelf, shelf_for
from models import tiny

SHAPES = {"a": (7, 33), "b": (129,), "late": (5, 3), "never": (2, 2)}


def shelves(folder: Path) -> dict[str, MakeShelf | None]:
    cpu = torch.device("cpu")
    return {
        "none": None,
        "file": lambda weights: FileShelf(weights, str(folder)),
        "host": lambda weights: HostShelf(weights, cpu),
    }


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}


def make(own: Mapping[str, Tensor], shelf: MakeShelf | None) -> Optimizer:
    return Optimizer(own, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.1, make_shelf=shelf)


def train(own: Mapping[str, Tensor], optimizer: Optimizer, steps: range) -> None:
    """One of the weights has its first gradient in the third step, one never has any."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, weight in own.items():
            gradient = torch.randn(weight.shape, generator=generator)
            if name != "never" and (name != "late" or step >= 2):
                weight.grad = gradient
        optimizer.step(1e-2)


@pytest.mark.parametrize("kind", ["file", "host"])
def test_moments_that_rest_elsewhere_change_no_bit(kind: str, tmp_path: Path) -> None:
    found = {}
    for name in ("none", kind):
        own = weights()
        optimizer = make(own, shelves(tmp_path)[name])
        train(own, optimizer, range(5))
        found[name] = {**own, **optimizer.moments()}
    assert found["none"].keys() == found[kind].keys() and "never.exp_avg" not in found[kind]
    assert all(torch.equal(tensor, found[kind][name]) for name, tensor in found["none"].items())


@pytest.mark.parametrize("kind", ["none", "file", "host"])
def test_moments_can_be_taken_up_again(kind: str, tmp_path: Path) -> None:
    whole, first = weights(), weights()
    train(whole, make(whole, None), range(6))
    optimizer = make(first, shelves(tmp_path)[kind])
    train(first, optimizer, range(3))
    kept = {name: moment.clone() for name, moment in optimizer.moments().items()}
    second = {name: weight.detach().clone().requires_grad_() for name, weight in first.items()}
    again = make(second, shelves(tmp_path)[kind])
    again.restore(kept)
    train(second, again, range(3, 6))
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_only_what_is_beside_the_weights_counts(tmp_path: Path) -> None:
    bytes_of = {}
    for kind, shelf in shelves(tmp_path).items():
        own = weights()
        optimizer = make(own, shelf)
        train(own, optimizer, range(3))
        bytes_of[kind] = optimizer.nbytes
    counts = 3 * 4  # one number for each weight that had a gradient
    moments = 2 * 4 * (7 * 33 + 129 + 15)
    weighed = 4 * (7 * 33 + 129 + 15 + 4)
    assert bytes_of == {
        "none": weighed + counts + moments,
        "file": weighed + counts,
        "host": weighed + counts,
    }


def test_an_update_that_was_cut_short_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own, wanted = weights(), weights()
    optimizer = make(own, None)

    def no_memory(*_: object, **__: object) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros_like", no_memory)
        with pytest.raises(RuntimeError, match="allocate"):
            train(own, optimizer, range(1))
    optimizer.drop_gradients()
    assert not optimizer.moments() and all(weight.grad is None for weight in own.values())
    train(own, optimizer, range(4))
    train(wanted, make(wanted, None), range(4))
    assert all(torch.equal(wanted[name], own[name]) for name in own)


def test_a_folder_without_room_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be put into"):
        FileShelf(weights(), str(tmp_path / "missing"))


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    own = weights()
    optimizer = make(own, shelf_for(torch.device("cpu"), str(tmp_path)))
    train(own, optimizer, range(2))
    assert not list(tmp_path.iterdir())


def trained(offload: bool, folder: Path, look: Callable[[Engine], None]) -> list[Tensor]:
    config = EngineConfig(calibrate=False, cache_tokens=64, offload=offload, scratch=str(folder))
    engine = Engine(tiny("llama"), config)
    data = [Example((5, 6, 7, 8, 9), (6, 7, 8, 9, -100))] * 6
    job = engine.finetune(data, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2))
    while len(job.history) < 2:
        engine.step()
    look(engine)
    job.result()
    return list(engine.bank.find("mine").parameters().values())


def test_a_job_learns_the_same_bits_with_less_memory(tmp_path: Path) -> None:
    reserved: list[int] = []

    def look(engine: Engine) -> None:
        reserved.append(engine.admission.ledger.of("job job-1"))

    ours, theirs = (trained(offload, tmp_path, look) for offload in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    numbers = sum(tensor.numel() for tensor in ours)
    assert reserved[1] - reserved[0] == 8 * numbers, "two moments of four bytes each"
