"""A base whose blocks are on the workers of a cluster answers as one process does, whatever moves or dies."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from clusters import cluster_engine, front_of, hosts
from coserve import Engine, EngineConfig, SamplingParams
from coserve.cluster.front import ClusterFront
from coserve.cluster.host import BlockHost
from coserve.cluster.hosted import HostedBlock, SequenceRows
from coserve.cluster.instance import ArrivedRows, OpenBlock
from coserve.cluster.records import ClusterLink
from coserve.engine.completion import Completion
from coserve.errors import OutOfPages
from models import prompts, save, tiny, with_lora
from waiting import wait_until

pytestmark = pytest.mark.local
DEPTH = 6
SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=2, logprobs=2)
DRAWN = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5)
SETTINGS: dict[str, Any] = {
    "page_size": 8,
    "scheduler": {"max_prefill_rows": 16, "min_prefill_rows": 4},
}
QUESTIONS = prompts(random.Random(0), [14, 3, 23, 40])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of six layers, and two adapters of it."""
    tmp = tmp_path_factory.mktemp("cluster")
    found = {"model": save(tiny("llama", torch.float32, num_hidden_layers=DEPTH), tmp / "model")}
    for seed, name in ((1, "one"), (2, "other")):
        with_lora(tiny("llama", torch.float32, num_hidden_layers=DEPTH), seed=seed).save_pretrained(
            str(found.setdefault(name, tmp / name))
        )
    return found


def ask(engine: Engine, folders: dict[str, Path]) -> list[Completion]:
    """Answers of three applications on one foundation, some drawn, and the same prompt once more."""
    for name in ("one", "other"):
        engine.adapters.load(name, folders[name])
    asked = [engine.generate(q, adapter, SAMPLING) for adapter in (None, "one", "other") for q in QUESTIONS]
    asked += [engine.generate(q, "one", DRAWN) for q in QUESTIONS]
    engine.run()
    first = engine.generate(QUESTIONS[3], None, DRAWN)
    engine.run()
    again = engine.generate([*QUESTIONS[3], 7, 8], None, DRAWN)
    engine.run()
    assert again.sequence.cached >= 32, "its prefix is there"
    return [*asked, first, again]


def check_equal(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    """Tokens are the same, and log-probabilities to 1e-5."""
    for one, other in zip(found, wanted, strict=True):
        assert one.result().tokens == other.tokens
        for a, b in zip(
            [*(one.prompt_logprobs or ()), *(one.logprobs or ())],
            [*(other.prompt_logprobs or ()), *(other.logprobs or ())],
            strict=True,
        ):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-5)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> list[Completion]:
    """Answers of one process."""
    return ask(Engine(folders["model"], EngineConfig(calibrate=False, cache_tokens=96, **SETTINGS)), folders)


class EverElsewhere:
    """Sends the rows of each pass to other instances than the one before."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def __call__(
        self, rows: SequenceRows, before: HostedBlock | None, candidates: Sequence[HostedBlock], *_: Any
    ) -> HostedBlock:
        ordered = sorted(candidates, key=lambda one: one.number)
        return ordered[next(self._turn) % len(ordered)]


def test_three_workers_answer_as_one_process(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemption, prefixes that are shared, and adapters whose parts are on all workers."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(folders["model"], addresses, monkeypatch, cache_tokens=96, **SETTINGS) as engine:
            check_equal(ask(engine, folders), wanted)
            assert engine.scheduler.stats.preemptions, "pages run out"
            assert front_of(engine).fleet.status() == {address: [n] for n, address in enumerate(addresses)}
            assert engine.stats().workers == ("blocks 0", "blocks 1", "blocks 2")
            engine.adapters.unload("one")
            engine.run()
            blocks = [one.block for host in workers for one in host._instances.values()]
            wait_until(lambda: {len(one.loaded) for one in blocks} == {1})  # gone everywhere


def test_pages_follow_when_rows_go_elsewhere_in_every_step(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is on two workers, and the rows of each pass go to another one: pages meet in the middle."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        settings = {"cache_tokens": 96, "cluster_copies": 2, **SETTINGS}
        with cluster_engine(folders["model"], addresses, monkeypatch, **settings) as engine:
            front = front_of(engine)
            front.choose = EverElsewhere()
            # As if links were as slow as products, of which a tiny model has few.
            monkeypatch.setattr(ClusterFront, "_recompute_rate", lambda *_: (1e3, False))
            monkeypatch.setattr(
                "coserve.cluster.front.live_link",
                lambda *_: ClusterLink(
                    min(one.loaded.page_nbytes / 8 for one in front.fleet.instances()) * 1e3
                ),
            )
            check_equal(ask(engine, folders), wanted)
            assert front.copied > 100 and front.recomputed > 100


def test_workers_have_fewer_pages_than_their_scheduler(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has room for the longest sequence alone: pages leave all the time, and are copied or computed
    again where rows go. What is longer is refused."""
    with hosts(tmp_path / "w", 2) as workers:
        addresses = [worker.address for worker in workers]
        settings = {"cache_tokens": 96, "cluster_copies": 2, "cluster_cache_tokens": 56, **SETTINGS}
        with cluster_engine(folders["model"], addresses, monkeypatch, cluster_blocks=1, **settings) as engine:
            front, most = front_of(engine), 0
            front.choose = EverElsewhere()
            run = OpenBlock.run

            def watched(block: OpenBlock, arrived: Sequence[ArrivedRows]) -> list[Tensor]:
                nonlocal most
                assert block.attention.padding_page == 7
                most = max(
                    most, *(page for one in arrived for own in one.message.hops[0].pages for page in own)
                )
                return run(block, arrived)

            monkeypatch.setattr(OpenBlock, "run", watched)
            asked = [engine.generate(question, None, SAMPLING) for question in QUESTIONS]
            engine.run()
            check_equal(asked, wanted[: len(asked)])
            assert front.sweeper.swept > 20 and front.copied and front.recomputed and most == 6
            assert all(len(one.filled) <= 7 for one in front.fleet.instances())
            with pytest.raises(OutOfPages, match="a worker of the cluster has room for 7 "):
                engine.generate([1] * 50, None, SAMPLING)
            assert engine.scheduler.requests.queues.room(50, 0) == 7, "the last token needs no place"


def test_three_workers_compute_for_different_steps_at_once(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker waits, a few times at most, until the others compute as well: each for another step."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(folders["model"], addresses, monkeypatch, **SETTINGS) as engine:
            active, together, lock = dict[int, set[int]](), Event(), Lock()
            run = OpenBlock.run

            def run_together(block: OpenBlock, arrived: Sequence[ArrivedRows]) -> list[Tensor]:
                with lock:
                    active[id(block)] = {one.message.number for one in arrived}
                    if len(active) == 3 == len(front_of(engine)._open) == len(set().union(*active.values())):
                        together.set()
                together.wait(0.1)
                with lock:
                    del active[id(block)]
                return run(block, arrived)

            monkeypatch.setattr(OpenBlock, "run", run_together)
            asked = [engine.generate(question, None, SAMPLING) for question in QUESTIONS]
            engine.run()
            check_equal(asked, wanted[: len(asked)])
            assert together.is_set()


def test_a_worker_dies_in_mid_answer(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with the only instance of a block, whose pages nobody else has; then one of those that took over.
    One that comes back is used again."""
    with hosts(tmp_path / "w") as workers:
        addresses = [worker.address for worker in workers]
        with cluster_engine(folders["model"], addresses, monkeypatch, cache_tokens=96, **SETTINGS) as engine:
            front, passes = front_of(engine), itertools.count()
            begin, alive = front.begin, list(workers)

            def begin_and_kill(*given: Any) -> Any:
                match next(passes):
                    case 9:
                        alive.pop(1).close()
                    case 20:
                        alive.pop(0).close()
                    case 30:
                        alive.append(BlockHost(addresses[0], b"a key of tests", Path).start())
                return begin(*given)

            monkeypatch.setattr(front, "begin", begin_and_kill)
            try:
                check_equal(ask(engine, folders), wanted)
            finally:
                for worker in alive:
                    worker.close()
            assert next(passes) > 31 and front.recomputed > 0


def test_an_alternative_answers_where_the_exact_one_would_wait(
    folders: dict[str, Path], wanted: list[Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adaptive serving is the scheduler's, wherever blocks are: with all places taken, an answer that allows
    it is the base's, and those that do not allow it wait."""
    with hosts(tmp_path / "w", 2) as workers:
        addresses = [worker.address for worker in workers]
        settings = {"max_running": 2, "approximation_delay": 0.0, **SETTINGS}
        with cluster_engine(folders["model"], addresses, monkeypatch, **settings) as engine:
            for name in ("one", "other"):
                engine.adapters.load(name, folders[name])
            exact = [engine.generate(QUESTIONS[n], "one", SAMPLING) for n in (0, 1)]
            adapted = engine.generate(QUESTIONS[2], "one", SAMPLING, alternatives=["other", None])
            engine.run()
            count = len(QUESTIONS)
            assert [one.alternative for one in (*exact, adapted)] == [0, 0, 2]
            check_equal([*exact, adapted], [*wanted[count : count + 2], wanted[2]])
