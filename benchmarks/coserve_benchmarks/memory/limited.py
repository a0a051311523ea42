"""A process under a memory limit: python -m coserve_benchmarks.memory.limited, with a `LimitedOrder` on
stdin."""

import resource
import sys
from pathlib import Path
from typing import Literal

import msgspec
import torch

from coserve.adapters.methods.lora import LoRAConfig
from coserve.config import EngineConfig
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.errors import OutOfMemory
from coserve.memory.malloc import keep_freed_memory
from coserve.memory.measured import make_meter
from coserve.train.config import TrainingConfig
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import fixed_prompts, greedy, training_tokens
from coserve.workload.shapes import ModelShape, shape_named
from coserve_benchmarks.ours import examples

_STEPS = 2  # optimizer steps of each job
_HUGE = 64  # times the batch of the others: more than there ever is


class LimitedOrder(msgspec.Struct, frozen=True):
    """An act to perform: `size` measures how large everything is; `serve` answers and trains with a `budget`,
    under a `limit`; `control` takes `control` bytes under the same limit and asks nobody. Bytes are above
    those of the process before its model was there."""

    shape: str
    threads: int
    prompts: int
    prompt: int
    answer: int
    batch: int
    length: int
    rank: int
    seed: int
    act: Literal["size", "serve", "control"] = "size"
    budget: int = 0
    limit: int = 0
    control: int = 0


class LimitedReport(msgspec.Struct, frozen=True):
    """`fixed` and `job` are bytes without jobs, and of one job more. `declared` and `measured` are those at
    the peak, by `accounts` and by the `measure`."""

    fixed: int
    job: int
    declared: int = 0
    measured: int = 0
    measure: str = ""
    accounts: dict[str, int] = {}
    answers: int = 0
    waited: str = ""
    refused: str = ""


def main() -> None:
    """Answers one `LimitedOrder` with one line, a `LimitedReport`; `control` ends otherwise."""
    order = msgspec.json.decode(sys.stdin.read(), type=LimitedOrder)
    torch.set_num_threads(order.threads)
    keep_freed_memory()
    shape = shape_named(order.shape)
    if order.limit:
        most = _mapped() + order.limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if order.act == "control":
        held = torch.ones(order.control, dtype=torch.uint8)
        print(held.sum())
        return
    told = _size(order, shape) if order.act == "size" else _serve(order, shape)
    print(msgspec.json.encode(told).decode())


def _size(order: LimitedOrder, shape: ModelShape) -> LimitedReport:
    engine = _engine(order, shape, "auto")
    fixed = engine.memory.ledger.used
    _start(engine, order, shape, "one")
    return LimitedReport(fixed, engine.memory.ledger.used - fixed)


def _serve(order: LimitedOrder, shape: ModelShape) -> LimitedReport:
    meter = make_meter(torch.device("cpu"))  # before there is a model
    engine = _engine(order, shape, order.budget)
    ledger = engine.memory.ledger
    fixed = ledger.used
    meter.reset()  # loading is over, and what it took on top
    first, second = (_start(engine, order, shape, name) for name in ("one", "two"))
    declared, accounts, waited = ledger.used, ledger.accounts(), second.reason
    refused = _refusal(engine, order, shape)
    answers = _load(engine, order, shape, first)
    measured = meter.peak()
    second.result()
    return LimitedReport(
        fixed,
        declared - fixed,
        declared,
        measured,
        meter.name,
        {account.value: nbytes for account, nbytes in accounts.items()},
        answers,
        waited,
        refused,
    )


def _engine(order: LimitedOrder, shape: ModelShape, memory: int | str) -> Engine:
    """An engine with exactly the pages that the answers take, so that all of them are touched."""
    tokens = order.prompts * (order.prompt + order.answer)
    config = EngineConfig(cache_tokens=tokens, max_running=order.prompts, memory=memory, calibrate=False)
    return Engine(shape.build(), config)


def _start(engine: Engine, order: LimitedOrder, shape: ModelShape, name: str, times: int = 1) -> FineTuning:
    tokens = training_tokens([order.length] * order.batch * times, shape.vocabulary, order.seed)
    training = TrainingConfig(
        batch_size=order.batch * times,
        epochs=_STEPS,
        rows=order.batch * order.length * times,
        keep=SavePolicy.PRUNED,
    )
    return engine.finetune(examples(tokens), name, LoRAConfig(rank=order.rank), training)


def _refusal(engine: Engine, order: LimitedOrder, shape: ModelShape) -> str:
    try:
        _start(engine, order, shape, "huge", _HUGE)
    except OutOfMemory as error:
        return str(error)
    raise AssertionError("a job that never fits is refused")


def _load(engine: Engine, order: LimitedOrder, shape: ModelShape, job: FineTuning) -> int:
    """Generates answers, as many at once as the cache holds, while the job trains; returns their number."""
    answered = 0
    waiting: list[Completion] = []
    while job.is_under_way:
        if not any(answer.finish_reason is None for answer in waiting):
            answered += len(waiting)
            tokens = fixed_prompts(order.prompts, order.prompt, shape.vocabulary, order.seed + answered)
            waiting = [engine.generate(prompt, sampling=greedy(order.answer)) for prompt in tokens]
        engine.step()
    for answer in waiting:
        answer.cancel()
    return answered


def _mapped() -> int:
    """Bytes of this process that count for RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


if __name__ == "__main__":
    main()
