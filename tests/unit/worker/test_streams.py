"""Streams beside each other: real threads that wait for each other, never for time to pass."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from coserve.worker.streams import Streams

WAIT = 30.0  # seconds until a test that would hang fails instead


def idle_streams() -> Streams:
    """Streams of a processor, which run no plans."""
    return Streams(torch.device("cpu"), lambda plan: ({}, []), lambda plan: [])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads; the test's end gives back what there were."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def streams() -> Streams:
    return idle_streams()


def test_streams_run_at_once(streams: Streams) -> None:
    """Each work gets past the barrier only while the other one runs, and the caller goes on meanwhile."""
    all_three = threading.Barrier(3)
    for _ in range(3):
        begun = [streams.begin(place, 0.5, lambda: all_three.wait(WAIT)) for place in (0, 1)]
        mine = all_three.wait(WAIT)
        assert sorted([mine, *(future.result() for future in begun)]) == [0, 1, 2]


def test_each_future_has_what_its_own_work_returned(streams: Streams) -> None:
    """Whichever is done first: here the second stream, which the first one waits for."""
    done = threading.Event()

    def first() -> str:
        assert done.wait(WAIT)
        return "first"

    def second() -> str:
        done.set()
        return "second"

    begun = [streams.begin(0, 0.5, first), streams.begin(1, 0.5, second)]
    assert [future.result() for future in begun] == ["first", "second"]


def test_work_of_one_stream_runs_in_order(streams: Streams) -> None:
    """In one thread, that of the stream, whatever the other one does."""
    ran: list[int] = []
    go = threading.Event()
    begun = [streams.begin(1, 0.5, lambda: go.wait(WAIT))]
    begun += [streams.begin(1, 0.5, lambda n=n: ran.append(n)) for n in range(5)]  # type: ignore[misc]
    assert streams.begin(0, 0.5, lambda: list(ran)).result() == []  # nobody passed the one that waits
    go.set()
    begun[-1].result()
    assert ran == [0, 1, 2, 3, 4] and all(future.done() for future in begun)


def test_a_stream_keeps_its_thread(streams: Streams) -> None:
    runs = [[streams.begin(place, 0.5, threading.get_ident).result() for place in (0, 1)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({*runs[0], threading.get_ident()}) == 3


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.5, (2, 2)), (0.25, (1, 3)), (0.75, (3, 1)), (0.01, (1, 4)), (0.99, (4, 1)), (0.6, (2, 2))],
)
def test_torch_s_threads_are_split_by_share(
    share: float, wanted: tuple[int, int], threads: Callable[[int], None]
) -> None:
    """Of four; nobody gets less than one. The caller's own stay as they were."""
    threads(4)
    it = idle_streams()
    begun = [it.begin(0, share, torch.get_num_threads), it.begin(1, 1 - share, torch.get_num_threads)]
    assert tuple(future.result() for future in begun) == wanted
    assert torch.get_num_threads() == 4


def test_another_share_is_another_number_of_threads(threads: Callable[[int], None]) -> None:
    """Also after torch has got other numbers by the first share: shares are of what there was."""
    threads(4)
    it = idle_streams()
    shares = (0.5, 0.25, 0.75, 0.5)
    assert [it.begin(0, share, torch.get_num_threads).result() for share in shares] == [2, 1, 3, 2]


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_a_stream_is_raised_and_the_next_work_runs(place: int, streams: Streams) -> None:
    def fail() -> int:
        raise KeyError("of a stream")

    begun = [streams.begin(one, 0.5, fail if one == place else threading.get_ident) for one in (0, 1)]
    with pytest.raises(KeyError, match="of a stream"):
        begun[place].result()
    other = begun[1 - place].result()
    again = [streams.begin(one, 0.5, threading.get_ident).result() for one in (0, 1)]
    assert again[1 - place] == other and again[place] != other
