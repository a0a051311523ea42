"""Processes of a real server that are stopped: while nothing goes on, under streams, while a job trains, and
while they start. Each is noticed and replaced, and streams of an engine go on. A supervisor is not replaced:
that it is stopped is said, and all else goes on.

Which one, when, and how is drawn by a seed. `COSERVE_HANGS` sets how many the long run tries.
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import psutil
import pytest

from coserve_benchmarks.served import Served, Victim
from models import save, tiny
from served_work import (
    PATIENCE,
    AnswerStream,
    answer_text,
    client_of,
    examples,
    greedy,
    start_job,
    wait_job,
)

NOTICED = 10.0  # seconds: what is promised
MOMENTS = ("idle", "streaming", "training", "starting")
WHO = ("api", "engine", "standby")
ANSWERING = WHO[:2]  # a standby imports at the lowest priority: on a busy machine that takes minutes
SUPERVISOR_SILENT, SUPERVISOR_BACK = "has given no sign of life", "gives signs of life again"


class Hangs:
    """One server, what hangs in it, and how long that took to be noticed."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.log = served.state / "log" / "supervisor.log"
        self.seconds: list[float] = []

    def strike(
        self, who: str, moment: str, look: Callable[[], object] = int, needed: Sequence[str] = WHO
    ) -> float:
        """Stops one process and returns after how many seconds that was said; until then it looks around.
        Before, all that are `needed` are ready."""
        served = self.served
        self.wait_whole(needed)
        if moment == "training":
            self.train()
            self.wait_whole(needed)
        stream = _Stream(served) if moment == "streaming" else None
        victim = getattr(served.running, who)
        if moment == "starting":
            victim = self.starting(victim)
        said = self.said()
        assert victim > 0, "0 would be everybody here"
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        assert stream is None or not stream.is_over

        def is_said() -> bool:
            look()
            return self.said() > said

        served.wait(is_said, f"to say that its {who} hangs ({moment})")
        seconds = time.monotonic() - began
        served.wait(lambda: not psutil.pid_exists(victim), "to end it")
        served.wait_ready()
        if stream is not None:
            stream.ends(whole=who != "api")
        self.seconds.append(seconds)
        return seconds

    def strike_supervisor(self) -> float:
        """Stops it under a stream, and returns after how many seconds the API said so; it also says that it
        goes on."""
        served, log = self.served, self.served.state / "log" / "api.log"
        self.wait_whole()
        stream = _Stream(served)

        def said(words: str) -> int:
            return log.read_text().count(words)

        def health() -> dict[str, str]:
            answer = httpx.get(f"{served.url}/health/ready")
            assert answer.status_code == 200
            return dict(answer.json())

        before, after = said(SUPERVISOR_SILENT), said(SUPERVISOR_BACK)
        os.kill(served.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            served.wait(lambda: said(SUPERVISOR_SILENT) > before, "to say that its supervisor is silent")
            seconds = time.monotonic() - began
            assert health()["supervisor"] == "silent"
            assert "coserve_supervisor_up 0.0" in httpx.get(f"{served.url}/metrics").text
            stream.ends(whole=True)
        finally:
            os.kill(served.pid, signal.SIGCONT)
        served.wait(lambda: said(SUPERVISOR_BACK) > after, "to say that its supervisor goes on")
        assert health()["supervisor"] == "ready" and said(SUPERVISOR_SILENT) == before + 1
        self.seconds.append(seconds)
        return seconds

    def wait_whole(self, needed: Sequence[str] = WHO) -> None:
        """Returns once processes are ready, none of them one that has ended and is not struck off yet."""

        def is_whole() -> bool:
            running = self.served.running
            return all(pid > 0 and psutil.pid_exists(pid) for pid in (getattr(running, n) for n in needed))

        self.served.wait(is_whole, "to be whole")
        self.served.wait_ready()

    def said(self) -> int:
        return self.log.read_text().count(" hangs (")

    def starting(self, victim: int) -> int:
        """Kills one that is ready and returns the process that then starts, whatever that is doing."""
        known = {child.pid for child in psutil.Process(self.served.pid).children()}
        os.kill(victim, signal.SIGKILL)
        fresh: list[int] = []

        def came() -> bool:
            fresh[:] = [c.pid for c in psutil.Process(self.served.pid).children() if c.pid not in known]
            return bool(fresh)

        self.served.wait(came, "to start another")
        return fresh[0]

    def train(self) -> None:
        """A job, and its first step."""
        with client_of(self.served) as client:
            job = start_job(client, self.served, examples(64), {"n_epochs": 40, "batch_size": 2})
            wait_job(client, self.served, job, "running")


class _Stream:
    """A long greedy answer under way, which has to be the one that is given in peace."""

    def __init__(self, served: Served) -> None:
        client, body = client_of(served), greedy(served, [1, 2, 3], 230)
        self._expected = answer_text(client, body)
        self._stream = AnswerStream(client, body)

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    def ends(self, whole: bool) -> None:
        assert self._stream.whole() == self._expected or not whole


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hangs]:
    model = save(tiny("llama", num_hidden_layers=2), tmp_path_factory.mktemp("model"))
    served = Served(
        model,
        tmp_path_factory.mktemp("served"),
        PATIENCE,
        engine_cache_tokens=4096,
        engine_calibrate=False,
        checkpoint_steps=5,
    )
    with served:
        yield Hangs(served)


def test_a_stopped_engine_is_told_of_and_replaced_and_its_stream_goes_on(hangs: Hangs) -> None:
    served, seen = hangs.served, []

    def is_silent() -> bool:
        answer = httpx.get(f"{served.url}/health/ready")
        return answer.status_code == 503 and "no sign of life" in answer.json()["error"]["message"]

    def look() -> None:
        """Keeps the metrics of a moment before and after which the engine is silent: the standby takes over
        within milliseconds."""
        if is_silent():
            metrics = httpx.get(f"{served.url}/metrics").text
            if is_silent():
                seen.append(metrics)

    assert hangs.strike("engine", "streaming", look, ANSWERING) <= NOTICED
    assert seen and all("coserve_engine_up 0.0" in metrics for metrics in seen)
    assert "coserve_engine_up 1.0" in httpx.get(f"{served.url}/metrics").text


@pytest.mark.slow
def test_stop_signals_to_every_process_at_every_moment(hangs: Hangs) -> None:
    count = int(os.environ.get("COSERVE_HANGS", "20"))
    cases = [(who, moment) for moment in MOMENTS for who in WHO] * (1 + count // 12)
    random.Random(16).shuffle(cases)
    cases[count - 2 : count] = [("supervisor", "streaming")] * 2
    for who, moment in cases[:count]:
        if who == "supervisor":
            print(f"{who:10} {moment:10} noticed after {hangs.strike_supervisor():.1f} s", flush=True)
            continue
        print(f"{who:10} {moment:10} noticed after {hangs.strike(who, moment):.1f} s", flush=True)
    seconds = hangs.seconds[-count:]
    noticed = sum(taken <= NOTICED for taken in seconds)
    print(
        f"{noticed} of {count} noticed within {NOTICED:g} s: min {min(seconds):.1f}, "
        f"median {statistics.median(seconds):.1f}, max {max(seconds):.1f} s"
    )
    assert noticed == count


@pytest.mark.slow
def test_a_stopped_supervisor_is_told_of_and_streams_go_on(hangs: Hangs) -> None:
    seconds = hangs.strike_supervisor()
    print(f"a stopped supervisor was noticed after {seconds:.1f} s")
    assert seconds <= NOTICED


@pytest.mark.slow
@pytest.mark.parametrize("who", ["api", "engine"])
def test_a_server_with_a_hung_child_ends_soon_and_says_so(hangs: Hangs, who: str) -> None:
    served = hangs.served
    served.wait_ready()
    os.kill(getattr(served.running, who), signal.SIGSTOP)
    began = time.monotonic()
    served.terminate()
    status = served.wait_end()
    print(f"stopping with a hung {who} took {time.monotonic() - began:.1f} s, exit status {status}")
    assert status == 1
    served.start()


def test_nothing_outlives_the_supervisor(hangs: Hangs) -> None:
    """Also what imports, and what is stopped."""
    served = hangs.served
    hangs.wait_whole(ANSWERING)
    if served.running.standby > 0:
        hangs.starting(served.running.standby)  # another, which imports
    served.wait(lambda: len(psutil.Process(served.pid).children()) == 3, "to start an engine to stand by")
    children = {child.pid for child in psutil.Process(served.pid).children()}
    os.kill(served.running.engine, signal.SIGSTOP)
    os.kill(served.pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children):
        assert time.monotonic() < end, "children outlive their supervisor"
        time.sleep(0.02)
    print(f"gone {time.monotonic() - end + PATIENCE:.2f} s after their supervisor")
    served.kill(Victim.EVERYTHING)
