"""Pauses of the garbage collector: none begins within, and it goes on after the last of several at once."""

import gc
import threading

import pytest

from coserve.core.collection import collection_paused


def test_no_collection_begins_within_and_the_last_pause_ends_it() -> None:
    began, ended = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            began.set()
            assert ended.wait(10)

    thread = threading.Thread(target=other)
    with collection_paused():
        thread.start()
        assert began.wait(10)
        before = gc.get_stats()[0]["collections"]
        kept: list[list[int]] = [[] for _ in range(10_000)]
        assert gc.get_stats()[0]["collections"] == before and kept
    assert not gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_ends_a_pause() -> None:
    with pytest.raises(ValueError, match="no"), collection_paused():
        raise ValueError("no")
    assert gc.isenabled()
