"""Ended work leaves nothing behind: an engine holds after a thousand times what it held after ten."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from adapters import known
from coserve import LoRAConfig
from coserve.adapters import bank as bank_module
from coserve.adapters.paging import stored as stored_module
from coserve.core.request import Request, SamplingParams
from coserve.memory.malloc import resident_bytes
from coserve.train.fresh import sketch_adapter
from coserve.train.pruning import layers
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    CheckJob,
    JobCheckpoint,
    JobSpec,
    JobStep,
    PinAdapter,
    RemoveAdapter,
    StopJob,
)
from desk import Desk, write_data
from growth import containers, grown, heap_in_use, objects
from methods import engine_of

FATES = ("trained", "infinite", "unreadable", "unwanted", "cancelled", "paused")  # of the jobs of a round
HEAP = 4 << 10  # bytes that a job may leave in the C library's heap; 0.3 to 0.9 KiB were seen
CHECKED = 1  # the number of a check's reply, which may come after the job's end
BOUND = 6  # of what is remembered of what is gone


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bank_module, "_REMEMBERED", BOUND)
    monkeypatch.setattr(stored_module, "_KNOWN", BOUND)
    layers.choice_of.clear()
    yield


class Tenants:
    """Whatever is done with jobs: the same in every round, under other names."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.desk, self._folder, self._seed = Desk(), folder, seed
        self._data = write_data(folder / "train.jsonl")
        self._wrong = folder / "wrong.jsonl"
        self._wrong.write_text('{"prompt": 3}')
        self.ends: set[str] = set()

    def round(self, number: int) -> None:
        draws = random.Random(self._seed)
        for fate in draws.sample(FATES, len(FATES)):
            self._job(f"{number}-{fate}", fate, draws)
        self.desk.until(lambda: not self.desk.worker.has_work)
        self.desk.until(lambda: [reply.ref for reply in self.desk.replies].count(CHECKED) == len(FATES))
        self.desk.send(Acknowledge(1 << 40))
        self.desk.reports.clear()
        self.desk.asked = 0
        self.desk.engine.scheduler.cost.misses._tails.clear()  # a memo of two, that the next step empties

    def _job(self, name: str, fate: str, draws: random.Random) -> None:
        """From its check to its adapter's last answer, or to whatever end it finds before."""
        desk, folder = self.desk, self._folder / name
        targets = draws.choice([["q_proj"], ["v_proj", "down_proj"]])
        method = {
            "rank": draws.randint(1, 9), "targets": targets, "dropout": draws.choice([0.0, 0.1]),
        }  # fmt: skip
        options = {
            "batch_size": draws.randint(1, 5), "rows": draws.choice([16, 64]),
            "max_steps": draws.randint(3, 5), "epochs": 5, "keep": draws.choice(["inputs", "pruned"]),
            "learning_rate": 1e20 if fate == "infinite" else 1e-3,
        }  # fmt: skip
        data = self._wrong if fate == "unreadable" else self._data
        validation = str(self._data) if draws.random() < 0.3 else None
        spec = JobSpec(name, str(data), str(folder), options, method, validation=validation, every=2)
        desk.send(CheckJob(CHECKED, spec))
        desk.send(
            spec,
            Request(f"beside {name}", (5, 6, 7), SamplingParams(max_tokens=2, seed=1)),
        )
        if fate in ("cancelled", "paused"):
            desk.until(lambda: any(stepped.job == name for stepped in desk.news(JobStep)))
        if fate in ("unwanted", "cancelled", "paused"):
            desk.send(StopJob(name, keep=fate == "paused"))
        self.ends.add(desk.ended().status)
        checkpoints = [told.path for told in desk.news(JobCheckpoint) if told.job == name]
        if checkpoints:
            self._answer(name, checkpoints[-1])

    def _answer(self, name: str, path: str) -> None:
        desk, key = self.desk, f"mine {name}"
        desk.send(AddAdapter(2, key, path))
        desk.until(lambda: key in desk.engine.adapters.bank.names)
        desk.send(
            PinAdapter(3, key, True), PinAdapter(4, key, False),
            *(
                Request(f"{name} {i}", (7 + i, 8, 9), SamplingParams(max_tokens=3, seed=i), version)
                for i, version in enumerate([desk.engine.adapters.bank.look(key).key] * 2 + ["nobody"])
            ),
        )  # fmt: skip
        desk.until(lambda: not desk.worker.has_work)
        desk.send(RemoveAdapter(5, key))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_jobs_that_ended_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    """Jobs that succeed, fail, are refused, cancelled and paused, and answers of what they trained."""
    tenants = Tenants(tmp_path, seed)
    for number in range(2):
        tenants.round(number)
    inside, alive, heap = containers(tenants.desk.worker), objects(), [heap_in_use()]
    for number in range(2, 5):
        tenants.round(number)
        heap.append(heap_in_use())
    assert tenants.ends == {"succeeded", "failed", "cancelled", "paused"}
    assert grown(inside, containers(tenants.desk.worker)) == {}
    assert grown(alive, objects()) == {}
    # A leak is there in every round; what a library makes once, of up to 8 MB, is there in one.
    assert min(after - before for before, after in pairwise(heap)) <= HEAP * len(FATES)


def test_names_that_are_gone_are_forgotten_and_their_numbers_never_come_again() -> None:
    engine = engine_of("llama")
    bank = engine.adapters.bank
    draws, used = random.Random(0), set()
    sketch = sketch_adapter(engine.base, "x", LoRAConfig(rank=2), 0)
    for _ in range(400):
        name = f"n{draws.randrange(30)}"
        version = replace(sketch, name=name, version=bank.next_version(name))
        assert version.key not in used, "what was cached for another one would be found"
        used.add(version.key)
        bank.publish(known(version))
        if draws.random() < 0.7:
            bank.remove(name)
        assert len(bank._newest) <= len(bank.names) + BOUND


def test_freed_memory_goes_back_every_few_jobs() -> None:
    """Free memory between blocks in use is given back to the system too; without that a process grows."""
    engine = engine_of("llama")
    blocks = [torch.ones(256 << 10) for _ in range(96)]  # of 1 MiB
    kept = blocks[::2]
    blocks.clear()
    before = resident_bytes()
    for number in range(16):
        engine.training.admission.leave(f"j{number}")
    assert before - resident_bytes() >= 40 << 20, "of 48 MiB"
    assert len(kept) == 48
