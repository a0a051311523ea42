"""A sandbox ends alone, whatever its function does, and is there again for the next call."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from tests.waiting import wait_until

from coserve.errors import CoserveError, DataError, InternalError, LimitExceeded
from coserve.sandbox import process
from coserve.sandbox.pool import SandboxPool
from coserve.sandbox.process import Sandbox

ACT = "tests.sandboxed:act"
MEMORY = 64 << 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(ACT, MEMORY) as made:
        yield made


@pytest.mark.parametrize(
    ("what", "number", "kind", "said"),
    [
        ("backtrack", 0, LimitExceeded, "takes more than 0.3 s"),
        ("loop", 0, LimitExceeded, "takes more than 0.3 s"),
        ("allocate", 2 * MEMORY, LimitExceeded, "takes more than 64 MiB"),
        ("exit", 7, LimitExceeded, "status 7"),
        ("abort", 0, LimitExceeded, "signal 6"),
        ("long", 2 * 2**20, LimitExceeded, "the result has 2097159 bytes"),
        ("refuse", 0, DataError, "expected something else"),
        ("surprise", 0, InternalError, "KeyError: 'nobody foresaw this'"),
        ("write", 10, InternalError, "OSError: [Errno 27] File too large"),
    ],
)
def test_each_end_is_an_error_of_its_call_alone(
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    number: int,
    kind: type[CoserveError],
    said: str,
) -> None:
    monkeypatch.setattr(process, "MOST_REPLY", 2**20)
    with pytest.raises(kind) as raised:
        sandbox.call(what, number, seconds=0.3)
    assert type(raised.value) is kind and said in str(raised.value)
    assert sandbox.call("echo", 3, seconds=5.0) == 3


def test_a_call_that_sleeps_ends(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WALL_LEAST", 0.2)
    sandbox.call("echo", 1, seconds=1.0)
    before = time.monotonic()
    with pytest.raises(LimitExceeded, match="takes more than"):
        sandbox.call("sleep", 60, seconds=0.01)
    assert time.monotonic() - before < 30


def test_items_come_one_by_one_and_may_be_left_early(sandbox: Sandbox) -> None:
    assert list(sandbox.stream("items", 1000, seconds=5.0)) == list(range(1000))
    items = sandbox.stream("items", 10**9, seconds=100.0)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    items.close()  # type: ignore[attr-defined]
    assert sandbox.call("echo", 4, seconds=5.0) == 4


def test_printing_is_no_reply_and_secrets_stay_out(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.call("print", seconds=5.0) is None
    monkeypatch.setenv("COSERVE_SECRET", "hush")
    with Sandbox(ACT, MEMORY) as fresh:
        environment = fresh.call("environment", seconds=5.0)
    assert "PATH" in environment and "COSERVE_SECRET" not in environment


def test_large_arguments_pass_while_the_child_is_busy(sandbox: Sandbox) -> None:
    with Sandbox("tests.sandboxed:echo", 256 << 20) as fresh:
        text = os.urandom(2**20).hex() * 8
        assert fresh.call(text, seconds=20.0) == text


def test_killed_from_another_thread_it_stays_ended() -> None:
    made = Sandbox(ACT, MEMORY)
    made.call("echo", 1, seconds=5.0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            made.call("sleep", 600, seconds=600.0)
        except LimitExceeded as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    made.kill()
    thread.join(30)
    assert not thread.is_alive() and "was ended" in str(caught[0])
    with pytest.raises(LimitExceeded, match="was ended"):
        made.call("echo", 1, seconds=5.0)
    made.close()


def test_a_pool_serves_calls_side_by_side_and_keeps_its_children() -> None:
    pool = SandboxPool("tests.sandboxed:counted", 2, MEMORY)
    assert [pool.call(seconds=5.0) for _ in range(3)] == [1, 2, 3]  # one child, kept
    pool.close()
    with pytest.raises(LimitExceeded):
        pool.call(seconds=5.0)
    pool = SandboxPool(ACT, 2, MEMORY)
    held = threading.Thread(target=lambda: _quietly(pool, "sleep", 30))
    held.start()
    wait_until(lambda: len(pool._free) == 1)
    assert pool.call("echo", 5, seconds=5.0) == 5  # beside the one that sleeps
    pool.close()
    held.join(30)
    assert not held.is_alive()


def _quietly(pool: SandboxPool, what: str, number: int) -> None:
    with pytest.raises(LimitExceeded):
        pool.call(what, number, seconds=600.0)
