"""Replays workloads against `coserve serve` over HTTP."""

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from threading import Event
from typing import Final

import httpx

from coserve.adapters.files import write_adapter
from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.errors import ConfigError
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import TimedJob, TimedRequest, Workload
from coserve_benchmarks.client import Clients
from coserve_benchmarks.folder import save_shape, training_lines
from coserve_benchmarks.ours import CACHE_TOKENS, Bench
from coserve_benchmarks.policies.contest import bounds_deferral, charge_deferral
from coserve_benchmarks.policies.testbed import Testbed, patience_for
from coserve_benchmarks.recording_client import RecordingClient
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest, StreamResult

_LOOK: Final = 0.2  # seconds between two looks at what is trained
_MOST_EPOCHS: Final = 100  # that a job may ask for
_TIERS: Final = (("default",), ("default", "flex"), ("priority", "default", "flex"))  # by how many there are
_TOKENS: Final = re.compile(r"^coserve_finetune_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_UNLIMITED: Final = float("inf")


class ServerTestbed(Testbed):
    """A server for each round, all over one state folder: it remembers what steps cost.

    Requests come in the service tiers, which have the bounds that the workload states (three different ones
    at most; the most urgent is `priority`). Training is what the server counts: whole optimizer steps, each
    spread over the time since the one before. How long it held an answer up is what that took longer than
    without any training. Jobs have no weights there. Raises ConfigError for a workload with more bounds, and
    ServerError where the server does not do what it should.
    """

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench, self._folder = bench, folder
        self._model = save_shape(bench.shape, folder)
        self._undisturbed: dict[tuple[TimedRequest, ...], LoadResult] = {}
        self._adapters: dict[str, Path] = {}

    def run(self, policy: str, workload: Workload, patience: float | None = None) -> LoadResult:
        """See `Testbed.run`."""
        undisturbed = self._without_training(workload) if bounds_deferral(workload) else None
        tiers = _tiers(request.slo for request in workload.requests)
        self._make_adapters(workload)
        (self._folder / "coserve.toml").write_text(_config(tiers, self._adapters))
        with Served(
            self._model,
            self._folder,
            engine_policy=policy,
            engine_cache_tokens=CACHE_TOKENS,
            engine_prefix_sharing=False,
            standby=False,
            max_jobs=max(1, len(workload.jobs)),
        ) as served:
            end = workload.seconds + (patience_for(workload) if patience is None else patience)
            load = _ServerReplay(served, workload, tiers, end).run()
        if undisturbed is not None:
            charge_deferral(load, undisturbed)
        return load

    def _without_training(self, workload: Workload) -> LoadResult:
        if workload.requests not in self._undisturbed:
            self._undisturbed[workload.requests] = self.alone(workload)
        return self._undisturbed[workload.requests]

    def _make_adapters(self, workload: Workload) -> None:
        """Writes folders of the adapters that requests name."""
        missing = [(name, rank) for name, rank in workload.served if name not in self._adapters]
        if missing:
            base = Engine(self._bench.shape.build(), EngineConfig(calibrate=False)).base
            for name, rank in missing:
                self._adapters[name] = self._folder / "served" / name
                write_adapter(fresh_adapter(base, name, LoRAConfig(rank), 0), self._adapters[name])


def _tiers(slos: Iterable[SLO]) -> dict[SLO, str]:
    """The service tier of each of the bounds, the most urgent first."""
    distinct = sorted(dict.fromkeys(slos), key=_urgency)
    if len(distinct) > len(_TIERS):
        raise ConfigError(f"a server has {len(_TIERS)} service tiers, and requests {len(distinct)} bounds")
    return dict(zip(distinct, _TIERS[len(distinct) - 1], strict=True)) if distinct else {}


def _urgency(slo: SLO) -> tuple[float, ...]:
    bounds = (slo.first_token, slo.end_to_end, slo.deferral, slo.between_tokens)
    return tuple(_UNLIMITED if bound is None else bound for bound in bounds)


def _config(tiers: dict[SLO, str], adapters: dict[str, Path]) -> str:
    """A configuration file: the bounds of the tiers, none of which keeps one by default, and the adapters."""
    lines = []
    for slo, tier in tiers.items():
        stated = ((one.name, getattr(slo, one.name)) for one in fields(SLO))
        bounds = ((name, float("inf") if bound is None else float(bound)) for name, bound in stated)
        lines += [f"[server.slo.{tier}]", *(f"{name} = {bound!r}" for name, bound in bounds)]
    lines.append("[server.adapters]")
    lines += [f'"{name}" = "{path}"' for name, path in adapters.items()]
    return "\n".join(lines) + "\n"


class _ServerReplay:
    """One workload against one server."""

    def __init__(self, served: Served, workload: Workload, tiers: dict[SLO, str], end: float) -> None:
        self._served, self._workload = served, workload
        self._end = end  # after its beginning; who has no answer then is given up
        self._asks = [
            StreamRequest(
                r.prompt, r.answer, r.at, tells_tokens=True, model=r.adapter or "", tier=tiers[r.slo]
            )
            for r in workload.requests
        ]

    def run(self) -> LoadResult:
        """The load, once every answer has come or was given up. Then all jobs are cancelled, so that those
        come too whom the policy lets wait for training to end."""
        used = self._served.processor_seconds
        with (
            _ReplayedJobs(self._served, self._workload.jobs) as training,
            Clients(self._served.url, self._served.name, self._asks) as clients,
            ThreadPoolExecutor(1) as threads,
        ):
            load = LoadResult(time.monotonic(), self._workload.seconds)
            answered = Event()
            watching = threads.submit(training.watch, load.started, load.seconds, self._end, answered)
            try:
                heard = clients.result()
            finally:
                answered.set()
            load.trained = watching.result()
            load.losses = training.losses()
        load.answers = [self._answered(*one) for one in zip(self._workload.requests, heard, strict=True)]
        load.finished_at = max((a.tokens[-1] for a in load.answers if a.tokens), default=load.started)
        load.finished_at = max(load.finished_at, load.started + load.seconds)
        load.processor = self._served.processor_seconds - used
        return load

    def _answered(self, request: TimedRequest, heard: StreamResult) -> AnswerTimes:
        """An answer as its client saw it; nothing of one that came after the load's end and patience."""
        in_time = heard.ended - heard.asked + request.at <= self._end
        return AnswerTimes(heard.asked, heard.stamps if in_time else [], request.slo)


class _ReplayedJobs:
    """Starts the jobs of a workload on a server and follows their progress."""

    def __init__(self, served: Served, jobs: Sequence[TimedJob]) -> None:
        self._jobs = sorted(jobs, key=lambda job: -job.at)  # the next one last
        self._ledger = RecordingClient(served.url, served.name)
        self._metrics = httpx.Client(base_url=served.url, trust_env=False)
        self._files = {job.adapter: self._ledger.upload(training_lines(job.examples)) for job in jobs}
        self._started: list[str] = []
        self._served = served

    def __enter__(self) -> "_ReplayedJobs":
        """Starts the jobs of time 0 and waits until they have begun."""
        self._start_due(0.0)
        self._served.wait(lambda: all(map(self._has_begun, self._started)), "to begin with its jobs")
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()
        self._metrics.close()

    def watch(self, began: float, seconds: float, end: float, answered: Event) -> list[tuple[float, float]]:
        """Starts each job at its time; (when, tokens) of what was trained. Goes on until the first optimizer
        step after the last answer and the load's `seconds`, or `end` seconds after it `began`."""
        found: list[tuple[float, float]] = []
        before = self._tokens()
        while (now := time.monotonic() - began) < end and (self._jobs or self._started):
            self._start_due(now)
            is_over = answered.is_set() and now >= seconds
            total = self._tokens()
            if total > before:
                found.append((time.monotonic(), total - before))
                before = total
                if is_over:
                    break
            time.sleep(_LOOK)
        for job in self._started:
            if not self._ledger.is_over(job):
                self._ledger.cancel_job(job)
        return found

    def losses(self) -> list[float]:
        """Losses of optimizer steps, ordered by step number."""
        steps = [step for job in self._started for step in self._ledger.losses(job)]
        return [loss for _, loss in sorted(steps, key=lambda step: step[0])]

    def _start_due(self, now: float) -> None:
        while self._jobs and self._jobs[-1].at <= now:
            self._start(self._jobs.pop())

    def _has_begun(self, id: str) -> bool:
        return bool(self._ledger.job(id)["status"] != "queued")

    def _start(self, job: TimedJob) -> None:
        peft = {"r": job.rank} | ({"target_modules": list(job.targets)} if job.targets else {})
        hyperparameters = {"n_epochs": min(job.epochs, _MOST_EPOCHS), "batch_size": job.batch}
        optimizer = {"schedule": "constant", "warmup_ratio": 0.0, "rows": job.rows, "keep": "everything"}
        fields = {"hyperparameters": hyperparameters, "peft": peft, "optimizer": optimizer}
        self._started.append(self._ledger.start_job(self._files[job.adapter], **fields))

    def _tokens(self) -> float:
        found = _TOKENS.search(self._metrics.get("/metrics").text)
        return float(found[1]) if found else 0.0
