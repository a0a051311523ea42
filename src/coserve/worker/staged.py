"""The worker of one stage of a pipeline, or of a rank of it.

All stages run every plan, each its own layers. The last one samples, and tells the others, which go on with
the next plan meanwhile: they wait for a token where a row needs it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, Sampled, TokenLogprobs
from coserve.parallel.ranks import Arriving
from coserve.worker.fused_pass import FusedPass
from coserve.worker.sampler import Drawn, Sampler
from coserve.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class _TokensAwaited:
    """Tokens of the sequences `keys` at `rows` of the table, on their way from the last stage."""

    keys: Sequence[int]
    rows: Tensor
    tokens: Arriving


class StageSampler(Sampler):
    """Samples in the last stage, for all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stages = self.base.shards.stages
        self._is_last = self.base.chain.has_tail
        self._awaited = deque[_TokensAwaited]()
        self._arriving: Arriving | None = None  # of the pass drawn last

    def settle(self, keys: Iterable[int]) -> None:
        """Waits for the tokens of these sequences, and of all that were sampled before."""
        wanted = set(keys)
        while any(not wanted.isdisjoint(one.keys) for one in self._awaited):
            one = self._awaited.popleft()
            self._note_failed(one.keys, self.table.sampled(one.keys, one.rows, one.tokens.wait()))

    def note(self, passes: Sequence[Drawn]) -> dict[int, Sampled]:
        """See `Sampler`. Before the last stage no token is known yet."""
        if self._is_last:
            return super().note(passes)
        for drawn in passes:
            if drawn.states is not None:
                drawn.states.commit()
        return {}

    def _logits(self, hidden: Tensor, adapters: Sequence[tuple[slice, Bypasses]]) -> Tensor:
        return super()._logits(hidden, adapters) if self._is_last else hidden[0]

    def _choose(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Sequence[Sequence[int]]
    ) -> Tensor:
        if self._is_last:
            return self._sent(super()._choose(logits, rows, positions, ahead))
        into = torch.empty_like(rows)
        self._arriving = self._stages.receive(into, self._stages.count - 1)
        return into

    def _choose_in_parts(
        self, hidden: Tensor, adapters: Sequence[tuple[slice, Bypasses]], rows: Tensor, positions: Tensor
    ) -> Tensor:
        return self._sent(super()._choose_in_parts(hidden, adapters, rows, positions))

    def _sent(self, tokens: Tensor) -> Tensor:
        """The tokens, once they are on their way to the other stages."""
        for stage in range(self._stages.number):
            self._stages.send(tokens, stage)
        return tokens

    def draw(self, batch: Any) -> Drawn:
        """See `Sampler`."""
        drawn = super().draw(batch)
        if drawn.keys and self._arriving is not None:
            self._awaited.append(_TokensAwaited(drawn.keys, drawn.rows, self._arriving))
            self._arriving = None
        return drawn

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        return super()._logprobs(logits, tokens, wanted) if self._is_last else [None] * len(wanted)

    def _prompt_logprobs(self, segment: InferenceSegment, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        return super()._prompt_logprobs(segment, hidden) if self._is_last else ()


class StagePass(FusedPass):
    """Takes rows through a stage's layers, in an order that is the same in all stages."""

    sampler_type = StageSampler
    sampler: StageSampler

    def _kind(self, adapter: str | None) -> tuple[int, str]:
        return (-1, "") if adapter is None else (0, adapter)  # the order by shapes is that of a part


class StageWorker(Worker):
    """The owner of one stage's device. Its results have the seconds in which it did not wait for others."""

    pass_type: ClassVar[type[FusedPass]] = StagePass

    def run(self, plan: BasePlan) -> BaseResult:
        """See `DeviceWorker`."""
        stages = self.base.shards.stages
        waited = stages.waited
        result = super().run(plan)
        return replace(result, seconds=max(result.seconds - (stages.waited - waited), 0.0))

    def _begin(self, plan: BasePlan) -> None:
        assert isinstance(self.fused, StagePass)
        self.fused.sampler.settle([*plan.released, *(segment.key for segment in plan.inference)])
        super()._begin(plan)
