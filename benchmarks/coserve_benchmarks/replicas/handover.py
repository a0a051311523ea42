"""Row `failover.job_handed_over`: a job whose server dies, until another one has made a step of it."""

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import httpx

from coserve.errors import ServerError
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.replicas.postgres import NOT_INSTALLED, programs
from coserve_benchmarks.served import Served, Victim
from coserve_benchmarks.timing import LEAST_AND_MOST

CHECKPOINT_STEPS: Final = 10
_JOBS: Final = "/v1/fine_tuning/jobs"
_BEFORE: Final = 25  # steps before the kill
_EPOCHS: Final = 100  # most of a job; some more steps than pass before the kill
_LINES: Final = 512
_GIVE_UP: Final = 120.0  # seconds
_NAP: Final = 0.05
_ROUNDS: Final = 3


def steps_of(events: Sequence[dict[str, Any]]) -> list[int]:
    """The optimizer steps that a page of a job's events tells, in order."""
    return sorted(event["data"]["step"] for event in events if event["type"] == "metrics")


def handed_over(seen: Sequence[tuple[float, int]], killed: float) -> float | None:
    """Seconds from the kill to the first look that showed a step beyond all those of looks before the kill;
    None without one. `seen` are moments of looks, and the newest step that each showed. What the dead server
    wrote after the last look before its end does not count: a look at once after the kill comes first."""
    known = max((step for moment, step in seen if moment <= killed), default=0)
    return next((moment - killed for moment, step in seen if moment > killed and step > known), None)


def run(bench: Bench, servers: Sequence[Served]) -> None:
    """Kills the server of a job with all of its processes, and looks at the job on the other one, in rounds
    in which the servers take turns. The bar is that of a job with a checkpoint every few steps."""
    if programs() is None:
        bench.results.note("failover.job_handed_over", NOT_INSTALLED)
        return
    taken = list[float]()
    for number in range(1 if bench.results.header["quick"] else _ROUNDS):
        owner, other = servers if number % 2 == 0 else reversed(servers)
        taken.append(_seconds(owner, other))
        owner.start()
    note = (
        f"seconds from kill -9 to a new step on the other server, checkpoints every {CHECKPOINT_STEPS} steps"
    )
    spread = min(taken), max(taken)
    bench.results.row("failover.job_handed_over", median(taken), spread, note, LEAST_AND_MOST)


def _seconds(owner: Served, other: Served) -> float:
    """Seconds until the other server has made a step of a job whose owner is killed, which stays so."""
    lines = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(_LINES)]
    data = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(timeout=30.0, trust_env=False) as http:

        def ask(server: Served, method: str, path: str, **rest: Any) -> Any:
            reply = http.request(method, f"{server.url}{path}", **rest)
            if reply.is_error:
                raise ServerError(f"{method} {path}: status {reply.status_code}, {reply.text[:300]}")
            return reply.json()

        file = {"file": ("data.jsonl", data)}
        sent = ask(owner, "POST", "/v1/files", files=file, data={"purpose": "fine-tune"})
        steps = {"n_epochs": _EPOCHS, "batch_size": 4}
        body = {"model": owner.name, "training_file": sent["id"], "hyperparameters": steps}
        path = f"{_JOBS}/{ask(owner, 'POST', _JOBS, json=body)['id']}"

        def newest() -> int:
            found = steps_of(ask(other, "GET", f"{path}/events", params={"limit": 20})["data"])
            return max(found, default=0)

        end = time.monotonic() + _GIVE_UP
        while newest() < _BEFORE:
            if time.monotonic() > end:
                raise ServerError(f"the job made no {_BEFORE} steps within {_GIVE_UP:g} s")
            time.sleep(_NAP)
        owner.kill(Victim.EVERYTHING)
        # Its last transactions have ended by now, and are before the kill as seen from the other server.
        time.sleep(_NAP)
        seen = [(0.0, newest())]
        killed = time.monotonic()
        while (seconds := handed_over(seen, killed)) is None:
            if time.monotonic() > killed + _GIVE_UP:
                raise ServerError(f"the job was not handed over within {_GIVE_UP:g} s")
            time.sleep(_NAP)
            seen.append((time.monotonic(), newest()))
        ask(other, "POST", f"{path}/cancel")
    return seconds
