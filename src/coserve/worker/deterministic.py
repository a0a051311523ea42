"""The worker of the deterministic mode: a row's bits depend on its sequence alone.

Inference rows pass in groups of exactly `ROWS`, one group after the other; training windows pass alone, and
the scheduler never chooses their size (`SchedulerConfig.training_window`), so every product of a job always
has the same shape. Tokens are drawn and scored row by row.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from coserve.attention.backend import CommonAttentionMetadata
from coserve.attention.states import PassStates
from coserve.attention.tiled import TiledBackend
from coserve.core.plan import (
    BasePlan,
    InferenceSegment,
    PassesAlone,
    Sampled,
    TokenLogprobs,
    TrainingSegment,
)
from coserve.kernels.native.build import torch_only
from coserve.memory.exhausted import together
from coserve.model import fixed
from coserve.model.batch import FusedRows, LayerCalls
from coserve.model.fixed import ROWS, FixedRows, Ranged
from coserve.model.sample import sample, token_logprobs
from coserve.train.window_group import ForwardWindow
from coserve.worker.fused_pass import FusedPass, Traveller
from coserve.worker.inference import InferenceBatch, adapter_ranges
from coserve.worker.sampler import Drawn, Sampler
from coserve.worker.worker import Worker


class DeterministicSampler(Sampler):
    """A `Sampler` that computes logits, draw and log-probabilities for each row separately."""

    def _logits(self, hidden: Tensor, adapters: Sequence[Ranged]) -> Tensor:
        late = [ranged for ranged in adapters if ranged[1].touches(self.base.late_sites)]
        return fixed.logits(self.base, hidden, late)

    def _is_drawn_in_parts(self, segments: Sequence[InferenceSegment]) -> bool:
        return False  # products of the head have a fixed number of rows

    def _choose(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Sequence[Sequence[int]]
    ) -> Tensor:
        columns = zip(torch.split(logits, 1), torch.split(rows, 1), torch.split(positions, 1), strict=True)
        before: list[list[Sequence[int]]] = [[one] for one in ahead] or [[]] * len(logits)
        pairs = zip(columns, before, strict=True)
        return torch.cat([sample(*row, self.table.sampling, own) for row, own in pairs])

    def _score(self, logits: Tensor, tokens: Tensor, most: int) -> list[TokenLogprobs]:
        pairs = zip(torch.split(logits, 1), torch.split(tokens, 1), strict=True)
        return [token_logprobs(row, token, most).rows()[0] for row, token in pairs]

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        rows = zip(torch.split(logits, 1), torch.split(tokens, 1), wanted, strict=True)
        return [super(DeterministicSampler, self)._logprobs(r, t, [w])[0] for r, t, w in rows]


class DeterministicPass(FusedPass):
    """A `FusedPass` whose groups of rows and windows pass one after the other."""

    sampler_type = DeterministicSampler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begun: set[int] = set()  # rows of the table that a pass of the group under way has
        super().__init__(*args, **kwargs)

    def run(self, plan: BasePlan) -> tuple[dict[int, Sampled], list[TrainingSegment]]:
        """See `FusedPass`. No window shares a pass."""
        if plan.alone is PassesAlone.ALL:
            return self._one_by_one(plan.inference), []
        with together("a pass that several share"):
            return self.sampler.note(self._drawn(plan.inference)), []
        return self._one_by_one(plan.inference), []

    def _drawn(self, segments: Sequence[InferenceSegment]) -> list[Drawn]:
        self._begun.clear()
        passes = map(super()._drawn, _groups(segments))
        return [drawn for its in passes for drawn in its]

    def _inference_rows(self, segments: Sequence[InferenceSegment]) -> InferenceBatch:
        tokens, common = self.table.batch(segments, 0)
        return self._batch(segments, tokens, common, adapter_ranges(self.loaded, segments, common.query_lens))

    def _states(
        self, segments: Sequence[InferenceSegment], common: CommonAttentionMetadata
    ) -> PassStates | None:
        states = self.table.pass_states(segments, common, by_rows=True, begun=frozenset(self._begun))
        self._begun.update(self.table.places(segments))  # the next group may have more of their rows
        return states

    def _prompt_windows(self, rows: int) -> list[tuple[int, int]]:
        return [(start, min(ROWS, rows - start)) for start in range(0, rows, ROWS)]

    def _embed(
        self, tokens: Tensor, positions: Tensor, adapters: Sequence[Ranged]
    ) -> tuple[Tensor, LayerCalls]:
        early = [ranged for ranged in adapters if ranged[1].touches(self.base.early_sites)]
        return fixed.embed(self.base, tokens, positions, early)

    def _compose(self, there: Sequence[Traveller]) -> tuple[FusedRows, LayerCalls]:
        (one,) = there  # windows and groups of rows pass alone
        if isinstance(one, ForwardWindow):
            return super()._compose([one])
        return FixedRows([one.part], one.adapters), one.calls


class DeterministicWorker(Worker):
    """A `Worker` whose tokens, log-probabilities and weights are the same bit for bit, however the
    scheduler mixed, cut or repeated the work, on one machine with one number of threads.

    Raises UnsupportedModel for a base that does not allow this.
    """

    pass_type = DeterministicPass
    attention_type = TiledBackend
    is_deterministic = trains_apart = True

    def computing(self) -> AbstractContextManager[None]:
        """Runs without compiled kernels: bits must not change with a compiler."""
        return torch_only()

    def _prove(self) -> None:
        with torch_only():
            fixed.prove_fixed(self.base)


def _groups(segments: Iterable[InferenceSegment]) -> Iterator[list[InferenceSegment]]:
    """Segments of at most `ROWS` rows together, cut where a group is full; an adapter's rows lie together."""
    group: list[InferenceSegment] = []
    left = ROWS
    for segment in sorted(segments, key=lambda s: s.adapter or ""):
        start, end = segment.start, segment.start + segment.length
        while start < end:
            rows = min(end - start, left)
            context = segment.context + start - segment.start
            group.append(structs.replace(segment, start=start, length=rows, context=context))
            start, left = start + rows, left - rows
            if not left:
                yield group
                group, left = [], ROWS
    if group:
        yield group
