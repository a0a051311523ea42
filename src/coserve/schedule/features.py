"""The contents of a step, counted for the cost model: FlexLLM's c and s (section 6.2), in more detail."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Final, Self

from coserve.core.plan import BasePlan, InferenceSegment, Passes, StepPlan, TrainingSegment
from coserve.core.row_buckets import graph_rows
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
    # Its rows beyond `WIDE`, in addition: products of few rows wait for weights or launches, those of many
    # for arithmetic. On an H200 each of the first 512 rows of a window back takes 28 us, each later one 47.
    "window_wide_rows": 0.0,
    # A pass over the whole depth that carries windows, or prompts without graphs, beside `forward_layers`:
    # decode rows alone take a compiled call (`model/native_layer.py`), or a graph, as prompts do where there
    # are graphs (`worker/cuda_graphs.py`). 7 ms of 19M parameters, of which 8 decode rows take 4.
    "prefill_layers": 0.0,
    "mixed_layers": 0.0,  # such a pass, or one with prompts, that carries decode rows too, beside these
    "tail_rows": 5e-5,  # a row through the final norm and the head: sampled, or scored for prompt_logprobs
    "decode_context": 1e-7,  # a cached token read by a decode row
    "forward_attention": 1e-8,  # a (row, earlier row) pair of a prefill or a kept window, whole depth
    "adapters": 2e-4,  # a distinct adapter of answers' rows through the whole depth
    # A window through the whole depth, either way, beside its rows: what is kept of each layer, and the
    # gradients of its bypasses.
    "windows": 1e-3,
    "backward_layers": 2e-2,  # a way back over the whole depth: jobs at the same layer share it
    "backward_rows": 3e-4,  # a row back through the whole depth
    "backward_wide_rows": 0.0,  # of these, rows beyond `WIDE` of a window, in addition
    "backward_attention": 4e-8,  # a (row, earlier row) pair on the way back, whole depth
    "loss_rows": 2e-4,  # a row's head and loss, forward and back
    "updates": 5e-3,  # an optimizer step
}
NAMES = tuple(DEFAULT_WEIGHTS)
WIDE: Final = 512  # rows

_PADDED_THERE: Final = "window_rows", "window_wide_rows"
_PADDED_BACK: Final = "backward_rows", "backward_wide_rows"
_PADDED: Final = (*_PADDED_THERE, *_PADDED_BACK)

_EMPTY: Final = dict.fromkeys(NAMES, 0.0) | {"step": 1.0}
_SHARED: Final = Passes()


class Features:
    """Features of one base's part of a step, counted as its plan is built.

    Which forward rows share a pass is as in the plan that was counted, or open: `ways` are the choices.
    """

    def __init__(self) -> None:
        self._values = _EMPTY.copy()  # without those of passes forward, which `counted` adds
        self.trains = self.answers = False
        self._decodes = self._prompts = 0  # rows
        self.offloaded = 0  # cached tokens that are read from slower memory
        self._windows, self._depth = 0, 1  # a bit for each layer that windows going forward visit, of so many
        self._abandons = False  # whether windows that go forward may be abandoned, and so pass apart
        self._padding = dict.fromkeys(_PADDED, 0.0)  # that graphs add to windows' rows
        self._jobs: set[str] = set()  # whose windows go forward
        self._passes: Passes | None = None  # those of a plan
        self._is_launched = False  # whether its decode rows run kernel by kernel, as no graph has them
        self._returned: dict[str, int] = {}  # by job, a bit for each layer that its rows going back visit
        self._back: tuple[int, ...] = ()  # bits of layers visited on each way back
        self._fills = 0  # passes over the whole depth that precede the step's own
        self._adapters: set[str] = set()  # of answers

    @classmethod
    def of(cls, plan: BasePlan) -> Self:
        """The features of a plan that has not been applied yet (only then its sampled rows are known)."""
        features = cls.of_segments(plan.inference, plan.training)
        features._passes = plan.passes
        for prefix in plan.prefixes:
            features.add_fill(prefix.tokens - prefix.rows, prefix.rows)
        for _ in plan.updates:
            features.add_update()
        return features

    @classmethod
    def of_segments(
        cls, inference: Iterable[InferenceSegment], training: Iterable[TrainingSegment] = ()
    ) -> Self:
        """The features of a step of these segments."""
        features = cls()
        for s in inference:  # as `add`, but for a call of each: 32 of them in every decode step
            features.add_inference(s.context, s.length, s.tail_rows, s.adapter, s.offloaded)
        for window in training:
            features.add_training(window)
        return features

    def copy(self) -> "Features":
        """An independent copy of the counts."""
        twin = Features.__new__(Features)
        twin.trains, twin.answers, twin.offloaded = self.trains, self.answers, self.offloaded
        twin._decodes, twin._prompts, twin._fills = self._decodes, self._prompts, self._fills
        twin._windows, twin._depth, twin._back = self._windows, self._depth, self._back
        twin._abandons, twin._passes, twin._padding = self._abandons, self._passes, self._padding.copy()
        twin._is_launched = self._is_launched
        twin._values, twin._returned = self._values.copy(), self._returned.copy()
        twin._adapters, twin._jobs = self._adapters.copy(), self._jobs.copy()
        return twin

    def take_passes(self, passes: Passes) -> None:
        """Notes the passes of the plan that the features are of."""
        self._passes = passes

    @property
    def launched(self) -> "Features":
        """A copy for a step whose decode rows no graph had: they shared the pass of answers' other rows."""
        twin = self.copy()
        twin._is_launched, twin._passes = True, replace(self._passes or _SHARED, decodes_apart=False)
        return twin

    def ways(self, graphs: bool) -> Sequence[Passes]:
        """The choices which forward rows share a pass, the fewest passes first. Decode rows are apart from
        prompts with `graphs` alone: what launches them kernel by kernel is not faster without prompts."""
        if self._passes is not None:
            return (self._passes,)
        beside = self.answers and self._windows > 0
        if not beside and not (graphs and self._decodes and self._prompts):
            return (_SHARED,)
        decodes = (False, True) if graphs and self._decodes and self._prompts else (False,)
        windows = (False,) if not beside else (True,) if self._abandons else (False, True)
        return [Passes(*apart) for apart in product(decodes, windows)]

    def counted(
        self, passes: Passes | None = None, graphs: bool = False, launched: Container[str] = ()
    ) -> dict[str, float]:
        """The counts by one of the `ways`, in the order of `NAMES`; by default by the plan's, or by all rows
        in one pass. With `graphs` answers and windows that share no pass are replayed, and prompts and
        windows padded to the graph's rows; rows that share one are launched, those of answers at all
        layers, and so are windows of the jobs `launched`."""
        passes = passes or self._passes or _SHARED
        is_shared, windows = self._is_shared(passes), self._windows.bit_count() / self._depth
        apart = 0.0 if is_shared else windows
        mixes = bool(self._decodes) and not passes.decodes_apart
        more = 1.0 if self._prompts else windows - apart  # than decode rows alone, in answers' pass
        if graphs and is_shared and windows:
            more = 1.0
        values = self._values.copy()
        values["forward_layers"] = self._passes_of_answers(passes) + apart
        values["mixed_layers"] = more * mixes
        if self._is_launched:
            more = 1.0
        elif graphs and self._prompts and not (is_shared and windows):
            rows, more = self._prompts + mixes * self._decodes, 0.0
            values["forward_rows"] += (graph_rows(rows) or rows) - rows
        if graphs and not any(job in launched for job in self._jobs):
            apart = 0.0
        values["prefill_layers"] = self._fills + more + apart
        if graphs:
            for name in _PADDED_BACK if is_shared else _PADDED:
                values[name] += self._padding[name]
        return values

    def _passes_of_answers(self, passes: Passes) -> int:
        """Number of passes of answers' rows, and of virtual tokens, through all layers."""
        return self._fills + self.answers + (passes.decodes_apart and bool(self._decodes and self._prompts))

    def _is_shared(self, passes: Passes) -> bool:
        """Tells whether windows that go forward share a pass with rows of answers."""
        others = self._prompts > 0 if passes.decodes_apart and self._decodes else self.answers
        return others and not passes.windows_apart

    def visits(self, layers: int, passes: Passes | None = None) -> int:
        """Number of visits to layers with a bit in `layers`, forward and back."""
        passes = passes or self._passes or _SHARED
        apart = 0 if self._is_shared(passes) else (self._windows & layers).bit_count()
        return self._passes_of_answers(passes) * layers.bit_count() + apart + self.visits_back(layers)

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
        values = self._values
        values["forward_rows"] += rows
        values["tail_rows"] += tail
        self.offloaded += start * offloaded
        if rows == 1:
            self._decodes += 1
            values["decode_context"] += start + 1
        elif rows:
            values["forward_attention"] += causal_pairs(start, rows)
            self._prompts += rows
        if adapter is not None and adapter not in self._adapters:
            self._adapters.add(adapter)
            values["adapters"] += 1.0

    def add_fill(self, given: int, rows: int) -> None:
        """Adds a pass of `rows` virtual tokens, behind `given` ones whose keys and values are given."""
        if rows:
            self._fills += 1
            self._values["forward_rows"] += rows
            self._values["forward_attention"] += causal_pairs(given, rows)

    def add_training(self, segment: TrainingSegment, abandons: bool = False) -> None:
        """Adds a window of a micro-batch. Where the step `abandons` windows they go forward apart from
        answers."""
        self.trains = True
        values, rows, span, depth = self._values, segment.length, segment.span, segment.layers
        if segment.direction.is_tail:
            values["loss_rows"] += rows
            return
        part = len(span) / depth
        wide = max(rows - WIDE, 0) * part
        if segment.direction is Direction.TRAIN_FORWARD:
            self._windows |= (1 << span.last) - (1 << span.first)
            self._depth, self._abandons = depth, self._abandons or abandons
            names = _PADDED_THERE
            self._jobs.add(segment.job)
            values["window_rows"] += rows * part
            values["window_wide_rows"] += wide
            values["forward_attention"] += segment.pairs * part
        else:
            values["backward_layers"] += self._read_again(segment.job, span) / depth
            names = _PADDED_BACK
            values["backward_rows"] += rows * part
            values["backward_wide_rows"] += wide
            values["backward_attention"] += segment.pairs * part
        values["windows"] += part
        padded = graph_rows(rows) or rows
        self._padding[names[0]] += (padded - rows) * part
        self._padding[names[1]] += max(padded - WIDE, 0) * part - wide

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
        self._values["updates"] += 1.0


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

    def passing(self, plan: StepPlan) -> "StepFeatures":
        """These features, which were counted for a plan, with the passes that it has."""
        for base, part in self.items():
            part.take_passes(plan.bases[base].passes)
        return self

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
        """The forward passes of answers, without their rows."""
        empty = StepFeatures()
        for base, part in self.items():
            if part.answers:
                empty[base].add_inference(0, 0, 0, None)
        return empty
