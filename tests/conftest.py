"""Surroundings of every test: one thread, no network, quiet libraries."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch or transformers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

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
    """Has all engines compute in processes of their own, where that was asked for."""
    if request.config.getoption("--executor") == "local":
        yield
        return
    from forked_executors import compute_elsewhere

    with pytest.MonkeyPatch.context() as patch:
        compute_elsewhere(patch)
        yield


def pytest_collection_finish() -> None:
    """What has been imported by now stays. Collecting garbage looks at a million objects of torch and
    transformers otherwise, which takes over a second each time that a bench, say, asks for it."""
    gc.collect()
    gc.freeze()
