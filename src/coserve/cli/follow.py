"""Follows a job over HTTP: polls its state and its events once a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coserve.cli.client import in_path

if TYPE_CHECKING:
    from coserve.cli.client import Client

PERIOD = 1.0  # seconds
PAGE = 100
MOST_PAGES = 50  # of a long past; the curve begins there
RECENT = 20  # steps that the speed is taken from
OVER = ("succeeded", "failed", "cancelled", "paused")


@dataclass
class Watched:
    """State of a followed job. Losses are by optimizer step: a resumed job repeats some."""

    job: dict[str, Any]
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)  # of the validation, where it has no loss
    messages: list[str] = field(default_factory=list)  # new since the last look, oldest first
    steps: int | None = None
    pace: list[tuple[float, float]] = field(default_factory=list)  # tokens and seconds of recent steps

    @property
    def id(self) -> str:
        return str(self.job["id"])

    @property
    def status(self) -> str:
        return str(self.job["status"])

    @property
    def is_over(self) -> bool:
        """Tells whether the job is over or paused."""
        return self.status in OVER

    @property
    def step(self) -> int:
        return max(self.losses, default=0)

    @property
    def curve(self) -> list[float]:
        return [self.losses[step] for step in sorted(self.losses)]

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(taken for _, taken in self.pace)
        return sum(tokens for tokens, _ in self.pace) / seconds if seconds > 0 else None

    def seconds_left(self, now: float) -> float | None:
        """Seconds to the end, by the server's estimate, else by the pace of recent steps; None where
        unknown."""
        if self.is_over:
            return None
        if isinstance(finish := self.job.get("estimated_finish"), int | float):
            return max(finish - now, 0.0)
        if not self.pace or self.steps is None:
            return None
        each = sum(taken for _, taken in self.pace) / len(self.pace)
        return (self.steps - self.step) * each

    def take(self, event: dict[str, Any]) -> None:
        """Adds one event; events must be in order."""
        data = event.get("data")
        if event.get("type") != "metrics" or not isinstance(data, dict) or "step" not in data:
            self.messages.append(str(event.get("message", "")))
            return
        step = int(data["step"])
        if isinstance(loss := data.get("train_loss"), int | float):
            self.losses[step] = float(loss)
        if isinstance(loss := data.get("valid_loss"), int | float):
            self.validation[step] = float(loss)
        if isinstance(reward := data.get("valid_reward"), int | float):
            self.rewards[step] = float(reward)
        if isinstance(data.get("total_steps"), int):
            self.steps = data["total_steps"]
        if isinstance(data.get("tokens"), int | float) and isinstance(data.get("seconds"), int | float):
            self.pace = [*self.pace, (data["tokens"], data["seconds"])][-RECENT:]


class Follower:
    """Polls one job. Each event is added once."""

    def __init__(self, client: "Client", job: str) -> None:
        self._client = client
        self._path = f"/v1/fine_tuning/jobs/{in_path(job)}"
        self._newest: str | None = None
        self.watched = Watched(client.get(self._path))

    def look(self) -> Watched:
        """Polls once. The job is read before its events, so that a final state has all of them."""
        self.watched.job = self._client.get(self._path)
        self.watched.messages.clear()
        for event in self._new_events():
            self.watched.take(event)
        return self.watched

    def follow(self, show: Callable[[Watched], None], sleep: Callable[[float], None] = time.sleep) -> Watched:
        """Polls and shows the job until it is over."""
        while True:
            watched = self.look()
            show(watched)
            if watched.is_over:
                return watched
            sleep(PERIOD)

    def _new_events(self) -> list[dict[str, Any]]:
        """Events since the last poll, oldest first. The server lists the newest first, a page at a time."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        for _ in range(MOST_PAGES):
            page = self._client.get(f"{self._path}/events", limit=PAGE, after=after)
            for event in page["data"]:
                if event["id"] == self._newest:
                    return self._remember(found)
                found.append(event)
            if not page.get("has_more") or not page["data"]:
                break
            after = page["data"][-1]["id"]
        return self._remember(found)

    def _remember(self, newest_first: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if newest_first:
            self._newest = str(newest_first[0]["id"])
        return newest_first[::-1]
