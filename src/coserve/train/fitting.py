"""Settings with which a job that does not fit would fit, each one computed."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from coserve.model.base import Base
from coserve.train.fresh import sketch_adapter
from coserve.train.job import PreparedJob
from coserve.train.needs import JobNeeds, Steps
from coserve.train.save_policy import SavePolicy

_SHORTEST: Final = 16  # tokens that a cut example keeps at least: fewer teach nothing
_KEEP: Final = f"keep={SavePolicy.INPUTS.value}"


@dataclass(frozen=True, slots=True)
class _Change:
    """Smaller values of a setting, the job's needs with each, and their text. A change of the model's
    learning `is_last`: it is proposed only where no other is enough."""

    least: int
    most: int
    needs: Callable[[int], JobNeeds]
    written: Callable[[int], str]
    is_last: bool = False


def settings_that_fit(base: Base, job: PreparedJob, steps: Steps, room: int) -> list[str]:
    """Changes that reduce a job's needs to `room` bytes, the least harmful first; empty if no change is
    enough."""
    found, also, lean = [], "", _with_config(job, keep=SavePolicy.INPUTS)
    if lean.needs(base, steps).total <= room:  # other changes are alternatives; else they are added to it
        found.append(_KEEP)
    if found or job.config.keep is SavePolicy.INPUTS:
        lean = job
    else:
        also = _KEEP
    for change in _changes(base, lean, steps):
        if change.is_last and found:
            continue
        number = _largest(change, room)
        if number is not None:
            found.append(", ".join(filter(None, (change.written(number), also))))
    return found


def _changes(base: Base, job: PreparedJob, steps: Steps) -> Iterator[_Change]:
    """Fewer rows at once do not change the result of training, a smaller batch does a little."""
    config, lengths = job.config, job.lengths
    longest, prompt = max(lengths, default=1), job.first.virtual.prompt_count

    def needs(lengths: Sequence[int] = lengths, **fields: Any) -> JobNeeds:
        return _with_config(job, **fields).needs(base, steps, lengths)

    def cut(length: int) -> JobNeeds:
        return needs([min(n, length) for n in lengths], rows=min(config.rows, length + prompt))

    def written(length: int) -> str:
        rows = min(config.rows, length + prompt)
        return f"max_length={length}, too_long=truncate" + (f", rows={rows}" if rows < config.rows else "")

    yield _Change(longest + prompt, config.rows - 1, lambda n: needs(rows=n), "rows={}".format)
    if lengths:  # a session has none
        yield _Change(1, config.batch_size - 1, lambda n: needs(batch_size=n), "batch_size={}".format)
        yield _Change(min(_SHORTEST, longest), longest - 1, cut, written, is_last=True)
    method: Any = job.methods[0] if len(job.methods) == 1 and job.is_fresh else None
    if isinstance(rank := getattr(method, "rank", None), int):

        def with_rank(lower: int) -> JobNeeds:
            methods = (replace(method, rank=lower),)
            first = sketch_adapter(base, job.adapter, methods, config.seed)
            return replace(job, first=first).needs(base, steps, lengths)

        yield _Change(1, rank - 1, with_rank, "rank={}".format, is_last=True)


def _with_config(job: PreparedJob, **fields: Any) -> PreparedJob:
    return replace(job, config=replace(job.config, **fields))


def _largest(change: _Change, room: int) -> int | None:
    """The largest value that fits, given that all smaller ones fit too."""

    def fits(value: int) -> bool:
        return change.needs(value).total <= room

    least, most = change.least, change.most
    if least > most or not fits(least):
        return None
    further = range(least + 1, most + 1)
    return least + bisect_left(further, True, key=lambda value: not fits(value))
