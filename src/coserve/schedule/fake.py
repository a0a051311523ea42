"""A runner without a model: a scripted clock, tokens that depend on nothing but tokens, and a strict eye.

It satisfies `core.plan.Runner` and fails loudly (AssertionError) on any plan that a real runner could not
carry out: pages that are missing, hold anything else, or are written while somebody else reads them; windows
out of order, keys that were released.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping

from coserve.core.events import Event
from coserve.core.plan import Plan, Prefix, Sampled, Segment, StepResult, TokenLogprobs, Updated
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import CoserveError
from coserve.schedule.cost import CostModel
from coserve.schedule.scheduler import Scheduler


def next_token(tokens: Iterable[int], vocabulary: int) -> int:
    """The token that the fake model says after `tokens`."""
    return zlib.crc32(",".join(map(str, tokens)).encode()) % vocabulary


def virtual_tokens(adapter: str, count: int) -> list[int]:
    """What the fake model reads where an adapter version has `count` virtual tokens."""
    return [-1 - zlib.crc32(f"{adapter}/{position}".encode()) % 1000 for position in range(count)]


def _past_of(before: int, token: int | str) -> int:
    """A number that stands for all tokens up to this one, as its keys and values do."""
    return zlib.crc32(f"{before},{token!r}".encode())


class FakeRunner:
    """Runs plans on paper. `now` is its clock, in seconds; `plans` are those it ran, in order.

    `seconds` says what a plan takes (by default what an untrained cost model expects). A job in
    `failures` fails as soon as it has something to run. `skip` lets time pass between steps.
    """

    def __init__(
        self,
        page_size: int,
        seconds: Callable[[Plan], float] | None = None,
        vocabulary: int = 1000,
        failures: Mapping[str, CoserveError] | None = None,
    ) -> None:
        self.now = 0.0
        self.plans: list[Plan] = []
        self.results: list[StepResult] = []
        self.trained: dict[str, int] = {}  # rows that went the whole way there and back, by job
        self._page_size = page_size
        self._seconds = seconds or CostModel().predict
        self._vocabulary = vocabulary
        self._failures = dict(failures or {})
        self._cache: dict[tuple[int, int], int] = {}  # page, slot -> the past that lies there
        self._readers: dict[int, set[int]] = {}  # page -> keys of the sequences that have it
        self._pasts: dict[int, list[int]] = {}  # key -> what its positions must hold, as far as known
        self._computed: dict[int, int] = {}  # key -> rows in its cache
        self._tapes: dict[int, _Tape] = {}
        self._ended: set[int] = set()
        self._beside: tuple[Segment, ...] = ()  # training in a lane of its own
        self._until = 0.0  # when it is done
        self._training = 0.0  # seconds it takes

    def step(self, scheduler: Scheduler) -> list[Event]:
        """The engine's loop, once."""
        plan = scheduler.plan(self.now)
        result = self.run(plan)
        return scheduler.apply(plan, result, self.now)

    def skip(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds

    def run(self, plan: Plan) -> StepResult:
        """Checks the plan, carries it out, and moves the clock."""
        self._release(plan.released)
        seconds, trained, lanes = self._time(plan)
        keys = [segment.sequence.key for segment in (*plan.inference, *plan.training)]
        assert len(keys) == len(set(keys)), "one segment for each sequence and micro-batch"
        assert self._ended.isdisjoint(keys), "released keys stay released"
        for prefix in plan.prefixes:
            self._fill(prefix)
        for segment in plan.inference:
            self._claim(segment)
        sampled = {segment.sequence.key: self._infer(segment) for segment in plan.inference}
        jobs = {s.sequence.job for s in plan.training if isinstance(s.sequence, MicroBatch)} | {*plan.updates}
        failed = {job: error for job, error in self._failures.items() if job in jobs}
        for segment in plan.training:
            self._travel(segment)
        updated = {job: self._update(job) for job in plan.updates if job not in failed}
        self.now += seconds + plan.pause
        self.plans.append(plan)
        self.results.append(StepResult(seconds, sampled, updated, failed, trained, lanes))
        return self.results[-1]

    def _time(self, plan: Plan) -> tuple[float, tuple[Segment, ...], tuple[float, float]]:
        """Seconds of a plan, the training that is done after it, and what lanes took.

        A lane takes as much longer as its share is small. Beside inference training ends in some later step.
        """
        if plan.split is None:
            assert not self._beside, "the whole machine, while a lane of it trains"
            return (0.0 if plan.is_empty else self._seconds(plan)), plan.training, (0.0, 0.0)
        answers, training = plan.lanes
        if training.training:
            assert not self._beside, "one piece of training beside inference at a time"
            self._beside = training.training
            self._training = self._seconds(Plan(training=training.training)) / training.share
            self._until = self.now + self._training
        answering = self._seconds(Plan(answers.inference)) / answers.share if answers.inference else 0.0
        waited = max(self._until - self.now, 0.0) if self._beside and not answers.inference else 0.0
        if not self._beside or self._until > self.now + answering + waited:
            return answering + waited, (), (answering, 0.0)
        trained, self._beside = self._beside, ()
        return answering + waited, trained, (answering, self._training)

    def _release(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert key not in self._ended, f"key {key} was released twice"
            self._pasts.pop(key, None)
            for readers in self._readers.values():
                readers.discard(key)
            if self._computed.pop(key, None) is None:  # a micro-batch; a sequence may come back
                self._ended.add(key)

    def _fill(self, prefix: Prefix) -> None:
        assert len(prefix.pages) == -(-prefix.tokens // self._page_size), "pages for all virtual tokens"
        for page in prefix.pages:
            assert not self._readers.get(page), f"page {page} is shared"
        past = _past_of(0, prefix.adapter)
        for position, token in enumerate(virtual_tokens(prefix.adapter, prefix.tokens)):
            past = _past_of(past, token)
            self._cache[prefix.pages[position // self._page_size], position % self._page_size] = past

    def _claim(self, segment: Segment) -> None:
        sequence = segment.sequence
        assert isinstance(sequence, Sequence) and segment.direction is Direction.INFER
        assert not sequence.is_finished, "the sequence has ended"
        begun = sequence.key in self._computed
        computed = self._computed.setdefault(sequence.key, sequence.computed)
        assert segment.length > 0 and segment.start == computed, "rows in order"
        end = segment.start + segment.length
        assert end <= sequence.length, "rows that are not known yet"
        assert sequence.virtual + end <= len(sequence.pages) * self._page_size, "a page is missing"
        for page in sequence.pages:
            self._readers.setdefault(page, set()).add(sequence.key)
        if not begun and sequence.template is not None:
            self._copy(sequence, sequence.template)

    def _copy(self, sequence: Sequence, template: int) -> None:
        """What a sequence begins with and fills no page."""
        target = sequence.pages[sequence.shared]
        if target != template:
            for slot in range((sequence.virtual + sequence.computed) % self._page_size):
                self._cache[target, slot] = self._cache[template, slot]

    def _infer(self, segment: Segment) -> Sampled:
        """Reads all there is before the rows, and writes them; a page is right if its whole past is."""
        sequence = segment.sequence
        assert isinstance(sequence, Sequence)
        start, end = segment.start, segment.start + segment.length
        pasts = self._past(sequence, end)
        for position in range(sequence.virtual + start):
            assert self._cache.get(self._slot(sequence, position)) == pasts[position], "a foreign page"
        for position in range(sequence.virtual + start, sequence.virtual + end):
            page, slot = self._slot(sequence, position)
            assert self._readers[page] == {sequence.key}, f"page {page} is shared"
            self._cache[page, slot] = pasts[position]
        self._computed[sequence.key] = end
        scored: tuple[TokenLogprobs, ...] = ()
        if sequence.request.sampling.prompt_logprobs is not None:
            last = min(end, len(sequence.request.prompt) - 1)
            scored = tuple(TokenLogprobs(-float(position + 1)) for position in range(start, last))
        if end < sequence.length:
            return Sampled(None, prompt_logprobs=scored)
        adapter = sequence.request.adapter or ""
        tokens = [*virtual_tokens(adapter, sequence.virtual), *sequence.tokens(0, end)]
        return Sampled(next_token(tokens, self._vocabulary), prompt_logprobs=scored)

    def _past(self, sequence: Sequence, end: int) -> list[int]:
        """What its positions must hold up to its token `end`, virtual ones first: all that precedes each.

        Virtual tokens are everybody's; what follows is its scope's, or nobody else's.
        """
        request = sequence.request
        adapter = request.adapter or ""
        pasts = self._pasts.setdefault(sequence.key, [])
        known = [*virtual_tokens(adapter, request.virtual), *sequence.tokens(0, end)]
        for position in range(len(pasts), len(known)):
            before = pasts[-1] if pasts else _past_of(0, adapter)
            if position == request.virtual:
                before = _past_of(before, sequence.key if request.scope is None else request.scope)
            pasts.append(_past_of(before, known[position]))
        return pasts

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.pages[position // self._page_size], position % self._page_size

    def _travel(self, segment: Segment) -> None:
        batch = segment.sequence
        assert isinstance(batch, MicroBatch) and segment.direction is not Direction.INFER
        self._tapes.setdefault(batch.key, _Tape(batch)).travel(segment)

    def _update(self, job: str) -> Updated:
        tapes = {key: tape for key, tape in self._tapes.items() if tape.batch.job == job}
        assert tapes and all(tape.is_complete for tape in tapes.values()), "an update before all gradients"
        rows = sum(tape.batch.length for tape in tapes.values())
        for key in tapes:
            del self._tapes[key]
        self.trained[job] = self.trained.get(job, 0) + rows
        return Updated(step=1, loss=1.0, labels=rows, grad_norm=1.0, learning_rate=1.0, version=f"{job}@1")


class _Tape:
    """Which rows of a micro-batch passed each layer and the tail: each once each way, in the right order."""

    def __init__(self, batch: MicroBatch) -> None:
        self.batch = batch
        self._kept = [0] * batch.layers  # rows from the left that passed the layer forward
        self._scored = 0  # rows from the left that passed the tail
        self._back = [batch.length] * batch.layers  # rows from the left that have not come back yet

    @property
    def is_complete(self) -> bool:
        return not any(self._back)

    def travel(self, segment: Segment) -> None:
        first, end = segment.start, segment.start + segment.length
        assert 0 <= first < end <= self.batch.length and len(segment.span) > 0, "an empty window"
        layers = range(segment.span.first, segment.span.last)
        if segment.direction is Direction.KEEP:
            for layer in layers:
                assert self._kept[layer] == first, "each row once forward, left to right"
                assert layer == 0 or self._kept[layer - 1] >= end, "the layer below comes first"
                self._kept[layer] = end
            return
        assert all(rows == self.batch.length for rows in self._kept), "back before all is kept"
        if segment.direction is Direction.LOSS:
            assert self._scored == first, "each row once through the tail, left to right"
            assert segment.span == Span(self.batch.layers, self.batch.layers + 1), "the tail is on top"
            self._scored = end
            return
        assert self._scored == self.batch.length, "back before all is scored"
        for layer in reversed(layers):
            assert self._back[layer] == end, "each row once back, right to left"
            assert layer == self.batch.layers - 1 or self._back[layer + 1] <= first, "the layer above first"
            self._back[layer] = first
