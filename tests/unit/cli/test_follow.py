"""Watching a job: each event once, steps that are repeated, how it is drawn, and Ctrl-C."""

import io
import json
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console

from coserve.cli.attach import attach
from coserve.cli.client import Client
from coserve.cli.config import ClientSettings
from coserve.cli.follow import PAGE, Follower, Watched
from coserve.cli.output import duration
from coserve.cli.progress import BLANK, LineProgress, LiveProgress, curve, panel, resample, summary


class Job:
    """A job on a server, as far as it can be asked about."""

    def __init__(self) -> None:
        self.status = "running"
        self.events: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.asked: list[str] = []

    def step(self, step: int, loss: float) -> None:
        data = {"step": step, "total_steps": 10, "train_loss": loss, "tokens": 200, "seconds": 0.5}
        self.events.append({"id": f"e{len(self.events)}", "type": "metrics", "message": "", "data": data})

    def say(self, message: str) -> None:
        self.events.append({"id": f"e{len(self.events)}", "type": "message", "message": message})

    def client(self) -> Client:
        return Client(ClientSettings("http://server"), httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        last = request.url.path.rpartition("/")[2]
        self.asked.append(last)
        if last == "events":
            newest = self.events[::-1]
            after = request.url.params.get("after")
            begin = [event["id"] for event in newest].index(after) + 1 if after else 0
            limit = int(request.url.params["limit"])
            page = newest[begin : begin + limit]
            return httpx.Response(200, json={"data": page, "has_more": begin + limit < len(newest)})
        if request.method == "POST":
            self.told.append(last)
            self.status = {"pause": "paused", "cancel": "cancelled"}[last]
        return httpx.Response(200, text=json.dumps({"id": "j", "status": self.status}))


def test_every_event_is_taken_once_over_pages() -> None:
    job = Job()
    for step in range(1, 2 * PAGE + 50):
        job.step(step, 1.0 / step)
    follower = Follower(job.client(), "j")
    assert len(follower.look().losses) == 2 * PAGE + 49
    assert job.asked.count("events") == 3
    job.step(2 * PAGE + 50, 0.5)
    job.say("Checkpoint created")
    watched = follower.look()
    assert watched.step == 2 * PAGE + 50 and watched.messages == ["Checkpoint created"]
    assert job.asked.count("events") == 4
    assert follower.look().messages == []


def test_a_step_that_is_repeated_counts_once() -> None:
    job = Job()
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5), (3, 1.5)):
        job.step(step, loss)
    watched = Follower(job.client(), "j").look()
    assert watched.curve == [3.0, 2.5, 1.5] and watched.steps == 10
    assert watched.tokens_per_second == pytest.approx(400.0)


def test_the_time_left_is_the_servers_or_else_the_paces() -> None:
    watched = Watched({"id": "j", "status": "running"}, losses={4: 1.0}, steps=10, pace=[(100, 0.5)])
    assert watched.seconds_left(now=0.0) == pytest.approx(3.0)
    watched.job["estimated_finish"] = 1060
    assert watched.seconds_left(now=1000.0) == 60.0
    assert "step 4/10 | loss 1.0000 | 200 tokens/s | 1 min 00 s left" in summary(watched, 1000.0)
    watched.job["slowdown"] = 1.254
    assert "tokens/s | answers take 1.25 times as long | 1 min" in summary(watched, 1000.0)
    watched.job |= {"waiting_since": 930, "waiting_for": "waits for room beside requests; the operator"}
    assert "tokens/s | waits for room beside requests, for 1 min 10 s | answers" in summary(watched, 1000.0)
    watched.job["status"] = "succeeded"
    assert watched.seconds_left(now=1000.0) is None


def test_a_job_that_has_not_begun_says_so_and_nothing_of_answers() -> None:
    watched = Watched({"id": "j", "status": "running", "slowdown": 1.3})
    assert summary(watched, 0.0) == "running | before its first step"
    watched.job |= {"status": "queued", "waiting_for": "waits until one of 4 jobs that train ends"}
    assert summary(watched, 0.0) == "queued | waits until one of 4 jobs that train ends"
    watched = Watched({"id": "j", "status": "running", "slowdown": 1.004}, losses={1: 2.0})
    assert summary(watched, 0.0) == "running | step 1 | loss 2.0000"


def test_following_ends_with_the_job() -> None:
    job, slept = Job(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        job.step(len(slept), 1.0)
        job.status = "succeeded" if len(slept) == 3 else "running"

    shown: list[int] = []
    watched = Follower(job.client(), "j").follow(lambda seen: shown.append(seen.step), sleep)
    assert watched.status == "succeeded" and shown == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "told", "status"), [("p", ["pause"], 0), ("c", ["cancel"], 1), ("d", [], 130), (None, [], 130)]
)
def test_ctrl_c_asks(
    answer: str | None, told: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()  # once only
        raise KeyboardInterrupt

    monkeypatch.setattr("coserve.cli.follow.Follower.follow", interrupted)

    def ask(question: str) -> str:
        if answer is None:
            raise EOFError
        return answer

    try:
        attach(job.client(), "j", ask)
        left = 0
    except typer.Exit as end:
        left = end.exit_code
    assert (job.told, left) == (told, status)


def test_a_panel_has_the_curve_and_a_pipe_has_lines() -> None:
    watched = Watched({"id": "j", "status": "succeeded"}, losses={1: 3.0, 2: 1.0}, steps=2)
    watched.messages = ["a message"]
    panel, lines = io.StringIO(), io.StringIO()
    LiveProgress(Console(file=panel, force_terminal=True, width=80), lambda: 0.0).show(watched)
    assert "a message" in panel.getvalue() and "3.000" in panel.getvalue() and "1.000" in panel.getvalue()
    LineProgress(Console(file=lines, width=80), lambda: 0.0).show(watched)
    assert lines.getvalue() == "a message\nsucceeded | step 2/2 | loss 1.0000\n"


@pytest.mark.parametrize("width", [1, 8, 20, 30, 40, 200])
def test_a_panel_fits_any_terminal(width: int) -> None:
    watched = Watched({"id": "j", "status": "running"}, losses={1: 3.0, 2: 1.0}, steps=9, pace=[(80, 2.0)])
    shown = io.StringIO()
    console = Console(file=shown, width=width)
    console.print(panel(watched, 0.0, width))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= 30 if width > 8 else lines
    if width >= 20:
        assert len(lines) <= 15
        assert "40 tokens/s" in " ".join(line.strip("│ ") for line in lines)


def test_a_falling_curve_falls() -> None:
    top, bottom = curve([1.0, 0.0], 1, 2)
    left, right = 0x01 | 0x02 | 0x04 | 0x40, 0x08 | 0x10 | 0x20 | 0x80
    assert (ord(top) - BLANK) & left == 0x01  # the first value, and the line down beside it
    assert ord(bottom) - BLANK == right
    assert curve([], 3, 1) == [chr(BLANK) * 3]
    assert len(set(curve([1.0] * 40, 20, 3)[1])) == 1
    assert resample([1, 3, 5, 7], 2) == [2, 6] and resample([1.0], 5) == [1.0]


def test_durations_as_people_say_them() -> None:
    assert [duration(x) for x in (0.4, 59, 61, 3660)] == ["0 s", "59 s", "1 min 01 s", "1 h 01 min"]
