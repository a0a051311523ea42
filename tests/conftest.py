"""Surroundings of every test: one thread, no network, quiet libraries; and the samples of long sweeps."""

import gc
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve_benchmarks.replicas.postgres import PostgresServer, postgres_server, programs

# Tests are imported without collections of garbage, which look at ever more that stays and take a fifth of
# the time; what has been imported is left out of later ones (`pytest_collection_finish`).
gc.disable()

# Before anything imports torch or transformers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Decides what is drawn of `sample`s, for all workers of a run alike: they inherit it.
SEED = os.environ.setdefault("TESTS_SAMPLE", str(time.time_ns() // 10**6 % 10**6))

# The benchmarks lie beside the package; their child processes look for them too.
BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
os.environ["PYTHONPATH"] = os.pathsep.join([BENCHMARKS, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executor",
        choices=["local", "remote"],
        default="local",
        help="where engines compute: in the tests' process, or each in one of its own; tests that look "
        "into their executor are skipped then",
    )


@pytest.fixture(scope="session", autouse=True)
def executor_elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has all engines compute in processes of their own, where that was asked for; those of servers that
    tests start too."""
    if request.config.getoption("--executor") == "local":
        yield
        return
    from forked_executors import compute_elsewhere

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSERVE_ENGINE_EXECUTOR", "remote")
        compute_elsewhere(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def proved_once() -> Iterator[None]:
    """Has the base of an engine proved once for each content of a model: that it gives what the model's own
    forward gives, and that it trains. Both take half of the time that an engine of a tiny model takes to
    open, and most engines of tests are of the same few models. Tests of the proofs call them themselves."""
    opening, load = map(sys.modules.get, ("coserve.worker.opening", "coserve.model.load"))
    if opening is None or load is None:  # no test that was collected opens an engine
        yield
        return
    owns, proved, trained = dict[object, Any](), set[object](), set[object]()
    within = threading.local()  # `key` of the base that is loaded for an engine on this thread

    def key_of(base: Any) -> object:
        modules, config = [*base.model.modules()], base.model.config
        how = config._attn_implementation, getattr(config, "_experts_implementation", None)
        own = (vars(one).get("forward") for one in modules)
        kinds = tuple((type(one), getattr(f, "__func__", f)) for one, f in zip(modules, own, strict=True))
        return base.fingerprint, str(base.dtype), str(base.device), how, kinds

    def load_once(*given: Any) -> Any:
        within.key = ()
        try:
            return load_base(*given)
        finally:
            within.key = None

    def own_once(base: Any) -> Any:
        if getattr(within, "key", None) is None or is_without_data(base):
            return own_forward(base)
        within.key = key = key_of(base)  # while the modules are the model's own
        if key not in owns:
            owns[key] = own_forward(base)
        return owns[key]

    def prove_once(base: Any, own: Any, masks: Any, shorten: Callable[[], None]) -> None:
        key = getattr(within, "key", None)
        if key and key in proved:
            return shorten()
        prove(base, own, masks, shorten)
        proved.update([key] if key else [])

    def prove_training_once(base: Any) -> None:
        key = type(base), base.fingerprint, str(base.dtype)
        if base.makes_calls or key not in trained:  # calls are tried by it, too
            prove_training(base)
            trained.add(key)

    prove_training, load_base, is_without_data = (
        getattr(opening, name) for name in ("prove_training", "load_base", "is_without_data")
    )
    own_forward, prove = load.own_forward, load.prove
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "prove_training", prove_training_once)
        patch.setattr(opening, "load_base", load_once)
        patch.setattr(load, "own_forward", own_once)
        patch.setattr(load, "prove", prove_once)
        yield


@pytest.fixture
def guessed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has schedulers go by the costs that they guess at first. Those that a busy machine measures, seconds
    for the steps of a tiny model, would decide what a test looks for: what shares a step, waits or moves."""
    from coserve.schedule.cost import CostModel
    from coserve.schedule.swap_tier import Rate

    for learns in (CostModel, Rate):
        monkeypatch.setattr(learns, "observe", lambda *_: None)


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Has the Python processes that tests of a module start begin by a fork (`forking.py`)."""
    from forking import forked

    with forked():
        yield


@pytest.fixture(autouse=True)
def no_client_stays() -> Iterator[None]:
    """Fails where a test leaves a `tinker` client that goes on sending signs of life."""
    yield
    if "tinker" not in sys.modules:
        return
    from tinkering import heartbeats

    left = heartbeats()
    for task in left:
        task.get_loop().call_soon_threadsafe(task.cancel)  # the next test is not to be blamed
    assert not left, f"{len(left)} tinker clients were not closed: leave them as contexts"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, for tests with the marker `postgres`."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server() as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if {"failed", "error"} & terminalreporter.stats.keys():
        terminalreporter.line(f"TESTS_SAMPLE={SEED} draws the same cases again")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`sample(n, per=NAME)`: of the cases with the same value of parameter NAME the quick suite runs `n`,
    drawn for each run. `-m slow` runs them all."""
    groups = defaultdict[tuple[str, ...], list[pytest.Item]](list)
    is_remote = config.getoption("--executor") == "remote"
    for item in items:
        if is_remote and item.get_closest_marker("local"):
            item.add_marker(pytest.mark.skip(reason="changes code that runs in the executor's process"))
        mark = item.get_closest_marker("sample")
        is_slow = item.get_closest_marker("slow") is not None
        if mark is not None and not is_slow and isinstance(item, pytest.Function):
            per = mark.kwargs.get("per")
            group = "" if per is None else repr(item.callspec.params[per])
            groups[item.nodeid.partition("[")[0], group].append(item)
    for group, cases in groups.items():
        (count,) = cases[0].get_closest_marker("sample").args
        draws = random.Random(f"{SEED}/{group}")
        quick = [] if config.option.markexpr == "slow" else draws.sample(cases, min(count, len(cases)))
        for case in cases:
            if case not in quick:
                case.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Freezes the objects of imported modules. Collecting garbage looks at a million objects of torch and
    transformers otherwise, which takes over a second each time that a bench, say, asks for it."""
    gc.collect()
    gc.freeze()
    gc.enable()
