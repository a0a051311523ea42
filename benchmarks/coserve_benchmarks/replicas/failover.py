"""Rows `failover.…`: clients of two servers, one of which is killed."""

import threading
import time
from collections.abc import Sequence
from typing import Final

import httpx

from coserve.errors import ServerError
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.served import Served, Victim
from coserve_benchmarks.timing import LEAST_AND_MOST

_CLIENTS: Final = 4
_BEFORE, _AFTER = 3.0, 12.0  # seconds of asking before the kill and after it
_QUICK_AFTER: Final = 3.0
_TOKENS: Final = 16
_GIVE_UP: Final = 60.0  # seconds until a request counts as lost
_NAP: Final = 0.05
_ROUNDS: Final = 3


class _Clients:
    """Clients that ask one after the other, each of a server that is ready, and again elsewhere where the
    connection broke: as a router with retries does for them."""

    def __init__(self, servers: Sequence[Served]) -> None:
        self._servers = servers
        self._ends = threading.Event()
        self.answered: list[float] = []  # times of answers' ends
        self.lost = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(_CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=_GIVE_UP, trust_env=False) as http:
            place = number
            while not self._ends.is_set():
                began = time.monotonic()
                while not self._answered(http, self._servers[place % len(self._servers)]):
                    place += 1
                    if time.monotonic() - began > _GIVE_UP:
                        with self._lock:
                            self.lost += 1
                        break
                    time.sleep(_NAP)
                else:
                    with self._lock:
                        self.answered.append(time.monotonic())
                place += 1

    def _answered(self, http: httpx.Client, server: Served) -> bool:
        body = {"model": server.name, "prompt": [5, 6, 7], "max_tokens": _TOKENS, "ignore_eos": True}
        try:
            reply = http.post(f"{server.url}/v1/completions", json=body)
        except httpx.TransportError:
            return False
        return reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == _TOKENS


def run(bench: Bench, servers: Sequence[Served]) -> None:
    """Kills one server with all of its processes while clients ask both, in rounds in which they take turns.
    A request is lost that nobody answers; the gap is the longest time in which no answer came."""
    lost, asked, gaps = list[int](), 0, list[float]()
    after = _QUICK_AFTER if bench.results.header["quick"] else _AFTER
    for number in range(1 if bench.results.header["quick"] else _ROUNDS):
        victim = servers[number % len(servers)]
        clients, gap = _killed(servers, victim, after)
        lost.append(clients.lost)
        gaps.append(gap)
        asked += len(clients.answered) + clients.lost
        victim.start()
    note = f"of {asked} requests in {len(lost)} rounds"
    bench.results.row("failover.lost", sum(lost), (min(lost), max(lost)), note, LEAST_AND_MOST)
    note = "seconds without an answer, of all clients, in the worst round"
    bench.results.row("failover.longest_gap_s", max(gaps), (min(gaps), max(gaps)), note, LEAST_AND_MOST)


def _killed(servers: Sequence[Served], victim: Served, seconds: float) -> tuple[_Clients, float]:
    """Kills one server; returns the clients, and the longest time that they were without an answer."""
    clients = _Clients(servers)
    clients.start()
    try:
        time.sleep(_BEFORE)
        killed = victim.kill(Victim.EVERYTHING)
        time.sleep(seconds)
    finally:
        clients.stop()
    times = sorted(clients.answered)
    after = [moment for moment in times if moment > killed]
    if len(times) - len(after) < _CLIENTS or not after:
        raise ServerError("clients had no answers before the kill, or none after it")
    last = max(moment for moment in times if moment <= killed)
    longest = max(later - earlier for earlier, later in zip([last, *after], after, strict=False))
    return clients, longest
