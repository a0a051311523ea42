"""Snapshots of tensors that change while they are copied."""

import secrets
import threading
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from coserve.core.plan import AdamW
from coserve.train import snapshot as module
from coserve.train.optim import Optimizer, step
from coserve.train.optimizer_offload import MakeOffload, offload_for
from coserve.train.snapshot import TensorSnapshot

_SHAPES = {"one": (3, 5), "two": (64,), "wide": (40, 30), "none": (0, 4)}


@pytest.fixture
def draws() -> Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return Random(seed)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)


def test_copies_are_what_was_there_whoever_makes_them(draws: Random) -> None:
    """Two threads at once: one copies, the other lets the rest be copied and then changes the tensors."""
    for _ in range(200):
        sizes = [draws.choice([0, 1, 6, 7, 8, 50, 300]) for _ in range(draws.randint(0, 6))]
        tensors = [torch.randn(size) for size in sizes]
        wanted = [tensor.clone() for tensor in tensors]
        snapshot, found = TensorSnapshot(tensors), list[list[Tensor]]()
        thread = threading.Thread(target=lambda one=snapshot, to=found: to.append(one.copies()))  # type: ignore[misc]
        thread.start()
        snapshot.copies()
        for tensor in tensors:
            tensor.zero_()
        thread.join()
        assert len(found[0]) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found[0], wanted, strict=True))


def test_nothing_is_copied_before_it_must_be() -> None:
    tensor = torch.zeros(100)
    snapshot = TensorSnapshot([tensor])
    tensor += 1  # an owner that does not let it copy first
    assert snapshot.copies()[0].sum() == 100


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_an_optimizers_snapshots_are_each_of_one_step(
    is_offloaded: bool, draws: Random, tmp_path: Path
) -> None:
    """Read at once, after later steps, or after weights were set back; several of one step as well."""
    place: MakeOffload | None = offload_for(torch.device("cpu"), str(tmp_path)) if is_offloaded else None
    start = {name: torch.randn(shape) for name, shape in _SHAPES.items()}
    optimizer = Optimizer(start, torch.float32, torch.device("cpu"), place)
    unread, wanted = [], []
    for number in range(12):
        for _ in range(draws.randint(0, 2)):
            unread.append(optimizer.snapshot())
            wanted.append(optimizer.snapshot()())
        if number == 7:
            weights, moments = optimizer.snapshot()()
        if number == 9:
            optimizer.restore(moments, weights)
            continue
        for name, weight in optimizer.weights.items():
            if draws.random() < 0.7:
                optimizer.accumulate(name, torch.randn(weight.shape))
        optimizer.bring()
        step([(optimizer, AdamW(), 0.1)])
    for read, (weights, moments) in zip(unread, wanted, strict=True):
        later = read()
        assert later[0].keys() == weights.keys() and later[1].keys() == moments.keys()
        assert all(torch.equal(later[0][name], weights[name]) for name in weights)
        assert all(torch.equal(later[1][name], moments[name]) for name in moments)
