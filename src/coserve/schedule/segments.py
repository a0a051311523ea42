"""Segments of plans, and descriptions of sequences and micro-batches in them, as immutable data."""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from coserve.core.plan import BasePlan, InferenceSegment, MicroBatchStart, TrainingSegment
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span


def inference_segment(
    sequence: Sequence, start: int, rows: int, drafts: tuple[int, ...] = ()
) -> InferenceSegment:
    """Rows [start, start + rows) of a sequence's own tokens, all before its adapter acts or none, and those
    of `drafts` behind them; `announce` adds the pages."""
    request, end = sequence.request, start + rows
    tail = 1 + len(drafts) if end == len(request.prompt) + len(sequence.output) + sequence.unsampled else 0
    if request.sampling.prompt_logprobs is not None:
        tail += max(0, min(end, len(request.prompt) - 1) - start)
    return InferenceSegment(
        sequence.key,
        start,
        rows + len(drafts),
        request.traits.virtual + start,
        tail,
        request.adapter if start >= request.traits.active_from else None,
        offloaded=sequence.offloaded,
        drafts=drafts,
    )


def training_segment(
    batch: MicroBatch, start: int, rows: int, direction: Direction, span: Span, pairs: int | None = None
) -> TrainingSegment:
    """Rows [start, start + rows) of a micro-batch through the layers of `span`; `pairs` of attention if
    known."""
    if pairs is None:
        pairs = window_pairs(batch, start, rows)
    return TrainingSegment(
        batch.key, batch.job, batch.adapter, start, rows, pairs, direction, span, batch.layers
    )


def announce(
    segments: Iterable[InferenceSegment], sequences: Mapping[int, Sequence]
) -> tuple[InferenceSegment, ...]:
    """Completes a plan's segments by new pages, and by descriptions of sequences not named before. Notes in
    each sequence what the executor knows."""
    completed = []
    for segment in segments:
        sequence = sequences[segment.key]
        if sequence.told is None:
            segment = _described(segment, sequence)
            sequence.told = 0
        if sequence.told < len(sequence.pages):
            segment = replace(segment, new_pages=tuple(sequence.pages[sequence.told :]))
            sequence.told = len(sequence.pages)
        completed.append(segment)
    return tuple(completed)


def note_planned(sequence: Sequence, segment: InferenceSegment, expected_at: float) -> None:
    """Counts a launched segment as done, but for its drafts; its token is expected at `expected_at`."""
    sequence.under_way += 1
    sequence.computed += segment.length - len(segment.drafts)
    if sequence.lookup is not None:
        sequence.lookup.under_way = len(segment.drafts)
    request = sequence.request
    length = len(request.prompt) + len(sequence.output) + sequence.unsampled
    if sequence.computed == length and request.sampling.max_tokens > 0:
        sequence.unsampled += 1
        sequence.expected_at = expected_at


def inference_plan(rows: Iterable[tuple[Sequence, int, int]]) -> BasePlan:
    """A plan of (sequence, start, rows) alone, for measuring and testing executors."""
    chosen = list(rows)
    segments = [inference_segment(*one) for one in chosen]
    return BasePlan(inference=announce(segments, {sequence.key: sequence for sequence, _, _ in chosen}))


def _described(segment: InferenceSegment, sequence: Sequence) -> InferenceSegment:
    """The first segment of a sequence, with its request and what its pages hold."""
    request, template = sequence.request, sequence.template
    if len(sequence.output) > len(request.continued):
        request = replace(request, continued=tuple(sequence.output))
    filled = sequence.shared + sequence.filled
    if template is not None and sequence.pages[filled] == template:
        filled, template = filled + 1, None
    return replace(segment, request=request, filled=filled, template=template)


def announce_batches(batches: Iterable[MicroBatch]) -> tuple[MicroBatchStart, ...]:
    """Starts of the micro-batches that no plan has named yet."""
    fresh = [batch for batch in batches if not batch.told]
    for batch in fresh:
        batch.told = True
    return tuple(map(batch_start, fresh))


def batch_start(batch: MicroBatch) -> MicroBatchStart:
    """Describes a micro-batch to an executor."""
    return MicroBatchStart(
        key=batch.key,
        job=batch.job,
        lengths=batch.lengths,
        layers=batch.layers,
        tokens=batch.tokens,
        labels=batch.labels,
        padding=sum(batch.padding),
        step_labels=batch.step_labels,
        dropout_seed=batch.dropout_seed,
        loss=batch.loss,
        forward_only=batch.forward_only,
        reports=batch.reports,
        pass_number=batch.pass_number,
        reference=batch.reference,
        top_k=batch.top_k,
    )


def causal_pairs(start: int, rows: int) -> int:
    """Number of (query, key) pairs of rows [start, start + rows) of one sequence, the diagonal included."""
    return rows * start + rows * (rows + 1) // 2


def window_pairs(batch: MicroBatch, start: int, rows: int) -> int:
    """Number of (query, key) pairs in a window of a micro-batch; examples see virtual tokens and
    themselves."""
    pairs, begin, end = 0, 0, start + rows
    for length in batch.lengths:
        low, high = max(start, begin), min(end, begin + length)
        if low < high:
            ahead = batch.prefix + (batch.prompt if begin else 0)
            pairs += causal_pairs(ahead + low - begin, high - low)
        begin += length
        if begin >= end:
            break
    return pairs
