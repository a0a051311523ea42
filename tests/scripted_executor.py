"""An executor without a model: a scripted clock, tokens computed from tokens, and strict checks.

An `Executor` that raises AssertionError on any plan that a real executor could not run: with pages missing,
with wrong contents, or written while other sequences read them; windows out of order; released keys.
"""

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from coserve.core.plan import (
    BasePlan,
    BaseResult,
    InferenceSegment,
    MicroBatchOutput,
    MicroBatchStart,
    Prefix,
    Sampled,
    SwapIn,
    SwapOut,
    TokenLogprobs,
    TrainingSegment,
    Updated,
    WeightReads,
)
from coserve.core.row_buckets import EXACT
from coserve.core.sequence import Direction, Sequence, Span
from coserve.errors import CoserveError, OffloadFailed
from coserve.executors.executor import Command, Executor, ExecutorSpec, R
from coserve.schedule.cost import CostModel
from coserve.simulate.virtual_clock import VirtualClock, VirtualMove, told


def next_token(tokens: Iterable[int], vocabulary: int) -> int:
    """The fake model's token after `tokens`."""
    return zlib.crc32(",".join(map(str, tokens)).encode()) % vocabulary


def virtual_tokens(adapter: str, count: int) -> list[int]:
    """Stand-ins for the `count` virtual tokens of an adapter version."""
    return [-1 - zlib.crc32(f"{adapter}/{position}".encode()) % 1000 for position in range(count)]


def _past_of(before: int, token: int | str) -> int:
    """A number that identifies all tokens up to this one, as its keys and values do."""
    return zlib.crc32(f"{before},{token!r}".encode())


class ScriptedExecutor(VirtualClock, Executor):
    """Simulates plans. `now` is its clock, in seconds; `plans` are those it ran, in order.

    `seconds` gives a plan's duration (by default an untrained cost model's), `host` the time that passes
    beside it until its result is applied. A job in `failures` fails as soon as it has something to run. The
    second tier has room for `swap_pages`; writing and reading one there takes `swap_seconds`, and fails for
    copies, and segments of offloaded sequences, of which `loses` is true. Staging memory has room for
    `staged` pages. `reads` gives what the plan that has just run read of a streamed base's weights. The model
    sees its `memory` newest tokens alone, and so repeats itself; 0: all.
    """

    def __init__(
        self,
        page_size: int,
        seconds: Callable[[BasePlan], float] | None = None,
        vocabulary: int = 1000,
        failures: Mapping[str, CoserveError] | None = None,
        plans_ahead: int = 0,
        host: Callable[[], float] = float,
        swap_pages: int = 0,
        swap_seconds: tuple[float, float] = (1e-4, 1e-4),
        loses: Callable[[SwapOut | SwapIn | InferenceSegment], bool] = lambda move: False,
        reads: Callable[[], WeightReads] = WeightReads,
        staged: int = sys.maxsize,
        memory: int = 0,
    ) -> None:
        super().__init__(seconds or CostModel().predict, plans_ahead, swap_seconds=swap_seconds)
        self.plans: list[BasePlan] = []
        self.results: list[BaseResult] = []
        self.trained: dict[str, int] = {}  # rows that passed forward and back, by job
        self._page_size = page_size
        self._host = host
        self._reads = reads
        self._swap_pages, self._loses, self._staged = swap_pages, loses, staged
        self._copies: dict[int | bytes, list[list[int | None]]] = {}  # pasts of each page's slots
        self._vocabulary, self._memory = vocabulary, memory
        self._failures = dict(failures or {})
        self._cache: dict[tuple[int, int], int] = {}  # page, slot -> past
        self._readers: dict[int, set[int]] = {}  # page -> keys of its sequences
        self._sequences: dict[int, Sequence] = {}  # as far as plans have told of them
        self._pasts: dict[int, list[int]] = {}  # contents that their positions must have, as far as computed
        self._micro_batches: dict[int, _MicroBatch] = {}
        self._ended: set[int] = set()
        self._pauses = 0  # results with paused training
        self._failed: set[str] = set()

    @property
    def spec(self) -> ExecutorSpec:
        """See `Executor`. There is no model, and no bound on sequences."""
        return ExecutorSpec(sys.maxsize, (), 0, 0, 0, "", 0, "", EXACT, (), swap_pages=self._swap_pages)

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`. Steps take no time here."""

    def call(self, command: Command[R]) -> R:
        """Raises NotImplementedError: there is no model, and no state for commands."""
        raise NotImplementedError(f"{type(command).__name__}: there is no model here")

    def _run(self, plan: BasePlan) -> BaseResult:
        """Checks the plan, runs it, and advances the clock."""
        plan = plan.without_training(plan.jobs if plan.pauses < self._pauses else self._failed)
        self._release(plan.released)
        seconds, trained, stream_seconds = self._time(plan)
        together_failed = self._together_failed(plan)
        keys = [s.key for s in plan.inference] + [s.key for s in plan.training]
        assert len(keys) == len(set(keys)), "one segment for each sequence and micro-batch"
        assert self._ended.isdisjoint(keys), "released keys stay released"
        self._put(plan)
        seconds, moves = self._move(plan, seconds)
        for prefix in plan.prefixes:
            self._fill(prefix)
        self._begin(plan)
        for segment in plan.inference:
            self._claim(segment)
        sampled = {segment.key: self._infer(segment) for segment in plan.inference}
        jobs = {window.job for window in plan.training} | {update.job for update in plan.updates}
        failed = {job: error for job, error in self._failures.items() if job in jobs}
        is_paused = plan.share is None and not {*plan.training} <= {*trained}
        self._pauses += is_paused
        self._failed |= failed.keys()
        if plan.share is None:
            plan = replace(plan, training=trained)
        for window in plan.training:
            self._travel(window)
        outputs = self._report([window for window in trained if window.job not in failed])
        updated = {step.job: self._update(step.job) for step in plan.updates if step.job not in failed}
        moved = told(moves, [move.plan for move in moves if not self._end_move(move)])
        self.now += seconds + plan.idle + (0.0 if plan.is_empty else self._host())
        self.plans.append(plan)
        self.results.append(
            BaseResult(
                seconds,
                sampled,
                updated,
                failed,
                trained,
                is_paused,
                stream_seconds,
                moved=moved,
                lost=self._lose(plan),
                reads=self._reads(),
                outputs=outputs,
                together_failed=together_failed,
            )
        )
        return self.results[-1]

    def _put(self, plan: BasePlan) -> None:
        """Drops copies, and makes those of a plan, before its rows."""
        for name in plan.swap_dropped:
            self._copies.pop(name, None)  # one that could not be written is not there
        for out in plan.swap_out:
            assert out.copy not in self._copies and out.pages, "a name is used once at a time"
            assert all(out.copy != move.plan.copy for move in self._moves), (
                "a move of this name has not ended"
            )
            self._copies[out.copy] = [
                [self._cache.get((page, slot)) for slot in range(self._page_size)] for page in out.pages
            ]
        outs = [move.plan for move in self._moves if isinstance(move.plan, SwapOut)] + [*plan.swap_out]
        waiting = sum(len(out.pages) for out in outs)
        assert waiting <= self._staged or len(outs) == 1, "a step would wait for staging memory"
        held = sum(map(len, self._copies.values()))
        assert held <= self._swap_pages, "more pages than the second tier has"
        for back in plan.swap_in:
            self._expect_unread(back.pages)

    def _end_move(self, move: VirtualMove) -> bool:
        """Ends a move, which fills pages if it reads; tells whether that was possible."""
        one, is_lost = move.plan, self._loses(move.plan)
        if isinstance(one, SwapOut):
            if is_lost:
                self._copies.pop(one.copy, None)
            return not is_lost
        if move.is_dropped:
            return True
        self._expect_unread(one.pages)
        copy = self._copies.pop(one.copy, None)
        if copy is None or is_lost:
            return False
        assert len(copy) == one.first + len(one.pages), "a copy is read to its end"
        for page, slots in zip(one.pages, copy[one.first :], strict=True):
            self._cache |= {(page, slot): past for slot, past in enumerate(slots) if past is not None}
        return True

    def _expect_unread(self, pages: Iterable[int]) -> None:
        assert not any(self._readers.get(page) for page in pages), "a page is read while it is filled"

    def _lose(self, plan: BasePlan) -> dict[int, CoserveError]:
        """Offloaded sequences whose keys and values are lost in this step, with the error."""
        segments = [segment for segment in plan.inference if segment.offloaded]
        return {segment.key: OffloadFailed("as told") for segment in segments if self._loses(segment)}

    def _begin(self, plan: BasePlan) -> None:
        for segment in plan.inference:
            if (request := segment.request) is not None:
                assert segment.key not in self._sequences, "a sequence is named once"
                sequence = Sequence(segment.key, request, [*request.continued], computed=segment.start)
                self._sequences[segment.key], self._pasts[segment.key] = sequence, []
        for batch in plan.micro_batches:
            assert batch.key not in self._micro_batches, "a micro-batch is named once"
            self._micro_batches[batch.key] = _MicroBatch(batch)

    def _release(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert key not in self._ended, f"key {key} was released twice"
            for readers in self._readers.values():
                readers.discard(key)
            if self._sequences.pop(key, None) is None:  # a micro-batch; a sequence may be named again
                self._ended.add(key)

    def _fill(self, prefix: Prefix) -> None:
        assert len(prefix.pages) == -(-prefix.tokens // self._page_size), "pages for all virtual tokens"
        for page in prefix.pages:
            assert not self._readers.get(page), f"page {page} is shared"
        past = _past_of(0, prefix.adapter)
        for position, token in enumerate(virtual_tokens(prefix.adapter, prefix.tokens)):
            past = _past_of(past, token)
            self._cache[prefix.pages[position // self._page_size], position % self._page_size] = past

    def _claim(self, segment: InferenceSegment) -> None:
        assert segment.key in self._sequences, "a sequence that no plan has named"
        sequence = self._sequences[segment.key]
        request, end = sequence.request, segment.start + segment.known
        assert segment.known > 0 and segment.start == sequence.computed, "rows in order"
        virtual = request.traits.virtual
        assert segment.context == virtual + segment.start and segment.adapter == request.adapter
        assert end <= sequence.length, "rows that are not known yet"
        assert not segment.drafts or end == sequence.length > len(request.prompt), "drafts in an answer alone"
        end += len(segment.drafts)
        if segment.request is None:
            assert not segment.filled and segment.template is None, "new pages are empty"
        else:
            known = (segment.filled + (segment.template is not None)) * self._page_size
            assert segment.context <= known, "rows in order"
        for page in segment.new_pages[segment.filled :]:  # empty ones, as those of real executors are
            for slot in range(self._page_size):
                self._cache.pop((page, slot), None)
        sequence.pages += segment.new_pages
        assert virtual + end <= len(sequence.pages) * self._page_size, "a page is missing"
        for page in sequence.pages:
            self._readers.setdefault(page, set()).add(segment.key)
        if segment.template is not None:
            for slot in range(segment.context % self._page_size):
                self._cache[segment.new_pages[segment.filled], slot] = self._cache[segment.template, slot]

    def _infer(self, segment: InferenceSegment) -> Sampled:
        """Reads the past of the rows, and writes them; a page is right if its whole past is."""
        sequence = self._sequences[segment.key]
        request, end = sequence.request, segment.start + segment.known
        self._pass_pages(sequence, segment)
        sequence.computed = end
        scored: tuple[TokenLogprobs, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            last = min(end, len(request.prompt) - 1)
            scored = tuple(TokenLogprobs(-float(position + 1)) for position in range(segment.start, last))
        is_last = end == sequence.length
        assert segment.tail_rows == len(scored) + is_last + len(segment.drafts), "rows through the head"
        if not is_last:
            return Sampled(prompt_logprobs=scored)
        virtual = virtual_tokens(request.adapter or "", request.traits.virtual)
        known, tokens = [*virtual, *sequence.tokens(0, sequence.length)], list[int]()
        for draft in (*segment.drafts, None):
            tokens.append(next_token(known[-self._memory :], self._vocabulary))
            known.append(tokens[-1])
            if tokens[-1] != draft:
                break
        sequence.output += tokens
        if segment.drafts:
            self._go_back(sequence)
        return Sampled(tuple(tokens), prompt_logprobs=scored)

    def _go_back(self, sequence: Sequence) -> None:
        """Forgets rows of drafts that did not hold, and pages that the sequence has for them alone."""
        sequence.computed = sequence.length - 1
        del self._pasts[sequence.key][sequence.virtual + sequence.computed :]
        kept = -(-(sequence.virtual + sequence.length) // self._page_size)
        for page in sequence.pages[kept:]:
            self._readers[page].discard(sequence.key)
        del sequence.pages[kept:]

    def _past(self, sequence: Sequence, end: int, drafts: tuple[int, ...]) -> list[int]:
        """Returns what each position of a sequence up to token `end` must hold, virtual tokens first: a
        digest of all before it.

        Virtual tokens are common to all sequences; the following tokens to those of one scope, if any.
        """
        request, pasts = sequence.request, self._pasts[sequence.key]
        virtual, scope, adapter = request.traits.virtual, request.scope, request.adapter or ""
        known = [*virtual_tokens(adapter, virtual), *sequence.tokens(0, end, drafts)]
        for position in range(len(pasts), len(known)):
            before = pasts[-1] if pasts else _past_of(0, adapter)
            if position == virtual:
                before = _past_of(before, sequence.key if scope is None else scope)
            pasts.append(_past_of(before, known[position]))
        return pasts

    def _pass_pages(self, sequence: Sequence, segment: InferenceSegment) -> None:
        pasts = self._past(sequence, segment.start + segment.length, segment.drafts)
        for position in range(segment.context):
            assert self._cache.get(self._slot(sequence, position)) == pasts[position], "a foreign page"
        for position in range(segment.context, segment.context + segment.length):
            page, slot = self._slot(sequence, position)
            assert self._readers[page] == {segment.key}, f"page {page} is shared"
            self._cache[page, slot] = pasts[position]

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.pages[position // self._page_size], position % self._page_size

    def _travel(self, segment: TrainingSegment) -> None:
        batch = self._micro_batches[segment.key]
        assert (segment.job, segment.layers) == (batch.start.job, batch.start.layers)
        batch.travel(segment)

    def _report(self, windows: Iterable[TrainingSegment]) -> dict[int, MicroBatchOutput]:
        """Outputs of the micro-batches that end with these windows: the loss counts labels, a
        log-probability is its label's."""
        found = {}
        for window in windows:
            batch = self._micro_batches[window.key]
            if batch.is_complete and batch.start.reports:
                labels = batch.start.labels
                logprobs = tuple(-float(label) if label >= 0 else 0.0 for label in labels)
                found[window.key] = MicroBatchOutput(float(sum(label >= 0 for label in labels)), logprobs)
            if batch.is_complete and batch.start.forward_only:
                del self._micro_batches[window.key]
        return found

    def _update(self, job: str) -> Updated:
        due = {key: batch for key, batch in self._micro_batches.items() if batch.start.job == job}
        assert due and all(batch.is_complete for batch in due.values()), "an update before all gradients"
        rows = sum(batch.length for batch in due.values())
        for key in due:
            del self._micro_batches[key]
        self.trained[job] = self.trained.get(job, 0) + rows
        return Updated(step=1, loss=1.0, labels=rows, grad_norm=1.0, learning_rate=1.0, version=f"{job}@1")


class _MicroBatch:
    """Checks that rows of a micro-batch pass each layer and the tail once each way, in the right order."""

    def __init__(self, start: MicroBatchStart) -> None:
        self.start, self.length = start, sum(start.lengths)
        self._kept = [0] * start.layers  # rows from the left that passed the layer forward
        # Rows from the left that passed the tail, by its passes.
        couples, gradient = start.loss.couples or start.forward_only, not start.forward_only
        self._scored = dict.fromkeys([Direction.LOGPROBS] * couples + [Direction.LOSS] * gradient, 0)
        self._back = [self.length * gradient] * start.layers  # rows from the left that have not passed back

    @property
    def is_complete(self) -> bool:
        return not any(self._back) and all(rows == self.length for rows in self._scored.values())

    def travel(self, segment: TrainingSegment) -> None:
        first, end = segment.start, segment.start + segment.length
        assert 0 <= first < end <= self.length and len(segment.span) > 0, "an empty window"
        layers = range(segment.span.first, segment.span.last)
        if segment.direction is Direction.TRAIN_FORWARD:
            for layer in layers:
                assert self._kept[layer] == first, "each row once forward, left to right"
                assert layer == 0 or self._kept[layer - 1] >= end, "the layer below comes first"
                self._kept[layer] = end
            return
        assert all(rows == self.length for rows in self._kept), "back before all is kept"
        if segment.direction.is_tail:
            assert self._scored[segment.direction] == first, "each row once through the tail, left to right"
            assert segment.direction is Direction.LOGPROBS or all(
                rows == self.length for way, rows in self._scored.items() if way is Direction.LOGPROBS
            ), "a loss that couples tokens needs all of them"
            assert segment.span == Span(self.start.layers, self.start.layers + 1), "the tail is on top"
            self._scored[segment.direction] = end
            return
        assert all(rows == self.length for rows in self._scored.values()), "back before all is scored"
        for layer in reversed(layers):
            assert self._back[layer] == end, "each row once back, right to left"
            assert layer == self.start.layers - 1 or self._back[layer + 1] <= first, "the layer above first"
            self._back[layer] = first
