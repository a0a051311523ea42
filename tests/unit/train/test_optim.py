"""AdamW's moments: wherever they rest, the same bits."""

import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, TrainingConfig
from coserve.core.plan import AdamW
from coserve.errors import JobError
from coserve.train.example import Example
from coserve.train.optim import Optimizer, norms, step
from coserve.train.optimizer_offload import FileOffload, HostOffload, MakeOffload, offload_for
from coserve.train.slabs import Slabs
from models import tiny

SHAPES = {"a": (7, 33), "b": (129,), "late": (5, 3), "never": (2, 2)}


def offloads(folder: Path) -> dict[str, MakeOffload | None]:
    cpu = torch.device("cpu")
    return {
        "none": None,
        "file": lambda slabs: FileOffload(slabs, str(folder)),
        "host": lambda slabs: HostOffload(slabs, cpu),
    }


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make(own: Mapping[str, Tensor], offload: MakeOffload | None = None) -> Optimizer:
    return Optimizer(own, torch.float32, torch.device("cpu"), offload)


def moments_of(optimizer: Optimizer) -> dict[str, Tensor]:
    return optimizer.snapshot()()[1]


def train(optimizer: Optimizer, steps: range) -> None:
    """One of the weights has its first gradient in the third step, one never has any."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for name, weight in optimizer.weights.items():
            gradient = torch.randn(weight.shape, generator=generator)
            if name != "never" and (name != "late" or number >= 2):
                optimizer.accumulate(name, gradient)
        optimizer.bring()
        step([(optimizer, AdamW(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.1), 1e-2)])


@pytest.mark.parametrize("kind", ["file", "host"])
def test_moments_that_rest_elsewhere_change_no_bit(kind: str, tmp_path: Path) -> None:
    found = {}
    for name in ("none", kind):
        optimizer = make(weights(), offloads(tmp_path)[name])
        train(optimizer, range(5))
        found[name] = {**optimizer.weights, **moments_of(optimizer)}
    assert found["none"].keys() == found[kind].keys() and "never.exp_avg" not in found[kind]
    assert all(torch.equal(tensor, found[kind][name]) for name, tensor in found["none"].items())


@pytest.mark.parametrize("kind", ["none", "file", "host"])
def test_moments_can_be_taken_up_again(kind: str, tmp_path: Path) -> None:
    whole, first = make(weights()), make(weights(), offloads(tmp_path)[kind])
    train(whole, range(6))
    train(first, range(3))
    kept = {name: moment.clone() for name, moment in moments_of(first).items()}
    again = make(first.weights, offloads(tmp_path)[kind])
    again.restore(kept)
    train(again, range(3, 6))
    assert all(torch.equal(whole.weights[name], again.weights[name]) for name in SHAPES)


def test_only_what_is_beside_the_weights_counts(tmp_path: Path) -> None:
    bytes_of = {}
    for kind, offload in offloads(tmp_path).items():
        optimizer = make(weights(), offload)
        train(optimizer, range(3))
        bytes_of[kind] = optimizer.nbytes
    weighed = 4 * (7 * 33 + 129 + 15 + 4)
    assert bytes_of == {"none": 3 * weighed, "file": weighed, "host": weighed}


def test_an_update_that_was_cut_short_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, wanted = make(weights()), make(weights())
    made = []

    def no_memory(like: Tensor) -> Tensor:
        if made:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        made.append(torch.empty_like(like))
        return made[0]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros_like", no_memory)
        with pytest.raises(RuntimeError, match="allocate"):
            train(optimizer, range(1))
    optimizer.drop_gradients()
    assert not moments_of(optimizer) and all(w.grad is None for w in optimizer.weights.values())
    train(optimizer, range(4))
    train(wanted, range(4))
    assert all(torch.equal(wanted.weights[name], optimizer.weights[name]) for name in SHAPES)


@dataclass
class Job:
    """An adapter with settings of its own, and the same weights under torch's AdamW."""

    ours: Optimizer
    settings: AdamW
    theirs: torch.optim.AdamW
    twins: dict[str, Tensor]
    rate: float

    @staticmethod
    def drawn(draws: random.Random, settings: AdamW) -> "Job":
        start = {
            f"{i}": torch.randn(draws.randint(1, 9), draws.randint(1, 40), dtype=torch.float64)
            for i in range(draws.randint(1, 6))
        }
        twins = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        rate = 10 ** draws.uniform(-4, -1)
        theirs = torch.optim.AdamW(
            twins.values(), rate, settings.betas, settings.epsilon, settings.weight_decay
        )
        return Job(Optimizer(start, torch.float64, torch.device("cpu")), settings, theirs, twins, rate)

    def give_gradients(self, draws: random.Random) -> None:
        """To some of the weights, to none now and then; in one part or in two."""
        for name, twin in self.twins.items():
            twin.grad = None
            if draws.random() < 0.8:
                twin.grad = torch.randn_like(twin)
                part = torch.rand((), dtype=torch.float64) if draws.random() < 0.5 else None
                if part is not None:
                    self.ours.accumulate(name, part * twin.grad)
                self.ours.accumulate(name, twin.grad if part is None else (1 - part) * twin.grad)


@pytest.mark.parametrize("most", [25, 1 << 22], ids=["small slabs", "one slab"])
def test_steps_of_several_jobs_are_those_of_torch_for_each(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs with rates, decays, betas and counts of their own, of which some step and some do not (1e-10)."""
    seed = secrets.randbits(32)
    draws = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(Slabs.of, "__defaults__", (most,))
    same = AdamW((0.9, 0.999), 1e-8, 0.01)
    others = [
        AdamW((draws.uniform(0, 0.99), draws.uniform(0.5, 0.999)), 1e-6, draws.uniform(0, 0.3))
        for _ in range(3)
    ]
    jobs = [Job.drawn(draws, settings) for settings in (same, same, same, *others)]
    jobs[1].rate = jobs[0].rate  # the two of one operation
    jobs[1].theirs.param_groups[0]["lr"] = jobs[0].rate
    for _ in range(7):
        due = [job for job in jobs if draws.random() < 0.7]
        for job in due:
            job.give_gradients(draws)
            job.ours.bring()
            job.theirs.step()
        wanted = [
            sum(float(t.grad.square().sum()) for t in j.twins.values() if t.grad is not None) for j in due
        ]
        found = norms([[job.ours.gradients(piece) for piece in job.ours.pieces()] for job in due])
        assert found == pytest.approx([square**0.5 for square in wanted], rel=1e-12)
        step([(job.ours, job.settings, job.rate) for job in due])
        assert all(weight.grad is None for job in due for weight in job.ours.weights.values())
    for job in jobs:
        moments = moments_of(job.ours)
        for name, twin in job.twins.items():
            torch.testing.assert_close(job.ours.weights[name], twin, rtol=1e-10, atol=1e-12)
            for kind, value in job.theirs.state.get(twin, {}).items():
                own = moments[f"{name}.{kind}"].double()
                torch.testing.assert_close(own, value.double(), rtol=1e-10, atol=1e-14)


def test_a_folder_without_room_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be put into"):
        FileOffload(list(map(torch.flatten, weights().values())), str(tmp_path / "missing"))


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    optimizer = make(weights(), offload_for(torch.device("cpu"), str(tmp_path)))
    train(optimizer, range(2))
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
    return list(engine.adapters.weights("mine").parameters().values())


def test_a_job_learns_the_same_bits_with_less_memory(tmp_path: Path) -> None:
    reserved: list[int] = []

    def look(engine: Engine) -> None:
        reserved.append(engine.memory.ledger.of("job job-1"))

    ours, theirs = (trained(offload, tmp_path, look) for offload in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    numbers = sum(tensor.numel() for tensor in ours)
    assert reserved[1] - reserved[0] == 8 * numbers, "two moments of four bytes each"
