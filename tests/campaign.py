"""Kills of a server's processes at random moments, over and over, and what its clients find afterwards.

All is compared with an undisturbed run on the same server: an answer's tokens by position, a job's losses by
step, its adapter by its bytes. And what a client was told must hold, whatever died in between: a job that was
told to be paused stays paused until somebody resumes it, a cancelled one stays cancelled, an adapter that was
taken in is there, and so is every file, event and checkpoint that the server has shown. Streams whose API
lives go on over their connection.
"""

import hashlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Final

import httpx
from msgspec.structs import replace

from coserve.errors import ServerError
from coserve_benchmarks.client import Clients
from coserve_benchmarks.recording_client import RecordingClient
from coserve_benchmarks.served import Served, Victim
from coserve_benchmarks.streams import StreamRequest

Json = dict[str, Any]
JOBS: Final = "/v1/fine_tuning/jobs"
KINDS: Final = ("engine", "API", "API and engine", "standby", "everything", "engine stops", "API stops")
_API_LIVES: Final = ("engine", "standby", "engine stops")
_WEIGHTS: Final = (6, 6, 3, 2, 2, 1, 1)
_PATIENCE: Final = 180.0  # seconds that anything may take on a machine that is busy
_NAP: Final = 0.05
_CHANGES: Final = 8  # that a client makes in a round, at most: on a slow machine all jobs would be cancelled
_AWAY: Final = (429, 502, 503)
_OVER: Final = ("succeeded", "failed", "cancelled")


class Away(Exception):
    """There was no answer: nobody knows whether it was done."""


class Caller:
    """One client. Raises Away where the server is not there, ServerError where it refuses."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **rest: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **rest)
        except httpx.HTTPError as error:
            raise Away(f"{method} {path}: {error}") from error
        if answer.status_code in _AWAY:
            raise Away(f"{method} {path}: status {answer.status_code}")
        if answer.is_error:
            raise ServerError(f"{method} {path}: status {answer.status_code}, {answer.text[:300]}")
        return answer

    def sure(self, method: str, path: str, **rest: Any) -> httpx.Response:
        """Asks until there is an answer: for what may be asked twice."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return self.ask(method, path, **rest)
            except Away:
                if time.monotonic() > end:
                    raise
                time.sleep(_NAP)

    def upload(self, data: bytes) -> str:
        files = {"file": ("data.jsonl", data, "text/plain")}
        return str(self.sure("POST", "/v1/files", data={"purpose": "fine-tune"}, files=files).json()["id"])

    def job(self, id: str) -> Json:
        found: Json = self.sure("GET", f"{JOBS}/{id}").json()
        return found

    def adapter(self, name: str) -> tuple[bytes, bytes]:
        """Its configuration and its weights."""
        config, weights = (
            self.sure("GET", f"/v1/adapters/{name}/{p}").content for p in ("config", "weights")
        )
        return config, weights

    def losses(self, id: str) -> list[tuple[int, float]]:
        """A job's optimizer steps, and the loss of each."""
        events = self.sure("GET", f"{JOBS}/{id}/events", params={"limit": 1000}).json()["data"]
        found = [event["data"] for event in events if event["type"] == "metrics"]
        return sorted((step["step"], step["train_loss"]) for step in found)


@dataclass(frozen=True)
class Recipe:
    """A kind of job: its fields, beside the model and the file."""

    name: str
    fields: Json


@dataclass(frozen=True)
class Work:
    """The work sent to the server. Every other stream uses an adapter that was imported."""

    data: bytes
    recipes: Sequence[Recipe]
    asks: Sequence[StreamRequest]
    most_jobs: int = 5  # that are not over


@dataclass
class Tracked:
    """A job that was acknowledged. `wish` is what it was told to be, None while it is not known whether the
    server has heard."""

    id: str
    recipe: str
    wish: str | None = "going"  # or paused, cancelled


@dataclass
class Tally:
    """Counts of the outcomes so far; `lost` and `unlike` are messages for the reader of a failure."""

    kills: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)  # by what was done, and how they ended
    streams: int = 0
    again: int = 0  # of these, whose connection broke
    imports: int = 0
    acknowledged: int = 0  # files, jobs, their ends, events, checkpoints, models
    lost: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds, jobs = (
            ", ".join(f"{n} {what}" for what, n in sorted(counter.items()))
            for counter in (self.kills, self.jobs)
        )
        return (
            f"{sum(self.kills.values())} kills ({kinds}); jobs: {jobs}; {self.streams} streams, {self.again} "
            f"asked for again; {self.imports} imports; {self.acknowledged} acknowledged; "
            f"{len(self.lost)} lost, {len(self.unlike)} unlike"
        )


class Campaign:
    """One server in the deterministic mode, under kills. `seed` decides everything but the moments that the
    machine itself makes."""

    def __init__(self, served: Served, work: Work, seed: int) -> None:
        self.tally = Tally()
        self._served, self._work, self._draw = served, work, random.Random(seed)
        self._call = Caller(served.url)
        self._marks = (f"{seed}-{n}" for n in count(1))
        self._jobs: list[Tracked] = []
        self._unanswered: dict[str, str] = {}  # recipes of jobs that may have been created, by their marks
        self._imported: list[str] = []
        self._expected: dict[str, tuple[list[tuple[int, float]], str]] = {}
        self.tokens: list[list[int]] = []  # of every stream, undisturbed
        self._ledgers: list[RecordingClient] = []
        self._file = ""
        self._adapter = (b"", b"")

    def close(self) -> None:
        self._call.close()
        for ledger in self._ledgers:
            ledger.close()

    def peace(self) -> None:
        """Each recipe alone and each stream, undisturbed: what all others are compared with."""
        self._file = self._call.upload(self._work.data)
        for recipe in self._work.recipes:
            self._create(recipe.name)
            job = self._jobs[-1]
            self._wait_over(job)
            self._expected[recipe.name] = self._trained(job)
        self._adapter = self._call.adapter(self._call.job(self._jobs[0].id)["fine_tuned_model"])
        self._import()
        with Clients(self._served.url, self._served.name, self.asks()) as clients:
            self.tokens = [one.tokens for one in clients.result()]
        assert len({tuple(tokens) for tokens in self.tokens}) == len(self.tokens), "streams tell apart"

    def begin(self) -> None:
        """One job that goes on, one that is paused and one that is cancelled, from the first kill on."""
        for verb, wish in (("", "going"), ("pause", "paused"), ("cancel", "cancelled")):
            self._create(self._draw.choice(self._work.recipes).name)
            if verb:
                self._tell(self._jobs[-1], verb, wish)

    def round(self, kind: str | None = None) -> None:
        """Streams, jobs, and a client that changes its mind, while something is killed."""
        kind = kind or self._draw.choices(KINDS, _WEIGHTS)[0]
        asks = self.asks()
        most = sum(ask.answer for ask in asks)
        pieces = self._draw.randint(2 * len(asks), int(0.7 * most))
        ledger = RecordingClient(self._served.url, self._served.name)
        self._ledgers.append(ledger)
        for job in self._jobs:
            ledger.follow(job.id)
        with Clients(self._served.url, self._served.name, asks, pieces) as clients:
            with _Restless(self._change_something, self._draw.getrandbits(32)), Scribe(ledger):
                clients.wait_reached()
                self._kill(kind)
            self._compare(clients, kind)
        self._settle()
        self._check()
        self._lose(*ledger.missing())

    def end(self) -> None:
        """All go on and come to their ends; what is left is compared with what should be."""
        for job in self._jobs:
            if job.wish == "paused":
                self._resume_surely(job)
        for job in self._jobs:
            self._wait_over(job)
        self._check()
        for job in self._jobs:
            self._compare_job(job)
        for name in self._imported:
            if self._call.adapter(name) != self._adapter:
                self.tally.unlike.append(f"the adapter {name} is not what was taken in")
        for ledger in self._ledgers:
            self._lose(*ledger.missing())
        self.tally.acknowledged = sum(map(len, self._ledgers))

    # What is killed

    def _kill(self, kind: str) -> None:
        """Returns when other processes answer. Those that only stop are for the server to notice."""
        running = self._served.running
        pids = {
            "engine": [running.engine],
            "API": [running.api],
            "API and engine": self._draw.sample([running.api, running.engine], 2),
            "standby": [running.standby],
            "everything": [],
            "engine stops": [running.engine],
            "API stops": [running.api],
        }[kind]
        how = signal.SIGSTOP if "stops" in kind else signal.SIGKILL
        self.tally.kills[kind] += 1
        if kind == "everything":
            self._served.kill(Victim.EVERYTHING)
            self._served.start()
        for pid in filter(None, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, how)
            time.sleep(self._draw.choice([0.0, 0.3]))
        self._served.wait_ready(without=set(pids) - {0, running.standby})

    # What clients do meanwhile

    def asks(self) -> list[StreamRequest]:
        """The requests that streams send."""
        name = self._draw.choice(self._imported)
        return [replace(ask, model=name) if n % 2 else ask for n, ask in enumerate(self._work.asks)]

    def _change_something(self, draw: random.Random) -> None:
        """One thing that a client may want."""
        going = [job for job in self._jobs if job.wish == "going" and not self._is_over(job)]
        paused = [job for job in self._jobs if job.wish == "paused"]
        wishes: list[Callable[[], None]] = [self._import]
        if len(going) + len(paused) < self._work.most_jobs:
            wishes += [lambda: self._create(draw.choice(self._work.recipes).name)] * 4
        if going:
            wishes += [lambda: self._tell(draw.choice(going), "pause", "paused")] * 3
            wishes += [lambda: self._tell(draw.choice(going), "cancel", "cancelled")] * (draw.random() < 0.3)
        if paused:
            wishes += [lambda: self._tell(draw.choice(paused), "resume", "going")] * 3
        with suppress(Away):
            draw.choice(wishes)()

    def _create(self, recipe: str) -> None:
        mark = next(self._marks)
        fields = next(r.fields for r in self._work.recipes if r.name == recipe)
        body = {"model": self._served.name, "training_file": self._file, "metadata": {"mark": mark}, **fields}
        self._unanswered[mark] = recipe
        found = self._call.ask("POST", JOBS, json=body).json()
        del self._unanswered[mark]
        self._jobs.append(Tracked(found["id"], recipe))
        self.tally.jobs["created"] += 1

    def _tell(self, job: Tracked, verb: str, wish: str) -> None:
        before, job.wish = job.wish, None
        try:
            found = self._call.ask("POST", f"{JOBS}/{job.id}/{verb}").json()
        except ServerError as error:  # it was over, or is what it is told to be
            job.wish = before
            if "status 409" not in str(error):
                self.tally.lost.append(f"{job.id} ({job.recipe}): {error}")
            return
        job.wish = wish
        self.tally.jobs[f"{verb}{'led' if verb == 'cancel' else 'd'}"] += 1
        if wish != "going" and found["status"] != wish:
            self.tally.lost.append(f"{job.id} was told to {verb} and is {found['status']}")

    def _import(self) -> None:
        name = f"taken-in-{next(self._marks)}"
        files = {"config": ("config.json", self._adapter[0]), "weights": ("w.safetensors", self._adapter[1])}
        self._call.ask("POST", "/v1/adapters", data={"name": name}, files=files)
        self._imported.append(name)
        self.tally.imports += 1

    # What they find afterwards

    def _settle(self) -> None:
        """Looks up the outcome of requests that had no answer."""
        for mark, recipe in list(self._unanswered.items()):
            found = self._call.sure("GET", JOBS, params={"metadata[mark]": mark}).json()["data"]
            self._jobs += [Tracked(job["id"], recipe) for job in found]
            self.tally.jobs["created"] += len(found)
            del self._unanswered[mark]
        for job in self._jobs:
            if job.wish is None:
                status = self._call.job(job.id)["status"]
                job.wish = status if status in ("paused", "cancelled") else "going"

    def _check(self) -> None:
        """All that was acknowledged is there, and is what it was told to be."""
        trained = dict[str, str]()  # a name, and its job
        self._call.sure("GET", f"/v1/files/{self._file}")
        for job in self._jobs:
            found = self._call.job(job.id)
            status, error = found["status"], found["error"]
            allowed = {
                "going": ("queued", "running", "succeeded"),
                "paused": ("paused", "succeeded"),  # its last step may have been done
                "cancelled": ("cancelled",),
            }[job.wish or "going"]
            if status not in allowed:
                self._lose(f"{job.id} ({job.recipe}), {job.wish}, is {status}: {error}")
            if status == "succeeded":
                trained[found["fine_tuned_model"]] = job.id
        # Listed last: jobs end while others are looked at.
        there = {model["id"] for model in self._call.sure("GET", "/v1/models").json()["data"]}
        self._lose(*(f"the adapter {name} is not there" for name in self._imported if name not in there))
        self._lose(
            *(f"the adapter of {job} is not there" for name, job in trained.items() if name not in there)
        )

    def _compare(self, clients: Clients, kind: str) -> None:
        for number, (one, tokens) in enumerate(zip(clients.result(), self.tokens, strict=True)):
            self.tally.streams += 1
            self.tally.again += one.attempts > 1
            if kind in _API_LIVES and one.attempts > 1:
                self.tally.unlike.append(f"stream {number} was cut off although only the {kind} was hit")
            if one.tokens != tokens or not one.agrees:
                self.tally.unlike.append(f"stream {number}: {one.tokens} instead of {tokens}")

    def _compare_job(self, job: Tracked) -> None:
        status = self._call.job(job.id)["status"]
        self.tally.jobs[status] += 1
        if status != "succeeded":
            return
        losses, weights = self._trained(job)
        wanted, same = self._expected[job.recipe]
        if losses != wanted:
            pairs = zip(losses, wanted, strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (len(losses), len(wanted)))
            self.tally.unlike.append(f"{job.id} ({job.recipe}): losses {first}")
        if weights != same:
            self.tally.unlike.append(f"{job.id} ({job.recipe}): weights {weights[:8]} instead of {same[:8]}")

    def _trained(self, job: Tracked) -> tuple[list[tuple[int, float]], str]:
        weights = self._call.adapter(self._call.job(job.id)["fine_tuned_model"])[1]
        return self._call.losses(job.id), hashlib.sha256(weights).hexdigest()

    def _resume_surely(self, job: Tracked) -> None:
        while job.wish == "paused" and not self._is_over(job):
            with suppress(Away):
                self._tell(job, "resume", "going")
            self._settle()

    def _wait_over(self, job: Tracked) -> None:
        end = time.monotonic() + _PATIENCE
        while not self._is_over(job):
            if time.monotonic() > end:
                raise ServerError(f"{job.id} ({job.recipe}) is not over: {self._call.job(job.id)}")
            time.sleep(_NAP)

    def _is_over(self, job: Tracked) -> bool:
        return self._call.job(job.id)["status"] in _OVER

    def _lose(self, *what: str) -> None:
        self.tally.lost += [one for one in what if one not in self.tally.lost]


class _Restless:
    """Does one thing after the other in a thread of its own, for as long as a `with` lasts."""

    def __init__(self, change: Callable[[random.Random], None], seed: int) -> None:
        self._change, self._draw = change, random.Random(seed)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="restless")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _work(self) -> None:
        try:
            for _ in range(_CHANGES):
                if self._stop.wait(self._draw.uniform(0.05, 0.5)):
                    return
                self._change(self._draw)
        except Exception as error:
            self._error = error


class Scribe:
    """Keeps a server busy with small acknowledged things until it is killed: use it in a `with` around that.

    Uploads files and looks at everything, over and over, in a thread of its own.
    """

    def __init__(
        self, ledger: RecordingClient, lines: Sequence[Mapping[str, str]] = ({"text": "x"},)
    ) -> None:
        self._ledger, self._requests = ledger, lines
        self._stop = threading.Event()
        self._error: ServerError | None = None
        self._thread = threading.Thread(target=self._work, name="scribe")

    def __enter__(self) -> "Scribe":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _work(self) -> None:
        for number in count():
            try:
                self._ledger.upload(f'{{"text": "note {number}"}}\n'.encode(), f"note-{number}.jsonl")
                self._ledger.look()
            except httpx.HTTPError:  # what the kill cut off was not acknowledged
                return
            except ServerError as error:
                self._error = error
                return
            if self._stop.wait(_NAP):
                return
