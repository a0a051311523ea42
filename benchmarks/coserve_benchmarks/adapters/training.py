"""Rows `train.*`: many adapters that train in one step, beside one adapter, and beside one after the
other."""

from collections.abc import Callable
from functools import partial

from coserve.adapters.methods.lora import LoRAConfig
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import training_tokens
from coserve_benchmarks.adapters.approaches import NAIVE, Batch, SharedModel, TrainStep
from coserve_benchmarks.adapters.sizes import NOBODY_WAITS, AdapterSizes, ranks_of
from coserve_benchmarks.ours import (
    Bench,
    endless,
    examples,
    make_engine,
    seconds_of_steps,
    seconds_of_tokens,
)
from coserve_benchmarks.peers import PeftTraining
from coserve_benchmarks.timing import Timing, alternate, speedup

_RANK = 8
_DATA = 4  # optimizer steps' worth of different examples


class Trainers:
    """Jobs on an engine of their own, `batch` examples of `length` tokens each a step; a call runs until each
    has made `steps` optimizer steps, which are `tokens` in all."""

    def __init__(self, bench: Bench, jobs: int, batch: int, length: int, steps: int = 1) -> None:
        self._engine: Engine = make_engine(bench, cache_tokens=1024, scheduler=NOBODY_WAITS)
        self.jobs: list[FineTuning] = []
        self.tokens, self._steps = jobs * steps * batch * length, jobs * steps
        config = endless(bench, batch, keep=SavePolicy.EVERYTHING)
        for job in range(jobs):
            data = training_tokens(
                [length] * batch * _DATA, bench.shape.vocabulary, bench.settings.seed + job
            )
            started = self._engine.finetune(examples(data), f"trained-{job}", LoRAConfig(rank=_RANK), config)
            self.jobs.append(started)

    def __call__(self) -> float:
        """Seconds until all have stepped that often; between calls nothing runs."""
        return seconds_of_steps(self._engine, self._steps)


class MixedTrainers:
    """Jobs of the adapters of a batch, each on its own examples, on an engine of their own. Weights are the
    numbers of examples, so that all jobs step equally often. A call trains `tokens` tokens, those of `steps`
    optimizer steps of every job."""

    def __init__(self, bench: Bench, batch: Batch, steps: int) -> None:
        self._engine: Engine = make_engine(bench, cache_tokens=1024, scheduler=NOBODY_WAITS)
        self.tokens = steps * batch.tokens
        for job, (rank, share) in enumerate(zip(batch.ranks, batch.shares, strict=True)):
            seed, lengths = bench.settings.seed + job, [batch.length] * share * _DATA
            data = training_tokens(lengths, bench.shape.vocabulary, seed)
            config = endless(bench, share, keep=SavePolicy.EVERYTHING, weight=float(share))
            self._engine.finetune(examples(data), f"mixed-{job}", LoRAConfig(rank=rank), config)

    def __call__(self) -> float:
        """Seconds of that; between calls nothing runs."""
        return seconds_of_tokens(self._engine, self.tokens)


def run(bench: Bench, sizes: AdapterSizes) -> None:
    """Measures both rows."""
    _against_one(bench, sizes)
    _against_sequential(bench, sizes)


def run_mixed(bench: Bench, sizes: AdapterSizes) -> None:
    """Measures jobs of different ranks, of one short example a step or two in turn, beside one adapter's step
    after the other on packed linears, with AdamW in the base's type."""
    jobs, steps = sizes.mixed_jobs, sizes.job_steps
    shares = tuple(1 + job % 2 for job in range(jobs))
    batch = Batch(tuple(ranks_of("mixed", jobs)), shares, sizes.mixed_tokens)
    one_by_one = TrainStep(SharedModel(bench.shape, sum(batch.ranks)), batch, NAIVE)
    together = MixedTrainers(bench, batch, steps)
    contestants: dict[str, Callable[[], float]] = {
        "together": together,
        "one_by_one": lambda: sum(one_by_one() for _ in range(steps)),
    }
    times = alternate(contestants, sizes.train_rounds, bench.machine.threads, warmup=2)
    for name, timing in times.items():
        _figure(bench, f"train.mixed[{name}]", together.tokens, timing)
    ratio = speedup(times["together"], times["one_by_one"])
    note = f"ranks {', '.join(map(str, sorted(set(batch.ranks))))}; examples of {batch.length} tokens"
    bench.results.ratio(f"train.mixed[{jobs}]", ratio, note)


def _against_one(bench: Bench, sizes: AdapterSizes) -> None:
    length = sizes.tokens // sizes.trained
    contestants = {
        "one": Trainers(bench, 1, sizes.trained, length),
        "many": Trainers(bench, sizes.trained, 1, length),
    }
    times = alternate(contestants, sizes.train_rounds, bench.machine.threads)
    for name, timing in times.items():
        _figure(bench, f"train.tokens[{name}]", contestants[name].tokens, timing)
    ratio = speedup(times["many"], times["one"])
    note = f"{sizes.trained} adapters of rank {_RANK}, {length} tokens of each, and as many tokens of one"
    bench.results.ratio(f"train.vs_single[{sizes.trained}]", ratio, note)


def _against_sequential(bench: Bench, sizes: AdapterSizes) -> None:
    data = training_tokens([sizes.job_tokens], bench.shape.vocabulary, bench.settings.seed)
    peers = {
        "peft": PeftTraining(bench.shape, data, _RANK, matched=False),
        "peft_matched": PeftTraining(bench.shape, data, _RANK, matched=True),
    }
    for name, peer in peers.items():
        tried = peer.tune(False, bench.machine.threads)
        bench.results.peer(f"train.small[{name}]", peer.settings(False).describe(), tried)
    together = Trainers(bench, sizes.jobs, 1, sizes.job_tokens, sizes.job_steps)
    contestants: dict[str, Callable[[], float]] = {
        "together": together,
        **{name: partial(_one_after_the_other, peer, sizes) for name, peer in peers.items()},
    }
    times = alternate(contestants, sizes.train_rounds, bench.machine.threads)
    for name, timing in times.items():
        _figure(bench, f"train.small[{name}]", together.tokens, timing)
    for name in peers:
        ratio = speedup(times["together"], times[name])
        key = "train.vs_sequential" + name.removeprefix("peft")
        bench.results.ratio(key, ratio)


def _one_after_the_other(peer: PeftTraining, sizes: AdapterSizes) -> float:
    """Seconds of as many steps as all jobs take. All of them use one adapter's weights, which favours the
    peer."""
    return sum(peer.step(checkpointing=False) for _ in range(sizes.jobs * sizes.job_steps))


def _figure(bench: Bench, name: str, tokens: int, timing: Timing) -> None:
    spread = (tokens / timing.high, tokens / timing.low)
    bench.results.figure(name, tokens / timing.median, "tokens/s", spread)
