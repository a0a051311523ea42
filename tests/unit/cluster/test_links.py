"""Links as messages show them: against links of which all is known, and what dispatch makes of a slow one."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.cluster.choosing import LiveDispatch, live_link
from coserve.cluster.hosted import HostedBlock, SequenceRows
from coserve.cluster.links import LinkTimer, MeasuredLink, fitted
from coserve.cluster.messages import BlockLoaded
from coserve.cluster.records import ClusterLink


def test_a_link_is_found_from_its_messages_whatever_else_the_ends_do() -> None:
    """Acknowledgements that fail to come, and ends that double the time of a message every third time."""
    for seed in range(40):
        draw = random.Random(seed)
        link = ClusterLink(10 ** draw.uniform(4, 9), draw.choice((0.0, 10 ** draw.uniform(-4, -1))))
        timer, now, free_at = LinkTimer(), 5.0, 0.0
        for number in range(60):
            now = max(now, free_at) + draw.choice((0.0, 1.0)) if draw.random() < 0.5 else now
            nbytes = draw.choice((4096, 4096, 100_000, 3_000_000))
            timer.sent(number, nbytes, now)
            free_at = max(now, free_at) + nbytes / link.rate
            late = draw.choice((0.0, 0.0, link.seconds(nbytes)))
            now = free_at + link.latency + late  # the next is sent once this one has come
            if draw.random() < 0.9 or number == 59:
                timer.came(number, now)
        assert timer.measured is not None and timer.measured.at == now
        for nbytes in (4096, 100_000, 3_000_000):
            assert 0.9 < timer.measured.link.seconds(nbytes) / link.seconds(nbytes) < 2.5, seed


def test_messages_of_one_length_show_no_latency_and_a_burst_shows_the_rate() -> None:
    link = fitted([(1000, 0.5), (1000, 0.1), (1000, 0.3)])
    assert [link.rate, link.latency] == pytest.approx([10_000, 0.0])
    link = fitted([(1000, 0.1), (11_000, 0.2), (11_000, 0.9)])
    assert [link.rate, link.latency] == pytest.approx([100_000, 0.09])
    timer = LinkTimer()
    for number in range(4):
        timer.sent(number, 1000, 1.0)  # all at once, a second each
    timer.sent(9, 0, 1.0)
    for number in range(4):
        timer.came(number, 2.0 + number)
    timer.came(9, 9.0)
    timer.came(77, 9.0)
    assert timer.measured is not None and timer.measured.at == 5.0
    assert timer.measured.link.seconds(3000) == pytest.approx(3.0)
    silent = LinkTimer()
    for number, nbytes in ((0, 1000), (1, 3000)):
        silent.sent(number, nbytes, 1.0)
    silent.came(1, 5.0)
    assert silent.measured is not None
    assert silent.measured.link.seconds(1000) == pytest.approx(1.0), "bytes of which nothing was said count"
    behind = LinkTimer()
    for number in range(20):
        behind.sent(number, 1000, float(number))  # and two seconds each: a line forms
    for number in range(20):
        behind.came(number, 2.0 * (number + 1))
    assert behind.measured is not None
    assert behind.measured.link.seconds(1000) == pytest.approx(2.0), "others' bytes are no time of its own"
    timer.sent(10, 1000, 6.0)
    timer.forget()
    timer.came(10, 7.0)
    assert timer.measured.at == 5.0


def test_a_slow_link_is_tried_again_in_time() -> None:
    slow, guess = MeasuredLink(ClusterLink(1e4, 1.0), 100.0), ClusterLink(1e8, 1e-3)
    assert slow.faded(guess, 100.0) == slow.link
    assert slow.faded(guess, 110.0) == ClusterLink(2e4, 0.5)
    assert slow.faded(guess, 1000.0) == guess
    fast = MeasuredLink(ClusterLink(1e9, 0.0), 0.0)
    assert fast.faded(guess, 1e9) == fast.link, "nothing is gained by forgetting it"


def hosted(number: int, address: str) -> HostedBlock:
    worker: Any = SimpleNamespace(address=address, timer=LinkTimer(), links={})
    one = HostedBlock(number, 0, worker, BlockLoaded(number, "", 100, 100, 8 * 16, 99, b""))
    one.seconds = {1: 0.01, 64: 0.02}
    return one


def test_live_dispatch_avoids_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the scheduler, and from the worker that rows are at; who has the pages loses them for it."""
    monkeypatch.setattr("coserve.cluster.choosing.time.monotonic", lambda: 100.0)
    before, one, other = hosted(1, "tcp:a:1"), hosted(2, "tcp:b:1"), hosted(3, "tcp:c:1")
    choose = LiveDispatch(row_nbytes=4096)
    rows = SequenceRows(7, 1, 0, (), "", True, lambda *_: pytest.fail("nothing is embedded"))

    def chosen(rows: SequenceRows, at: HostedBlock | None) -> HostedBlock:
        return choose(rows, at, [one, other], {}, 8)

    assert chosen(rows, before) is one and chosen(rows, None) is one
    slow = MeasuredLink(ClusterLink(1e4), 99.0)  # 0.4 s for a row
    before.worker.links["tcp:b:1"] = one.worker.timer.measured = slow
    assert chosen(rows, before) is other and chosen(rows, None) is other
    assert live_link(None, one.worker, 100.0).seconds(4096) == pytest.approx(0.4096 * 0.5**0.1)
    held = replace(rows, context=8, pages=(4,))
    one.filled = {4: 8}
    assert chosen(held, before) is other
    before.worker.links["tcp:b:1"] = MeasuredLink(ClusterLink(1e7), 99.0)
    assert chosen(held, before) is one, "its pages are there, and the link takes as long as others' would"
