"""Instances of blocks come to real workers where rows wait, and go where none do; answers stay the same."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from clusters import cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, SamplingParams
from coserve.cluster.instance import OpenBlock
from coserve.memory.budget import Capacity
from models import prompts, save, tiny
from waiting import wait_until

pytestmark = pytest.mark.local
SETTINGS: dict[str, Any] = {"page_size": 8, "cache_tokens": 512, "prefix_sharing": False}
SAMPLING = SamplingParams(max_tokens=3, ignore_eos=True)
QUESTIONS = prompts(random.Random(0), [24] * 4)


def ask(engine: Engine) -> list[list[int]]:
    asked = [engine.generate(question, None, SAMPLING) for question in QUESTIONS]
    engine.run()
    return [list(one.result().tokens) for one in asked]


def test_an_instance_comes_to_a_worker_with_room_and_goes_when_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block, three workers, of which one has no room: the second of the others gets the block."""
    model = save(tiny("llama", torch.float32, num_hidden_layers=2), tmp_path / "model")
    wanted = ask(Engine(model, EngineConfig(calibrate=False, **SETTINGS)))
    monkeypatch.setattr("coserve.cluster.fleet._BEAT", 0.05)
    with hosts(tmp_path / "w", 3) as workers:
        for worker, free in zip(workers, (39, 20, 39), strict=True):
            monkeypatch.setattr(worker, "_room", lambda free=free: Capacity(1 << 40, 1 << free))
        addresses = [worker.address for worker in workers]
        settings = {"cluster_blocks": 1, "cluster_queue": 20, "cluster_idle": 3.0, **SETTINGS}
        with cluster_engine(model, addresses, monkeypatch, **settings) as engine:
            fleet = front_of(engine).fleet

            def blocks() -> list[int]:
                return [len(fleet.status()[address]) for address in addresses]

            assert blocks() == [1, 0, 0]

            def has_grown() -> bool:
                assert ask(engine) == wanted
                return blocks() == [1, 0, 1]

            wait_until(has_grown)
            used: list[OpenBlock] = []
            run = OpenBlock.run
            monkeypatch.setattr(OpenBlock, "run", lambda own, arrived: used.append(own) or run(own, arrived))

            def is_shared() -> bool:
                assert ask(engine) == wanted
                return len(set(map(id, used))) == 2

            wait_until(is_shared)
            wait_until(lambda: sum(blocks()) == 1)
            assert ask(engine) == wanted
