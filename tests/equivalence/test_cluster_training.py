"""Training through the blocks of a cluster equals one process's, whatever dies; answers go on beside it."""

import itertools
import random
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from test_objectives_of_jobs import make_pairs
from test_training import make_examples
from torch import Tensor

from clusters import KEY, cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, SavePolicy, TrainingConfig
from coserve.cluster.host import BlockHost
from coserve.errors import ConfigError, NotOffered
from coserve.train.example import Example
from coserve.train.objectives import DPO
from models import prompts, save, tiny
from waiting import wait_until

pytestmark = pytest.mark.local
DEPTH = 5
SETTINGS: dict[str, Any] = {
    "page_size": 8,
    "cache_tokens": 512,
    "scheduler": {"max_prefill_rows": 16, "min_prefill_rows": 4},
}
UPPER = tuple(f"layers.{n}.{path}" for n in (3, 4) for path in ("self_attn.q_proj", "mlp.down_proj"))
LORA = LoRAConfig(rank=2)
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
INVOKED = (7, 8)
QUESTIONS = [[*prompt, *INVOKED] for prompt in prompts(random.Random(0), [5, 14])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, which are two blocks of unequal size, or three."""
    return save(tiny("llama", torch.float32, num_hidden_layers=DEPTH), tmp_path_factory.mktemp("t") / "model")


def invoking(example: Example) -> Example:
    """The example with an invocation before its fourth token."""
    tokens = (*example.tokens[:3], *INVOKED, *example.tokens[3:])
    return Example(tokens, (*tokens[1:], -100))


Trained = tuple[dict[str, dict[str, Tensor]], list[list[int]], list[float]]


def train(engine: Engine) -> Trained:
    """Two jobs at once, one of them in the upper layers alone, with dropout, and from its invocation tokens
    on; answers beside them, and of what they trained. Returns weights, tokens and losses."""
    training = TrainingConfig(batch_size=4, epochs=2, rows=48, learning_rate=3e-3)
    upper = LoRAConfig(rank=3, dropout=0.2, targets=UPPER, invocation=INVOKED)
    jobs = [
        engine.finetune(make_examples("a", 10), "whole", LORA, training),
        engine.finetune([*map(invoking, make_examples("b", 8))], "upper", upper, training),
    ]
    asked = [engine.generate(question, None, SAMPLING) for question in QUESTIONS]
    engine.run()
    asked += [engine.generate(question, job.adapter, SAMPLING) for job in jobs for question in QUESTIONS]
    engine.run()
    found = {job.result().adapter: engine.adapters.weights(job.adapter).parameters() for job in jobs}
    losses = [step.loss for job in jobs for step in job.history]
    return found, [list(one.result().tokens) for one in asked], losses


def check_equal(found: Trained, wanted: Trained) -> None:
    """Weights and losses are the same to 1e-5, tokens entirely."""
    assert found[1] == wanted[1]
    assert found[2] == pytest.approx(wanted[2], abs=1e-5)
    for name, own in wanted[0].items():
        assert found[0][name].keys() == own.keys()
        for path, tensor in own.items():
            torch.testing.assert_close(found[0][name][path], tensor, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def wanted(model: Path) -> Trained:
    """Weights, tokens and losses of one process."""
    return train(Engine(model, EngineConfig(calibrate=False, **SETTINGS)))


def test_three_workers_train_as_one_process(
    model: Path, wanted: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that training publishes are on all workers, and leave them; what is not offered is refused."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(model, addresses, monkeypatch, **SETTINGS) as engine:
            check_equal(train(engine), wanted)
            blocks = [one.block for host in workers for one in host._instances.values()]
            wait_until(lambda: all(len(one.loaded) == 2 for one in blocks))  # the last version of each
            keeping = TrainingConfig(keep=SavePolicy.PRUNED)
            with pytest.raises(NotOffered, match="the inputs of its blocks kept alone"):
                engine.finetune(make_examples("a", 2), "kept", LORA, keeping)
    with pytest.raises(ConfigError, match="a window is a whole micro-batch"):
        EngineConfig(cluster="unix:/w", scheduler={"training_window": 64})


def test_workers_die_while_a_job_trains(
    model: Path, wanted: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, each block on both: one dies with rows in it, and comes back without any block; then the
    other one, for good. Nothing is trained twice, and nothing is missing."""
    with hosts(tmp_path / "w", 2) as workers:
        addresses = [worker.address for worker in workers]
        settings = {"cluster_copies": 2, "cluster_blocks": 2, **SETTINGS}
        with cluster_engine(model, addresses, monkeypatch, **settings) as engine:
            queued, alive, dead = itertools.count(), list(workers), list[int]()
            queue = BlockHost._queue_training

            def queue_and_die(host: BlockHost, *given: Any) -> None:
                queue(host, *given)
                match next(queued):
                    case 7:
                        dead.append(workers.index(host))
                        Thread(target=alive.pop(dead[0]).close).start()  # with the rows in it
                    case 60:
                        alive.append(BlockHost(addresses[dead[0]], KEY.encode(), Path).start())
                        wait_until(lambda: len(front_of(engine).fleet.status()) == 2)
                    case 75:
                        alive.pop(0).close()

            monkeypatch.setattr(BlockHost, "_queue_training", queue_and_die)
            try:
                check_equal(train(engine), wanted)
            finally:
                for worker in alive:
                    worker.close()
            assert next(queued) > 80


@pytest.mark.slow
def test_a_job_on_pairs_goes_on_from_its_state(
    model: Path, wanted: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the adapter that the job starts from; the workers are rid of it when the job ends."""
    config = TrainingConfig(batch_size=2, epochs=2, rows=40)
    losses, weights = list[list[float]](), list[dict[str, Tensor]]()

    def prefer(engine: Engine, pauses: bool) -> None:
        engine.adapters.load("first", tmp_path / "first")
        given: dict[str, Any] = {"start_from": "first", "objective": DPO(0.5), "job": "job"}
        job = engine.finetune(make_pairs(3), "mine", LORA, config, **given)
        history = job.history
        if pauses:
            while not history:
                engine.step()
            given["resume"] = job.pause()
            job = engine.finetune(make_pairs(3), "mine", LORA, config, **given)
        losses.append([step.loss for step in (*(history if pauses else ()), *job.result().history)])
        weights.append(engine.adapters.weights("mine").parameters())

    alone = Engine(model, EngineConfig(calibrate=False, **SETTINGS))
    alone.finetune(make_examples("a", 4), "first", LORA, TrainingConfig(batch_size=4)).result()
    alone.adapters.save("first", tmp_path / "first")
    prefer(alone, pauses=False)
    with (
        hosts(tmp_path / "w", 2) as workers,
        cluster_engine(model, [one.address for one in workers], monkeypatch, **SETTINGS) as engine,
    ):
        prefer(engine, pauses=True)
        blocks = [one.block for host in workers for one in host._instances.values()]
        newest = {"first@0", engine.adapters.weights("mine").key}
        wait_until(lambda: all(set(one.loaded._versions) == newest for one in blocks))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for path, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][path], tensor, rtol=0, atol=1e-5)
