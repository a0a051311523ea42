"""Row `viewers.ratio`: throughput of answers while three pages watch, over that while none does.

Three connections read the page's stream of samples as browsers do. They are threads of the bench, on the same
cores: what they take counts against the page.
"""

import threading
import time
from types import TracebackType
from typing import Final

import httpx

from coserve.errors import ServerError
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.client import Clients
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from coserve_benchmarks.timing import alternate, speedup

VIEWERS: Final = 3
_PATIENCE: Final = 30.0  # seconds for a viewer's first message, and between two of them
_LIVE: Final = "/web/api/live"


class Viewers:
    """Pages that watch a server. Use it in a `with`, which begins once each has its first message; `seen`
    counts the messages of all."""

    def __init__(self, url: str, count: int = VIEWERS) -> None:
        self._url, self.seen = url, 0
        self._ends = threading.Event()
        self._begun = threading.Semaphore(0)
        self._lock = threading.Lock()  # of `seen`
        self._threads = [threading.Thread(target=self._watch, daemon=True) for _ in range(count)]

    def __enter__(self) -> "Viewers":
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if not self._begun.acquire(timeout=_PATIENCE):
                raise ServerError("the server sends its pages no samples")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=_PATIENCE, trust_env=False) as http,
            http.stream("GET", _LIVE) as messages,
        ):
            for line in messages.iter_lines():
                if line.startswith("data:"):
                    with self._lock:
                        self.seen += 1
                    self._begun.release()
                if self._ends.is_set():
                    return


def run(bench: Bench, served: Served) -> None:
    """Measures the same answers with viewers and without, alternating. A server whose streams end early, or
    whose viewers see nothing meanwhile, is an error."""
    settings = bench.settings
    length, answer = settings.streams_prompt, settings.viewers_answer
    prompts = fixed_prompts(settings.streams, length, bench.shape.vocabulary, settings.seed)
    asks = [StreamRequest(prompt, answer) for prompt in prompts]
    rates: list[float] = []  # messages a second of all viewers

    def stream_all() -> float:
        with Clients(served.url, served.name, asks) as clients:
            heard = clients.result()
        if any(one.written != answer or one.attempts > 1 for one in heard):
            raise ServerError("a stream was broken or cut short")
        return max(one.ended for one in heard) - heard[0].asked

    def watched() -> float:
        with Viewers(served.url) as viewers:
            before, began = viewers.seen, time.monotonic()
            taken = stream_all()
            rates.append((viewers.seen - before) / (time.monotonic() - began))
        if not rates[-1]:
            raise ServerError("the viewers saw no sample while answers ran")
        return taken

    contestants = {"none": stream_all, "three": watched}
    times = alternate(contestants, settings.viewers_rounds, bench.machine.threads)
    tokens = settings.streams * answer
    for name, taken in times.items():
        spread = (tokens / taken.high, tokens / taken.low)
        bench.results.figure(f"viewers.{name}", tokens / taken.median, "output tokens/s", spread)
    bench.results.figure("viewers.messages", sum(rates) / len(rates), "messages/s")
    note = (
        f"{settings.streams} streams of {length} tokens in and {answer} out, with {VIEWERS} readers of the "
        f"page's stream and without, in turn; clients and readers on the same {bench.machine.threads} cores"
    )
    bench.results.ratio("viewers.ratio", speedup(times["three"], times["none"]), note)
