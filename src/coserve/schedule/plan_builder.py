"""A plan under construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.core.plan import InferenceSegment, OptimStep, TrainingSegment
from coserve.core.sequence import Direction, MicroBatch, Sequence
from coserve.schedule.features import StepFeatures
from coserve.schedule.segments import inference_segment
from coserve.schedule.step_costs import StepCosts


@dataclass(slots=True)
class PlanBuilder:
    """The segments chosen so far, and their features. `now` is the time at which their rows begin.

    `share` is that of the plan: with one, training has its features in `beside`. `abandons` is that of the
    plan; windows of such a plan pass apart from answers, and so they do `alone`, where memory was short.
    """

    now: float
    features: StepFeatures = field(default_factory=StepFeatures)
    answering: list[Sequence] = field(default_factory=list)  # whose segments are in `inference`, in its order
    inference: list[InferenceSegment] = field(default_factory=list)
    training: list[TrainingSegment] = field(default_factory=list)
    batches: list[MicroBatch] = field(default_factory=list)  # of the windows in `training`, in its order
    updates: list[tuple[str, OptimStep]] = field(default_factory=list)  # each with the id of its base
    share: float | None = None
    abandons: bool = False
    alone: bool = False
    beside: StepFeatures = field(default_factory=StepFeatures)

    @property
    def trained(self) -> StepFeatures:
        """Features that training is added to."""
        return self.features if self.share is None else self.beside

    @property
    def parts_windows(self) -> bool:
        """Tells whether windows share no pass with answers, whatever that costs."""
        return self.abandons or self.alone

    @property
    def rows(self) -> int:
        """Inference rows chosen so far."""
        return sum(segment.length for segment in self.inference)

    def rows_of(self, base: str) -> int:
        """Inference rows chosen so far that pass one base."""
        rows = zip(self.answering, self.inference, strict=True)
        return sum(segment.length for sequence, segment in rows if sequence.request.base == base)

    def predict(self, cost: StepCosts) -> float:
        """Seconds of the step, without the training that runs beside its answers."""
        if self.share is None:
            return cost.predict_features(self.features)
        slower = cost.first.interference
        # Optimizer steps run on the whole machine, after everything else.
        updates = cost.first.weights["updates"] * len(self.updates)
        if self.inference:
            return cost.predict_features(self.features) * slower.inference + updates
        if not self.training:
            return updates
        return (cost.predict_features(self.beside) - updates) * slower.training + updates

    @property
    def answers(self) -> StepFeatures:
        """Features of the step's inference alone."""
        features = StepFeatures()
        for sequence, segment in zip(self.answering, self.inference, strict=True):
            features[sequence.request.base].add(segment)
        return features

    @property
    def goes_back(self) -> bool:
        """Tells whether the step trains, and no window of it goes forward."""
        directions = {segment.direction for segment in self.training}
        return bool(directions or self.updates) and Direction.TRAIN_FORWARD not in directions

    def training_alone(self) -> "PlanBuilder":
        """The step without its inference."""
        alone = PlanBuilder(self.now)
        for batch, segment in zip(self.batches, self.training, strict=True):
            alone.add_training(batch, segment)
        for base, update in self.updates:
            alone.add_update(base, update)
        return alone

    def add(self, sequence: Sequence, rows: int, filled: int = 0, drafts: tuple[int, ...] = ()) -> None:
        """Adds the next `rows` of a sequence, preceded by its adapter's last `filled` virtual tokens, and
        rows of `drafts` behind them."""
        segment = inference_segment(sequence, sequence.computed, rows, drafts)
        self.answering.append(sequence)
        self.inference.append(segment)
        features, request = self.features[sequence.request.base], sequence.request
        if filled:
            features.add_fill(request.traits.virtual - filled, filled)
        length = segment.length
        features.add_inference(segment.context, length, segment.tail_rows, segment.adapter, segment.offloaded)

    def with_drafts(self, drafts: Mapping[int, tuple[int, ...]]) -> "PlanBuilder":
        """The step of decode rows alone, with these drafts behind the rows of the sequences of these keys."""
        drafted = PlanBuilder(self.now)
        for sequence in self.answering:
            drafted.add(sequence, 1, drafts=drafts.get(sequence.key, ()))
        return drafted

    def add_training(self, batch: MicroBatch, segment: TrainingSegment) -> None:
        """Adds a window of a micro-batch."""
        self.batches.append(batch)
        self.training.append(segment)
        self.trained[batch.base].add_training(segment, self.parts_windows)

    def add_update(self, base: str, update: OptimStep) -> None:
        """Adds an optimizer step of a job on a base."""
        self.updates.append((base, update))
        self.trained[base].add_update()

    def with_rows(self, sequence: Sequence, rows: int, filled: int) -> StepFeatures:
        """Features of the step with these rows too."""
        twin = PlanBuilder(self.now, self.features.copy())
        twin.add(sequence, rows, filled)
        return twin.features
