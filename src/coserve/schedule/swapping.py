"""The second tier of pages: keys and values are read again instead of computed again.

As vLLM's swapping, and Symbiosis' caches elsewhere (3.4), but chosen anew for each preemption, by the
predicted seconds of computing the tokens again and those of writing and reading their pages. Pages of
prefixes (`schedule.swapped_prefixes`) take the room that is left.
"""

from collections.abc import Iterable

from coserve.core.plan import SwapIn
from coserve.core.sequence import Sequence, SwapCopy
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.features import StepFeatures
from coserve.schedule.newcomers import INFINITE
from coserve.schedule.step_costs import StepCosts
from coserve.schedule.swap_tier import SwapCopies, SwapTier


class Swapping:
    """Room and cost of a base's `pages` in a `tier`, of `page_nbytes` each, and the copies of them. `cost` is
    that of the base's steps."""

    def __init__(
        self,
        cost: CostModel,
        pages: int = 0,
        tier: SwapTier | None = None,
        page_nbytes: int = 1,
    ) -> None:
        self.cost = cost
        self.tier = SwapTier(pages * page_nbytes) if tier is None else tier
        self.copies = SwapCopies(self.tier, pages, page_nbytes)

    def is_worth(self, sequence: Sequence, start: int, pages: int, now: float) -> bool:
        """Tells whether moving `pages` there and back takes less than computing the tokens from `start` on
        again, and there is room."""
        if pages <= 0 or pages > self.copies.room or self.tier.is_barred(now):
            return False
        writing, reading = self.seconds(pages, now)
        if max(self.tier.seconds(now) + writing, reading) > self.tier.limit:
            return False
        rows, adapter = sequence.computed - start, sequence.request.adapter
        return writing + reading < added_seconds(self.cost, sequence.virtual + start, rows, adapter)

    def has_time(self, copy: SwapCopy, now: float) -> bool:
        """Tells whether the plan has time to read a copy as well."""
        return self.tier.seconds(now) + self.seconds(copy.pages, now)[1] <= self.tier.limit

    def seconds(self, pages: int, now: float) -> tuple[float, float]:
        """Predicted seconds of writing and of reading so many pages."""
        nbytes = pages * self.copies.page_nbytes
        return nbytes * self.tier.writing.seconds(now), nbytes * self.tier.reading.seconds(now)

    # Copies

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Has the plan copy pages [first, end) of a sequence's block table, with all that it has computed."""
        pages = tuple(sequence.pages[first:end])
        has_room = self.copies.make_room(len(pages))
        assert has_room, "`is_worth` has found it"
        number = self.copies.add(pages)
        sequence.swapped = SwapCopy(number, first, len(pages), sequence.computed)
        self.copies.owners[number] = sequence

    def read(self, sequence: Sequence) -> None:
        """Has the plan fill the pages behind those that a sequence shares from its copy."""
        copy = sequence.swapped
        assert copy is not None, "what is read was written"
        pages = tuple(sequence.pages[sequence.shared : sequence.shared + sequence.filled])
        self.copies.moves.back[copy.number] = SwapIn(copy.number, pages, sequence.shared - copy.first)
        sequence.loading = (copy.number,)

    def read_single(self, sequence: Sequence, numbers: Iterable[int]) -> None:
        """Has the plan fill a sequence's pages behind the shared ones from copies of one page each."""
        sequence.loading = tuple(numbers)
        for number, page in zip(sequence.loading, sequence.pages[sequence.shared :], strict=False):
            self.copies.moves.back[number] = SwapIn(number, (page,))
            self.copies.owners[number] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Gives up reading for a sequence that loses its pages again. It keeps a copy of its own that no plan
        has read yet."""
        numbers, sequence.loading = sequence.loading, ()
        for number in numbers:
            if self.copies.moves.back.pop(number, None) is None:
                del self.copies.owners[number]
            elif sequence.swapped is None or number != sequence.swapped.number:
                self._remove(number)

    def drop(self, sequence: Sequence) -> None:
        """Drops the copy of a sequence that needs it no longer, if there is one."""
        copy, sequence.swapped = sequence.swapped, None
        if copy is not None:
            self._remove(copy.number)

    def _remove(self, number: int) -> None:
        del self.copies.owners[number]
        self.copies.remove(number)


def longest_moves(running: Iterable[Sequence], now: float, cost: StepCosts, config: SchedulerConfig) -> float:
    """Most seconds of a step's swaps, so that each running sequence's next token keeps its bound: rows wait
    for them."""
    running = [one for one in running if one.newest_at is not None]
    due, margin = INFINITE, 0.0
    for one in running:
        if (bound := one.request.slo.between_tokens) is not None and one.newest_at is not None:
            due = min(due, one.newest_at + bound)
            tokens = one.request.sampling.max_tokens
            margin = max(margin, cost.margin(config, trains=False, tokens=tokens))
    if due == INFINITE:
        return INFINITE
    features = StepFeatures()
    for one in running:
        start, request = one.virtual + one.computed, one.request
        features[request.base].add_inference(start, 1, 1, request.adapter, one.offloaded)
    return max((due - now) / (1 + margin) - cost.predict_features(features), 0.0)
