"""A preview of a fine-tuning job: what its data are, what would be left out, and what it would take. It is
read as the job would be, and nothing is created."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from statistics import fmean
from typing import Final

from msgspec import structs

from coserve.engine.engine import Engine
from coserve.engine.job_files import API_NAMES, prepare_job, read_validation
from coserve.engine.reading import Reading
from coserve.engine.training import make_steps
from coserve.errors import AdapterError, ConfigError, CoserveError, DataError
from coserve.text import Text
from coserve.train.example import IGNORED, Example
from coserve.train.job import PreparedJob
from coserve.train.lengths import check_lengths_of, limit_of
from coserve.train.objectives import ORPO, Supervised
from coserve.train.steps import count_steps
from coserve.wire.messages import MOST_SHOWN, Fault, JobPreview, JobSpec, ShownExample, TextPiece, TokenCounts

SECONDS: Final = 20.0  # for which a file is read: the rest is estimated
_RECORDS: Final = 10_000_000  # of a file, as many as one may have
_LOOKED_AT: Final = 512  # examples that memory and time are computed from
_SHOWN: Final = 2048  # tokens of an example that are shown
_SHOWN_TOKENS: Final = 512  # of each of several examples
_BINS: Final = 12
_SPREAD: Final = 8  # times the shortest length up to which bins are equal
_DRAWN_STEPS: Final = 8  # steps of which the mean time is taken
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def read_preview(
    engine: Engine, spec: JobSpec, records: int | None = None, shown: int = 0
) -> tuple[JobPreview, PreparedJob | None]:
    """The preview of a job whose file has so many `records`, without its memory, and with the tokens of the
    first `shown` of them; and the job with its longest examples, which `judge` needs, where any is left.
    Takes no lock: steps go on meanwhile."""
    try:
        prepared = prepare_job(engine, spec, spec.job, reading=Reading(_RECORDS, SECONDS, tolerates=True))
    except (DataError, AdapterError, ConfigError) as error:
        return JobPreview(fault=Fault.of(error)), None
    data, config, counts = prepared.data, prepared.config, prepared.data.counts
    positions = engine.base.max_positions
    limit = limit_of(config.max_length, config.too_long, positions, prepared.reserved, API_NAMES)
    fault = None
    try:
        check_lengths_of(data, limit)
        read_validation(engine, spec, prepared, _LOOKED_AT)
    except CoserveError as error:
        fault = Fault.of(error)
    read = len(counts.lengths)
    scale = 1.0 if data.is_whole or records is None else max(records / read, 1.0)
    units = round(prepared.units * scale)
    first = [_pieces(example, engine.text) for example in data.examples[: prepared.objective.group]]
    preview = JobPreview(
        fault=fault,
        container=data.container,
        format=data.format,
        records=read,
        is_whole=data.is_whole,
        tokens=_counts_of(counts.lengths),
        limit=limit.most,
        over=counts.over,
        longest_place=counts.place,
        truncated=counts.truncated,
        skipped=counts.skipped,
        dropped=counts.dropped,
        split=counts.split,
        pieces=counts.pieces,
        examples=prepared.units,
        ignored=data.ignored,
        first=first[0] if first else (),
        rejected=first[1] if len(first) > 1 and not data.desirable else (),
        shown=tuple(_shown(prepared, engine.text, min(shown, MOST_SHOWN))),
        steps=count_steps(units, config) if units else 0,
        seconds=_seconds(engine, prepared, scale) if units else None,
    )
    return preview, _longest(prepared) if units else None


def judge(engine: Engine, preview: JobPreview, longest: PreparedJob | None) -> JobPreview:
    """The preview with the job's memory, and where it would be refused the reason. Runs between two steps."""
    if longest is None:
        return preview
    try:
        needs = engine.training.check(longest)
    except CoserveError as error:
        return structs.replace(preview, fault=preview.fault or Fault.of(error))
    return structs.replace(preview, memory=needs.total, memory_room=engine.memory.job_room())


def _counts_of(lengths: Sequence[int]) -> TokenCounts:
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return TokenCounts(
        total=sum(ordered),
        least=ordered[0],
        most=ordered[-1],
        quantiles={name: ordered[round(share * last)] for name, share in _SHARES.items()},
        histogram=tuple(_histogram(ordered)),
    )


def _histogram(ordered: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Bins of equal widths, or where lengths are very different each up to a power of two."""
    least, most = ordered[0], ordered[-1]
    if most < _SPREAD * max(least, 1):
        width = (most - least) // _BINS + 1
        starts = list(range(least, most + 1, width))
    else:
        starts = [1 << bits >> 1 for bits in range(least.bit_length(), most.bit_length() + 1)]
        width = starts[-1]
    for first, following in pairwise([*starts, starts[-1] + width]):
        number = bisect_left(ordered, following) - bisect_left(ordered, first)
        yield first, following - 1, number


def _pieces(example: Example, text: Text | None) -> tuple[TextPiece, ...]:
    """The beginning of an example as text, in stretches that are trained or not."""
    if text is None:
        return ()
    found: list[tuple[bytes, bool]] = []
    for row, token in enumerate(example.tokens[:_SHOWN]):
        is_trained = row > 0 and example.labels[row - 1] != IGNORED
        written = text.tokens.bytes_of(token)
        if found and found[-1][1] is is_trained:
            found[-1] = found[-1][0] + written, is_trained
        else:
            found.append((written, is_trained))
    return tuple(TextPiece(part.decode(errors="replace"), trained) for part, trained in found)


def _shown(prepared: PreparedJob, text: Text | None, most: int) -> Iterator[ShownExample]:
    """The first `most` examples, or pairs, token by token."""
    if text is None:
        return
    data, group = prepared.data, prepared.objective.group
    for place, example in enumerate(data.examples[: most * group]):
        labels = (IGNORED, *example.labels)  # of a token by the row before it
        pieces = tuple(
            TextPiece(text.tokens.bytes_of(token).decode(errors="replace"), label != IGNORED)
            for token, label in zip(example.tokens[:_SHOWN_TOKENS], labels, strict=False)
        )
        yield ShownExample(pieces, len(example.tokens), place % group > 0 and not data.desirable)


def _seconds(engine: Engine, prepared: PreparedJob, scale: float) -> float | None:
    """Seconds of the training where nothing else runs, by the engine's cost model; None where it has none
    for the objective, or the costs of this machine were not measured."""
    objective, config = prepared.objective, prepared.config
    if not engine.cost.is_measured or not isinstance(objective, Supervised | ORPO):
        return None
    sample = _with_units(prepared, range(min(prepared.units, _LOOKED_AT)))
    seconds = []
    for seed in range(_DRAWN_STEPS):
        drawn = replace(sample, config=replace(config, seed=seed))
        work = make_steps(drawn, engine.base).next_work(count())
        assert work is not None, "a job with examples has a step"
        seconds.append(engine.cost.predict_iteration(work.micro_batches))
    return fmean(seconds) * count_steps(round(prepared.units * scale), config)


def _longest(prepared: PreparedJob) -> PreparedJob:
    """The same job with its longest examples alone, which decide about its memory."""
    lengths = prepared.lengths
    by_length = sorted(range(prepared.units), key=lengths.__getitem__, reverse=True)
    return _with_units(prepared, sorted(by_length[:_LOOKED_AT]))


def _with_units(prepared: PreparedJob, units: Iterable[int]) -> PreparedJob:
    data, group, chosen = prepared.data, prepared.objective.group, list(units)
    examples = tuple(data.examples[unit * group + at] for unit in chosen for at in range(group))
    desirable = tuple(data.desirable[unit] for unit in chosen) if data.desirable else ()
    references = tuple(data.references[unit] for unit in chosen) if data.references else ()
    kept = replace(data, examples=examples, desirable=desirable, references=references)
    return replace(prepared, data=kept)
