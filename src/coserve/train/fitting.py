"""Settings with which a job that does not fit would fit, each one computed."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from coserve.adapters.adapter import AdapterVersion
from coserve.model.base import Base
from coserve.train.config import TrainingConfig
from coserve.train.fresh import sketch_adapter
from coserve.train.needs import JobNeeds, Steps, job_needs
from coserve.train.save_policy import SavePolicy

_SHORTEST: Final = 16  # tokens that a cut example keeps at least: fewer teach nothing


@dataclass(frozen=True, slots=True)
class Rank:
    """An adapter's rank, and a function from other ranks to the adapter."""

    rank: int
    at: Callable[[int], AdapterVersion]


def rank_of(base: Base, adapter: str, methods: Sequence[object], seed: int) -> Rank | None:
    """The rank of a fresh adapter; None where it is not of one method that has one."""
    method: Any = methods[0]
    rank = getattr(method, "rank", None)
    if len(methods) != 1 or not isinstance(rank, int):
        return None
    return Rank(rank, lambda lower: sketch_adapter(base, adapter, (replace(method, rank=lower),), seed))


@dataclass(frozen=True, slots=True)
class JobSize:
    """Inputs of a job's memory estimate: adapter shapes, lengths of examples in tokens, settings."""

    adapter: AdapterVersion
    lengths: Sequence[int]
    config: TrainingConfig
    rank: Rank | None = None  # None where the adapter has none, or exists already
    is_session: bool = (
        False  # data of unknown lengths, at most `config.rows` in a micro-batch; see `job_needs`
    )
    answers: int = 1  # examples of each of these lengths
    reference: AdapterVersion | None = None  # another adapter beside the one in training

    def needs(self, base: Base, steps: Steps) -> JobNeeds:
        """Bytes of the job on an engine with the limits `steps`."""
        if not self.is_session:
            lengths = [length for length in self.lengths for _ in range(self.answers)]
            config = replace(self.config, batch_size=self.config.batch_size * self.answers)
            return job_needs(base, self.adapter, lengths, config, steps, reference=self.reference)
        full = max(self.config.rows - self.adapter.virtual.prompt_count, 1)
        config = replace(self.config, batch_size=steps.in_flight)
        return job_needs(base, self.adapter, [full] * steps.in_flight, config, steps, accumulates=True)


@dataclass(frozen=True, slots=True)
class _Change:
    """Smaller values of a setting, the job with each, and their text. A change of the model's learning
    `is_last`: it is proposed only where no other is enough."""

    least: int
    most: int
    to: Callable[[int], JobSize]
    written: Callable[[int], str]
    is_last: bool = False


def settings_that_fit(base: Base, job: JobSize, steps: Steps, room: int) -> list[str]:
    """Changes that reduce a job's needs to `room` bytes, the least harmful first; empty if no change is
    enough."""

    def fits(job: JobSize) -> bool:
        return job.needs(base, steps).total <= room

    found = []
    lean, also = (
        replace(job, config=replace(job.config, keep=SavePolicy.INPUTS)),
        f"keep={SavePolicy.INPUTS.value}",
    )
    if fits(lean):  # other changes are alternatives; else they are added to it
        found.append(also)
    if found or job.config.keep is SavePolicy.INPUTS:
        lean, also = job, ""
    for change in _changes(lean):
        if change.is_last and found:
            continue
        number = _largest(change, fits)
        if number is not None:
            found.append(", ".join(filter(None, (change.written(number), also))))
    return found


def _changes(job: JobSize) -> Iterator[_Change]:
    """Fewer rows at once do not change the result of training, a smaller batch does a little."""
    config, longest = job.config, max(job.lengths, default=1)
    prompt = job.adapter.virtual.prompt_count

    def with_config(**fields: Any) -> JobSize:
        return replace(job, config=replace(config, **fields))

    def cut(length: int) -> JobSize:
        shorter = with_config(max_length=length, too_long="truncate", rows=min(config.rows, length + prompt))
        return replace(shorter, lengths=[min(n, length) for n in job.lengths])

    def written(length: int) -> str:
        rows = min(config.rows, length + prompt)
        return f"max_length={length}, too_long=truncate" + (f", rows={rows}" if rows < config.rows else "")

    yield _Change(longest + prompt, config.rows - 1, lambda n: with_config(rows=n), "rows={}".format)
    if not job.is_session:
        yield _Change(1, config.batch_size - 1, lambda n: with_config(batch_size=n), "batch_size={}".format)
        yield _Change(min(_SHORTEST, longest), longest - 1, cut, written, is_last=True)
    if (rank := job.rank) is not None:
        yield _Change(
            1, rank.rank - 1, lambda n: replace(job, adapter=rank.at(n)), "rank={}".format, is_last=True
        )


def _largest(change: _Change, fits: Callable[[JobSize], bool]) -> int | None:
    """The largest value that fits, given that all smaller ones fit too."""
    least, most = change.least, change.most
    if least > most or not fits(change.to(least)):
        return None
    further = range(least + 1, most + 1)
    return least + bisect_left(further, True, key=lambda value: not fits(change.to(value)))
