"""The contents of a step, counted for the cost model: FlexLLM's c and s (section 6.2), in more detail."""

from collections.abc import Iterable, Mapping
from typing import Self

from coserve.core.plan import BasePlan, InferenceSegment, StepPlan, TrainingSegment
from coserve.core.sequence import Direction, Span
from coserve.schedule.segments import causal_pairs

# What one unit of each feature is. The numbers are the seconds per unit assumed before any measurement:
# a small model on a small machine, slow rather than fast, so that first guesses err towards less training.
DEFAULT_WEIGHTS: Mapping[str, float] = {
    "step": 1e-3,  # every step once
    "forward_layers": 1e-2,  # a forward pass over the whole depth: weights are read once for all rows
    "forward_rows": 1e-4,  # an answer's row through the whole depth
    # A row of a window on its way forward, whole depth. Windows have many rows, whose products are bound by
    # arithmetic; on a GPU an answer's rows pass while weights are read, at half of the seconds.
    "window_rows": 1e-4,
    # A pass over the whole depth that carries prompts or windows, beside `forward_layers`: decode rows alone
    # take a compiled call (`model/native_layer.py`). 7 ms of 19M parameters, of which 8 decode rows take 4.
    "prefill_layers": 0.0,
    "tail_rows": 5e-5,  # a row through the final norm and the head: sampled, or scored for prompt_logprobs
    "decode_context": 1e-7,  # a cached token read by a decode row
    "forward_attention": 1e-8,  # a (row, earlier row) pair of a prefill or a kept window, whole depth
    "adapters": 2e-4,  # a distinct adapter through the whole depth
    "backward_layers": 2e-2,  # a way back over the whole depth: jobs at the same layer share it
    "backward_rows": 3e-4,  # a row back through the whole depth
    "backward_attention": 4e-8,  # a (row, earlier row) pair on the way back, whole depth
    "loss_rows": 2e-4,  # a row's head and loss, forward and back
    "updates": 5e-3,  # an optimizer step
}
NAMES = tuple(DEFAULT_WEIGHTS)
(
    _STEP,
    _FORWARD_LAYERS,
    _FORWARD_ROWS,
    _WINDOW_ROWS,
    _PREFILL_LAYERS,
    _TAIL_ROWS,
    _DECODE_CONTEXT,
    _FORWARD_ATTENTION,
    _ADAPTERS,
    _BACKWARD_LAYERS,
    _BACKWARD_ROWS,
    _BACKWARD_ATTENTION,
    _LOSS_ROWS,
    _UPDATES,
) = range(len(NAMES))

_ALL = -1  # all bits set: every layer


class Features:
    """Features of one base's part of a step, counted as its plan is built. `values` follows `NAMES`."""

    __slots__ = (
        "_adapters",
        "_apart",
        "_back",
        "_covered",
        "_fills",
        "_prefilled",
        "_returned",
        "answers",
        "decodes",
        "offloaded",
        "trains",
        "values",
    )

    def __init__(self) -> None:
        self.values = [0.0] * len(NAMES)
        self.values[_STEP] = 1.0
        self.trains = self.answers = self.decodes = False
        self.offloaded = 0  # cached tokens that are read from slower memory
        self._covered = 0  # a bit for each layer that some forward row visits; all bits are of every depth
        self._prefilled = 0  # the same of rows that are not decode rows
        self._apart = 0  # the same of windows that go forward beside answers, in slices of their own
        self._returned: dict[str, int] = {}  # by job, a bit for each layer that its rows going back visit
        self._back: tuple[int, ...] = ()  # bits of layers visited on each way back
        self._fills = 0  # passes over the whole depth that precede the step's own
        self._adapters: dict[str, float] = {}  # the share of the depth that rows of each pass

    @classmethod
    def of(cls, plan: BasePlan) -> Self:
        """The features of a plan that has not been applied yet (only then its sampled rows are known)."""
        features = cls.of_segments(plan.inference, plan.training, plan.abandons or plan.apart)
        for prefix in plan.prefixes:
            features.add_fill(prefix.tokens - prefix.rows, prefix.rows)
        for _ in plan.updates:
            features.add_update()
        return features

    @classmethod
    def of_segments(
        cls,
        inference: Iterable[InferenceSegment],
        training: Iterable[TrainingSegment] = (),
        apart: bool = False,
    ) -> Self:
        """The features of a step of these segments; `apart` is that of `add_training`."""
        features = cls()
        for segment in inference:
            features.add(segment)
        for window in training:
            features.add_training(window, apart)
        return features

    def copy(self) -> "Features":
        """An independent copy of the counts."""
        twin = Features.__new__(Features)
        twin.values = self.values.copy()
        twin.trains, twin.answers, twin.decodes = self.trains, self.answers, self.decodes
        twin.offloaded = self.offloaded
        twin._covered, twin._prefilled, twin._apart = self._covered, self._prefilled, self._apart
        twin._returned = self._returned.copy()
        twin._back = self._back
        twin._fills = self._fills
        twin._adapters = self._adapters.copy()
        return twin

    def counts(self, graphs: bool) -> list[float]:
        """The counts; by `graphs` decode rows pass apart from other answers' rows."""
        if not (graphs and self.decodes and self._prefilled):
            return self.values
        values = self.values.copy()
        values[_FORWARD_LAYERS] += 1.0
        return values

    @property
    def without_rows(self) -> "Features":
        """The forward passes of these features, without their rows."""
        empty = Features()
        if self.values[_FORWARD_LAYERS]:
            empty.add_inference(0, 0, 0, None)
        return empty

    def as_dict(self) -> dict[str, float]:
        """The counts by name."""
        return dict(zip(NAMES, self.values, strict=True))

    def visits(self, layers: int) -> int:
        """Number of visits to layers with a bit in `layers`, forward and back."""
        there = self._fills * layers.bit_count()
        there += (self._covered & layers).bit_count() + (self._apart & layers).bit_count()
        return there + self.visits_back(layers)

    def visits_back(self, layers: int) -> int:
        """Number of visits to layers with a bit in `layers` on a way back."""
        return sum((way & layers).bit_count() for way in self._back)

    def add(self, segment: InferenceSegment) -> None:
        """Adds a segment of a sequence."""
        self.add_inference(
            segment.context, segment.length, segment.tail_rows, segment.adapter, segment.offloaded
        )

    def add_inference(
        self, start: int, rows: int, tail: int, adapter: str | None, offloaded: bool = False
    ) -> None:
        """Adds `rows` rows after `start` cached ones, which are read from slower memory if `offloaded`;
        `tail` of the rows go through the head."""
        self.answers = True
        values = self.values
        values[_FORWARD_LAYERS] = 1.0 + self._fills
        self._covered = _ALL
        values[_FORWARD_ROWS] += rows
        values[_TAIL_ROWS] += tail
        self.offloaded += start * offloaded
        if rows == 1:
            self.decodes = True
            values[_DECODE_CONTEXT] += start + 1
        elif rows:
            values[_FORWARD_ATTENTION] += causal_pairs(start, rows)
            values[_PREFILL_LAYERS] = 1.0 + self._fills
            self._prefilled = _ALL
        if adapter is not None:
            self._add_adapter(adapter, 1.0)

    def add_fill(self, given: int, rows: int) -> None:
        """Adds a pass of `rows` virtual tokens, behind `given` ones whose keys and values are given."""
        if rows:
            self._fills += 1
            self.values[_FORWARD_LAYERS] += 1.0
            self.values[_PREFILL_LAYERS] += 1.0
            self.values[_FORWARD_ROWS] += rows
            self.values[_FORWARD_ATTENTION] += causal_pairs(given, rows)

    def add_training(self, segment: TrainingSegment, apart: bool = False) -> None:
        """Adds a window of a micro-batch; beside answers one that goes forward does so `apart` from them, or
        in their pass."""
        self.trains = True
        values, rows, span, depth = self.values, segment.length, segment.span, segment.layers
        if segment.direction.is_tail:
            values[_LOSS_ROWS] += rows
            return
        part = len(span) / depth
        if segment.direction is Direction.TRAIN_FORWARD:
            visited, whole = (1 << span.last) - (1 << span.first), (1 << depth) - 1
            if apart and self.answers:
                self._apart |= visited
            else:
                self._covered |= visited
                self._prefilled |= visited
            beside = self._fills + self._apart.bit_count() / depth
            values[_FORWARD_LAYERS] = (self._covered & whole).bit_count() / depth + beside
            values[_PREFILL_LAYERS] = (self._prefilled & whole).bit_count() / depth + beside
            values[_WINDOW_ROWS] += rows * part
            values[_FORWARD_ATTENTION] += segment.pairs * part
        else:
            values[_BACKWARD_LAYERS] += self._read_again(segment.job, span) / depth
            values[_BACKWARD_ROWS] += rows * part
            values[_BACKWARD_ATTENTION] += segment.pairs * part
        self._add_adapter(segment.adapter, part)

    def _read_again(self, job: str, span: Span) -> int:
        """Number of layers whose weights a further backward window of a job reads again: those that no window
        of another job passes, or that a window of its own passes already."""
        layers = (1 << span.last) - (1 << span.first)
        own, others = self._returned.get(job, 0), 0
        for other, passed in self._returned.items():
            others |= passed if other != job else 0
        self._returned[job] = own | layers
        read = layers & (own | ~others)
        self._back += (read,)
        return read.bit_count()

    def add_update(self) -> None:
        """Adds an optimizer step."""
        self.trains = True
        self.values[_UPDATES] += 1.0

    def _add_adapter(self, key: str, part: float) -> None:
        """Adds an adapter that rows pass for `part` of the depth; counted once for all rows of the same
        one."""
        known = self._adapters.get(key, 0.0)
        if part > known:
            self._adapters[key] = part
            self.values[_ADAPTERS] += part - known


class StepFeatures(dict[str, Features]):
    """Features of a step: those of each base that has some, by the base's id. A base that is looked up gets
    empty ones."""

    def __missing__(self, base: str) -> Features:
        self[base] = found = Features()
        return found

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The features of a plan that has not been applied yet (only then its sampled rows are known)."""
        return cls((base, Features.of(part)) for base, part in plan.bases.items())

    @classmethod
    def of_answers(cls, plan: StepPlan) -> Self:
        """The features of a plan's inference alone."""
        parts = ((base, part.inference) for base, part in plan.bases.items())
        return cls((base, Features.of_segments(segments)) for base, segments in parts if segments)

    def copy(self) -> "StepFeatures":
        """An independent copy of the counts."""
        return StepFeatures((base, part.copy()) for base, part in self.items())

    @property
    def answers(self) -> bool:
        """Tells whether sequences have rows."""
        return any(part.answers for part in self.values())

    @property
    def trains(self) -> bool:
        """Tells whether micro-batches have rows, or an optimizer steps."""
        return any(part.trains for part in self.values())

    @property
    def without_rows(self) -> "StepFeatures":
        """The forward passes of these features, without their rows."""
        parts = ((base, part.without_rows) for base, part in self.items())
        return StepFeatures((base, part) for base, part in parts if part.answers)
