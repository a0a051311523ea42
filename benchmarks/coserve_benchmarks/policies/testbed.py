"""Runs workloads under one policy after another, on one engine with the same weights and cost model for all.
`replay` does so on servers."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Final

import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.schedule.policies import make_policy
from coserve.simulate.replay import LoadResult
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import TimedRequest, Workload
from coserve_benchmarks.drive import serve
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.policies.contest import PROMISED, Judge, attained, bounds_deferral, charge_deferral
from coserve_benchmarks.policies.isolated import isolated

_PATIENCE: Final = 5.0  # seconds after a load, for the last answers, beside their longest bound


def patience_for(workload: Workload) -> float:
    """Seconds after a load in which answers still count: an answer within its bounds may take as long as all
    of them allow, with each of its tokens as late as its bound between tokens has it."""
    return _PATIENCE + max((_longest(request) for request in workload.requests), default=0.0)


def _longest(request: TimedRequest) -> float:
    """The longest that an answer may take within its bounds; what has none counts as nothing."""
    slo = request.slo
    tokens = (slo.first_token or 0.0) + (slo.between_tokens or 0.0) * (request.answer - 1)
    return max(tokens, slo.end_to_end or 0.0, slo.deferral or 0.0)


class Testbed(ABC):
    """Runs a workload under one policy after another."""

    @abstractmethod
    def run(self, policy: str, workload: Workload, patience: float | None = None) -> LoadResult:
        """Runs one round. Requests without an answer `patience` seconds (`patience_for`) after the load are
        cancelled."""

    def alone(self, workload: Workload) -> LoadResult:
        """Runs the workload's requests without its jobs and without bounds. None is cancelled, even where the
        machine cannot keep up."""
        requests = tuple(replace(request, slo=SLO()) for request in workload.requests)
        return self.run("hybrid", replace(workload, requests=requests, jobs=()), patience=float("inf"))

    def peak(self, workload: Workload, seconds: float) -> float:
        """Fine-tuning tokens/s of the workload's jobs without its requests, whole mini-batches one by one."""
        first = replace(workload.jobs[0], at=0.0, epochs=1_000_000)
        load = self.run("idle-only", replace(workload, seconds=seconds, requests=(), jobs=(first,)))
        return load.training_rate(0.2)

    def isolated(self, workload: Workload, judge: Judge) -> tuple[LoadResult, str] | None:
        """Runs a round in which the fewest processors that keep the bounds serve and the others train; gives
        its load and a sentence about it. None where there is no such topology."""
        return None


class EngineTestbed(Testbed):
    """One engine, with the adapters that a workload's requests name."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._threads = torch.get_num_threads()
        self.engine: Engine = make_engine(bench)

    def run(self, policy: str, workload: Workload, patience: float | None = None) -> LoadResult:
        """See `Testbed.run`."""
        self._load_adapters(workload)
        self.engine.scheduler.policy = make_policy(policy)
        try:
            return serve(self.engine, workload, patience_for(workload) if patience is None else patience)
        finally:
            torch.set_num_threads(self._threads)  # streams have had threads of their own

    def isolated(self, workload: Workload, judge: Judge) -> tuple[LoadResult, str] | None:
        """See `Testbed.isolated`. Training delays answers there, too, by the processors that they lack: the
        delay is charged to them."""
        undisturbed = self.alone(workload) if bounds_deferral(workload) else None
        self.engine.scheduler.policy = make_policy("hybrid")
        self._load_adapters(workload)
        for serving in range(1, self._threads + 1):
            load = isolated(self.engine, self._bench.shape, workload, serving, patience_for(workload))
            if undisturbed is not None:
                charge_deferral(load, undisturbed)
            kept = attained(load, workload, judge)
            if kept >= PROMISED or serving == self._threads:
                break
        return load, f"{serving} of {self._threads} processors serve, the rest train; the base is there twice"

    def _load_adapters(self, workload: Workload) -> None:
        base = self.engine.base
        for name, rank in workload.served:
            if name not in self.engine.adapters.bank.names:
                fresh = fresh_adapter(base, name, LoRAConfig(rank), 0)
                self.engine.adapters.add(fresh.in_type(base.dtype))
