"""Recurrent layers whose blocks are on the workers of a cluster: states move with pages, or rows are computed
again from the newest state that was kept; whatever moves or dies, tokens are those of one process."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cluster import EverElsewhere, check_equal
from test_training import make_examples

from clusters import KEY, cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.cluster.host import BlockHost
from coserve.cluster.hosted import HostedBlock
from coserve.engine.completion import Completion
from coserve.errors import ConfigError
from coserve.schedule import kept_states
from coserve.train.fresh import fresh_adapter
from models import prompts, save
from recurrent import build

KINDS = ("qwen3_5_text", "granitemoehybrid")
pytestmark = [pytest.mark.local, pytest.mark.parametrize("model", KINDS, indirect=True)]
SAMPLING = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=2, logprobs=2)
DRAWN = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=5)
SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "max_running": 6,
    "scheduler": {"max_prefill_rows": 16, "min_prefill_rows": 4},
}
QUESTIONS = prompts(random.Random(0), [14, 3, 33])


@pytest.fixture(autouse=True)
def states_are_kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every 16 tokens of a prompt, as short prompts share too little otherwise."""
    monkeypatch.setattr(kept_states, "EVERY", 16)
    monkeypatch.setattr(kept_states, "_LEAST", 4)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: recurrent, attention, recurrent."""
    return save(build(request.param), tmp_path_factory.mktemp("recurrent") / "model")


def ask(engine: Engine) -> list[Completion]:
    """Answers with and without an adapter, some drawn; then a prompt that begins as
    an earlier one."""
    engine.adapters.add(fresh_adapter(engine.base, "lora", LoRAConfig(rank=2), 1))
    asked = [engine.generate(q, None, SAMPLING) for q in QUESTIONS]
    asked += [engine.generate(QUESTIONS[0], "lora", own) for own in (SAMPLING, DRAWN)]
    engine.run()
    first = engine.generate(QUESTIONS[2], None, DRAWN, scope="one")
    engine.run()
    again = [engine.generate([*QUESTIONS[2], 7, n], None, DRAWN, scope="one") for n in (8, 9)]
    engine.run()
    assert all(one.sequence.cached == 32 for one in again), "its prefix is there, and the state behind it"
    return [*asked, first, *again]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Completion]:
    """Answers of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_states, "EVERY", 16)
        patch.setattr(kept_states, "_LEAST", 4)
        return ask(Engine(model, EngineConfig(calibrate=False, cache_tokens=64, **SETTINGS)))


@pytest.mark.slow
def test_three_workers_answer_as_one_process(
    model: Path, wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the blocks has attention alone, two have none."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(model, addresses, monkeypatch, cache_tokens=64, **SETTINGS) as engine:
            check_equal(ask(engine), wanted)
            front = front_of(engine)
            assert not (front.copied or front.recomputed or front.copied_states), "nothing was lost"
            assert engine.memory.recurrent_bases == {"base"}


@pytest.mark.sample(1)
def test_states_follow_when_rows_go_elsewhere_in_every_step(
    model: Path, wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        settings = {"cache_tokens": 64, "cluster_copies": 2, **SETTINGS}
        with cluster_engine(model, addresses, monkeypatch, **settings) as engine:
            front = front_of(engine)
            front.choose = EverElsewhere()
            check_equal(ask(engine), wanted)
            assert front.copied_states > 20 and front.copied > 50 and not front.recomputed


@pytest.mark.sample(1)
def test_a_worker_dies_in_mid_answer(
    model: Path, wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with the only instance of a block; then one of those that took over; one comes back."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(model, addresses, monkeypatch, cache_tokens=64, **SETTINGS) as engine:
            front, passes = front_of(engine), itertools.count()
            begin, alive = front.begin, list(workers)

            def begin_and_kill(*given: Any) -> Any:
                match next(passes):
                    case 5:
                        alive.pop(1).close()
                    case 11:
                        alive.pop(0).close()
                    case 17:
                        alive.append(BlockHost(addresses[0], KEY.encode(), Path).start())
                return begin(*given)

            monkeypatch.setattr(front, "begin", begin_and_kill)
            try:
                check_equal(ask(engine), wanted)
            finally:
                for worker in alive:
                    worker.close()
            assert next(passes) > 18 and front.recomputed


@pytest.mark.slow
def test_rows_are_computed_again_from_the_newest_kept_state(
    model: Path, wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's states are kept on one worker; its answer goes on at another one, which dies."""
    with hosts(tmp_path / "w", 2) as (first, second):
        addresses = [first.address, second.address]
        settings = {"cache_tokens": 64, "cluster_copies": 2, "cluster_blocks": 1, **SETTINGS}
        with cluster_engine(model, addresses, monkeypatch, **settings) as engine:
            front, passes = front_of(engine), itertools.count()
            begin = front.begin

            def choose(rows: Any, before: Any, candidates: Sequence[HostedBlock], *_: Any) -> HostedBlock:
                own = {one.worker.address: one for one in candidates}
                return own[addresses[rows.context > 33]]

            def begin_and_kill(*given: Any) -> Any:
                if next(passes) == 5:
                    second.close()
                return begin(*given)

            front.choose = choose
            monkeypatch.setattr(front, "begin", begin_and_kill)
            check_equal([engine.generate(QUESTIONS[2], None, SAMPLING)], wanted[2:3])
            assert front.copied_states == 1 and 0 < front.recomputed <= 4, "not the 32 tokens before"


@pytest.mark.slow
def test_training_through_blocks_with_states(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and losses are one process's to 1e-5, with answers beside it."""
    training = TrainingConfig(batch_size=4, epochs=1, rows=48, learning_rate=3e-3)

    def trained(engine: Engine) -> tuple[dict[str, torch.Tensor], list[float]]:
        job = engine.finetune(make_examples("a", 8), "own", LoRAConfig(rank=2), training)
        answer = engine.generate(QUESTIONS[0], None, SAMPLING)
        engine.run()
        assert answer.tokens
        weights = engine.adapters.weights(job.result().adapter).parameters()
        return dict(weights), [step.loss for step in job.history]

    settings = {"cache_tokens": 512, **SETTINGS}
    weights, losses = trained(Engine(model, EngineConfig(calibrate=False, **settings)))
    with hosts(tmp_path / "w", 2) as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(model, addresses, monkeypatch, **settings) as engine:
            found, own = trained(engine)
    assert own == pytest.approx(losses, abs=1e-5)
    assert found.keys() == weights.keys()
    for path, tensor in weights.items():
        torch.testing.assert_close(found[path], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_surrogates_are_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "surrogates predict no block with recurrent layers"
    with hosts(tmp_path / "w", 1) as (worker,), pytest.raises(ConfigError, match=told):
        settings = {"cluster_speculation": 0.5, **SETTINGS}
        cluster_engine(model, [worker.address], monkeypatch, **settings).__enter__()
