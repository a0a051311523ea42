"""A limited process: python -m coserve_benchmarks.streamed.child, with a `StreamedOrder` on stdin."""

import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from coserve.config import EngineConfig
from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.memory.malloc import keep_freed_memory
from coserve.schedule.policies import make_policy
from coserve.simulate.replay import LoadResult, replay
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import TimedJob, TimedRequest, Workload, fixed_prompts, greedy, training_tokens
from coserve_benchmarks.drive import EngineTarget
from coserve_benchmarks.ours import start_job
from coserve_benchmarks.streamed.limit import own_nbytes
from coserve_benchmarks.streamed.orders import Act, Rates, Round, StreamedOrder, StreamedReport
from coserve_benchmarks.streamed.swapped import Preemptions

_TARGETS: Final = ("q_proj", "v_proj")  # the adapters' linears: PEFT's default
_PIECE: Final = 8 << 20  # bytes of one read of the disk's trial
_TRIAL: Final = 1 << 30  # bytes of the whole trial
_PATIENCE: Final = 120.0  # seconds after a load, for the last answers
_UNBOUNDED: Final = 1e9
_LIKELIEST: Final = 20  # tokens whose log-probabilities are compared


def main() -> None:
    """Answers one order with one line, a `StreamedReport`."""
    order = msgspec.json.decode(sys.stdin.read(), type=StreamedOrder)
    torch.set_num_threads(order.threads)
    print(msgspec.json.encode(_ACTS[order.act](order)).decode())


def _size(order: StreamedOrder) -> StreamedReport:
    """Bytes of the process's own memory when everything is imported."""
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM is not None
    return StreamedReport(imports=own_nbytes(os.getpid()))


def _control(order: StreamedOrder) -> StreamedReport:
    """Loads the model as a whole, and answers a request."""
    engine = Engine(order.folder, EngineConfig(cache_tokens=1024, calibrate=False))
    engine.generate((1, 2, 3), sampling=greedy(2)).result()
    return StreamedReport()


def _coserve(order: StreamedOrder) -> StreamedReport:
    before = _disk_rate(order.folder)
    began = time.perf_counter()
    engine = _open(order)
    loading = time.perf_counter() - began
    streaming = engine.streaming
    assert streaming is not None and streaming.plan.read_nbytes, "the base is streamed"
    _warm(engine, order)
    ours = _Ours(engine, order)
    decoding = tuple(ours.decoding(turn) for turn in range(order.rounds))
    turns = tuple(ours.turns(turn) for turn in range(order.rounds))
    deferral, attained, requests = ours.deferral()
    return StreamedReport(
        loading=loading,
        pass_nbytes=streaming.plan.read_nbytes,
        pass_seconds=ours.pass_seconds,
        free_rows=engine.scheduler.cost.first.free_rows,
        described=str(streaming),
        disk=(before, _disk_rate(order.folder)),
        decoding=decoding,
        deferral=deferral,
        attained=attained,
        requests=requests,
        turns=turns,
        tokens=_tokens(order),
    )


def _long(order: StreamedOrder) -> StreamedReport:
    """A prompt answered in float32 with pages for a quarter of it, and with pages for all."""
    prompt = fixed_prompts(1, order.long, order.vocabulary, order.seed)[0]
    found: list[list[float]] = []
    seconds, read = list[float](), list[int]()
    for tokens in (order.long // 4, order.long + order.answer):
        config = EngineConfig(dtype="float32", cache_tokens=tokens, calibrate=False, scratch=order.scratch)
        engine = Engine(order.folder, config)
        engine.generate(prompt[:32], sampling=greedy(2)).result()
        sampling = replace(greedy(order.answer), logprobs=_LIKELIEST, prompt_logprobs=0)
        began = time.perf_counter()
        answer = engine.generate(prompt, sampling=sampling).result()
        seconds.append(time.perf_counter() - began)
        likeliest = [value for one in answer.logprobs for _, value in one.top]
        found.append([*likeliest, *(one.chosen for one in (*answer.logprobs, *answer.prompt_logprobs))])
        read.append(engine.stats().offloaded_read_bytes)
    assert read[0] > read[1] == 0, "the prompt lies elsewhere where pages are few"
    differs = max(abs(one - other) for one, other in zip(*found, strict=True))
    return StreamedReport(long=Round(*seconds), differs=differs, long_nbytes=read[0])


def _swap(order: StreamedOrder) -> StreamedReport:
    """Preempted sequences, moved and computed again."""
    keep_freed_memory()
    return StreamedReport(swapped=Preemptions(order).cases())


def _share(order: StreamedOrder) -> StreamedReport:
    """Rates of a base of which `base_memory` bytes stay or pass through at a time. Its passes are shared
    whatever they cost, so costs are not measured."""
    engine = _open(order, calibrate=False)
    _warm(engine, order)
    ours, streaming = _Ours(engine, order), engine.streaming
    assert streaming is not None
    return StreamedReport(
        pass_nbytes=streaming.plan.read_nbytes, rates=tuple(ours.rates(turn) for turn in range(order.rounds))
    )


def _open(order: StreamedOrder, calibrate: bool = True) -> Engine:
    """An engine, calibrated unless told otherwise."""
    keep_freed_memory()
    engine = Engine(order.folder, _config(order))
    engine.memory.count_process()
    if calibrate:
        engine.calibrate()
    return engine


def _config(order: StreamedOrder) -> EngineConfig:
    """An engine within the order's memory, with pages for the requests of a round and two more."""
    tokens = (order.prompts + 2) * (order.prompt + order.answer + 16)
    return EngineConfig(
        memory=order.memory,
        base_memory=order.base_memory,
        cache_tokens=tokens,
        max_running=2 * order.prompts,
        prefix_sharing=False,
        calibrate=False,
        scratch=order.scratch,
        scheduler={"interruptible": True, "max_prefill_rows": 256, "micro_batches_in_flight": 1},
    )


class _LeanTarget(EngineTarget):
    """An engine whose jobs keep layers' inputs only."""

    def start(self, job: TimedJob) -> Callable[[], None]:
        """See `LoadTarget`."""
        return start_job(self.engine, job, SavePolicy.INPUTS).cancel


class _Ours:
    """Rounds of an engine."""

    def __init__(self, engine: Engine, order: StreamedOrder) -> None:
        self._engine, self._order = engine, order

    @property
    def pass_seconds(self) -> float:
        """Seconds of a pass, as the cost model has learned them."""
        return self._engine.scheduler.cost.first.reads.pass_seconds

    def decoding(self, turn: int) -> float:
        """Bytes that are read in a second while requests are answered alone."""
        engine, order, reader = self._engine, self._order, self._engine.base.reader
        assert reader is not None
        prompts = fixed_prompts(order.prompts, order.prompt, order.vocabulary, order.seed + turn)
        answers = [engine.generate(prompt, sampling=greedy(order.answer)) for prompt in prompts]
        engine.step()  # the prompts
        before, began = reader.total.nbytes, time.perf_counter()
        while any(answer.finish_reason is None for answer in answers):
            engine.step()
        return (reader.total.nbytes - before) / (time.perf_counter() - began)

    def turns(self, turn: int) -> Round:
        """Seconds of the same requests and training: shared passes, and serving and training in turn."""
        runs: list[Callable[[], float]] = [
            lambda: self._round(f"heterogeneous:{_UNBOUNDED}", turn),
            lambda: self._round("idle-only", turn),
        ]
        seconds = [run() for run in (runs if turn % 2 else runs[::-1])]
        shared, apart = seconds if turn % 2 else seconds[::-1]
        return Round(ours=shared, theirs=apart)

    def rates(self, turn: int) -> Rates:
        """Tokens a second of answers, of training, and of both in shared passes, one after the other."""
        order = self._order
        answered, trained = order.prompts * order.answer, order.steps * order.batch * order.length
        shared = f"heterogeneous:{_UNBOUNDED}"
        return Rates(
            answered / self._round(shared, turn, steps=0),
            trained / self._round(shared, turn, prompts=0),
            (answered + trained) / self._round(shared, turn),
        )

    def _round(self, policy: str, turn: int, prompts: int | None = None, steps: int | None = None) -> float:
        """Seconds of `prompts` requests at once and a job of `steps` optimizer steps; the order's, where they
        are not given."""
        engine, order = self._engine, self._order
        count, steps = order.prompts if prompts is None else prompts, order.steps if steps is None else steps
        engine.scheduler.policy = make_policy(policy)
        asked = fixed_prompts(count, order.prompt, order.vocabulary, order.seed + turn)
        began = time.perf_counter()
        jobs = []
        if steps:
            job = _job(order, f"{policy}-{turn}-{count}", steps)
            jobs.append(start_job(engine, job, SavePolicy.INPUTS))
        answers = [engine.generate(prompt, sampling=greedy(order.answer)) for prompt in asked]
        while any(job.is_under_way for job in jobs) or any(one.finish_reason is None for one in answers):
            engine.step()
        seconds = time.perf_counter() - began
        assert all(len(job.history) == steps for job in jobs)
        return seconds

    def deferral(self) -> tuple[tuple[Round, ...], tuple[Round, ...], int]:
        """Fine-tuning tokens a second of algorithm 2 and algorithm 1 in each round, the shares of requests
        within their bounds, and the number of requests in all."""
        order, trained, attained, requests = self._order, [], [], 0
        for turn in range(order.bound_rounds):
            workload = self._bounded(turn)
            policies = ["heterogeneous", "deferred"][:: 1 if turn % 2 else -1]
            loads = {policy: self._load(policy, workload) for policy in policies}
            slo = workload.requests[0].slo
            rates = [loads[name].overall_training_rate() for name in ("heterogeneous", "deferred")]
            shares = [loads[name].attainment(slo) for name in ("heterogeneous", "deferred")]
            trained.append(Round(*rates))
            attained.append(Round(*shares))
            requests += len(workload.requests)
        return tuple(trained), tuple(attained), requests

    def _load(self, policy: str, workload: Workload) -> LoadResult:
        self._engine.scheduler.policy = make_policy(policy)
        return replay(_LeanTarget(self._engine), workload, _PATIENCE)

    def _bounded(self, turn: int) -> Workload:
        """Requests at random gaps, as FineInfer's (4.1: evenly up to a greatest one), with equal bounds."""
        order, one = self._order, self.pass_seconds
        draw = random.Random(order.seed + turn)
        times, at = [], draw.uniform(0, order.gap * one)
        while at < order.load * one:
            times.append(at)
            at += draw.uniform(0, order.gap * one)
        prompts = fixed_prompts(len(times), order.prompt, order.vocabulary, order.seed + turn)
        slo = SLO(deferral=order.bound * one)
        requests = tuple(
            TimedRequest(at, prompt, order.answer, slo=slo) for at, prompt in zip(times, prompts, strict=True)
        )
        job = _job(order, f"bounded-{turn}", 1_000_000)
        return Workload("deferral", "", order.load * one, requests, (job,))


def _job(order: StreamedOrder, name: str, steps: int) -> TimedJob:
    """A job of so many optimizer steps, each of one micro-batch."""
    examples = tuple(training_tokens([order.length] * order.batch, order.vocabulary, order.seed))
    rows = order.batch * order.length
    return TimedJob(0.0, name, examples, order.batch, order.rank, _TARGETS, steps, rows)


def _warm(engine: Engine, order: StreamedOrder) -> None:
    """Answers a request and trains a step, so that no round is the first."""
    job = start_job(engine, _job(order, "warm", 1), SavePolicy.INPUTS)
    answer = engine.generate((1, 2, 3), sampling=greedy(2))
    while job.is_under_way or answer.finish_reason is None:
        engine.step()


def _disk_rate(folder: str) -> float:
    """Bytes a second of a gigabyte of the model's files read in order, past the page cache or through it,
    whichever is faster; what was read is dropped."""
    file = max(Path(folder).glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return max(_read_rate(file, getattr(os, "O_DIRECT", 0)), _read_rate(file, 0))


def _read_rate(file: Path, flag: int) -> float:
    buffer = mmap.mmap(-1, _PIECE)
    descriptor = os.open(file, os.O_RDONLY | flag)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began, done, count = time.perf_counter(), 0, _PIECE
        while done < _TRIAL and count == _PIECE:  # the last one of a small file may be shorter
            count = os.preadv(descriptor, [buffer], done)
            os.posix_fadvise(descriptor, done, count, os.POSIX_FADV_DONTNEED)
            done += count
        return done / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def _accelerate(order: StreamedOrder) -> StreamedReport:
    """transformers and accelerate: what does not fit stays on the disk and is loaded module by module."""
    from transformers import AutoModelForCausalLM

    room = {"cpu": order.memory // 2}
    model: Any = AutoModelForCausalLM.from_pretrained(
        order.folder, device_map="auto", max_memory=room, offload_folder=order.scratch
    )
    return _peer(order, model)


def _mapped(order: StreamedOrder) -> StreamedReport:
    """transformers alone, whose weights are mapped from the files: the system reads and drops their pages."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(order.folder)
    return _peer(order, model)


def _peer(order: StreamedOrder, model: Any) -> StreamedReport:
    """Rounds of answers, and then of training with checkpointing, which alone stays within the limit."""
    from peft import LoraConfig, get_peft_model

    tuned: Any = get_peft_model(model, LoraConfig(r=order.rank, target_modules=[*_TARGETS]))
    tuned.enable_input_require_grads()
    optimizer = torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=1e-4)
    prompts = torch.tensor(fixed_prompts(order.prompts, order.prompt, order.vocabulary, order.seed))
    examples = training_tokens([order.length] * order.batch, order.vocabulary, order.seed)
    batch, seconds = torch.tensor(examples), []
    for _ in range(order.rounds):
        began = time.perf_counter()
        tuned.eval()
        with torch.no_grad():
            tuned.generate(
                input_ids=prompts, max_new_tokens=order.answer, min_new_tokens=order.answer, pad_token_id=0
            )
        tuned.train()
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(order.steps):
            loss = tuned(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tuned.gradient_checkpointing_disable()
        seconds.append(time.perf_counter() - began)
    return StreamedReport(peer=tuple(seconds), tokens=_tokens(order))


def _tokens(order: StreamedOrder) -> int:
    """Tokens answered and trained in a round."""
    return order.prompts * order.answer + order.steps * order.batch * order.length


_ACTS: Final[dict[Act, Callable[[StreamedOrder], StreamedReport]]] = {
    "size": _size,
    "control": _control,
    "coserve": _coserve,
    "share": _share,
    "long": _long,
    "swap": _swap,
    "accelerate": _accelerate,
    "mapped": _mapped,
}


if __name__ == "__main__":
    main()
