"""A plan under construction."""

from dataclasses import dataclass, field

from coserve.core.plan import InferenceSegment, OptimStep, TrainingSegment
from coserve.core.sequence import Direction, Sequence
from coserve.schedule.cost import CostModel, Features
from coserve.schedule.segments import inference_segment


@dataclass(slots=True)
class PlanBuilder:
    """The segments chosen so far, and their features. `now` is the time at which their rows begin: `moving`
    seconds, the time of swaps, after planning began.

    `split` gives training a lane of its own, with its features in `beside`; None puts all in one pass.
    `abandons` is that of the plan.
    """

    now: float
    moving: float = 0.0
    features: Features = field(default_factory=Features)
    answering: list[Sequence] = field(default_factory=list)  # whose segments are in `inference`, in its order
    inference: list[InferenceSegment] = field(default_factory=list)
    training: list[TrainingSegment] = field(default_factory=list)
    updates: list[OptimStep] = field(default_factory=list)
    split: float | None = None
    abandons: bool = False
    beside: Features = field(default_factory=Features)

    @property
    def trained(self) -> Features:
        """Features that training is added to."""
        return self.features if self.split is None else self.beside

    @property
    def rows(self) -> int:
        """Inference rows chosen so far."""
        return sum(segment.length for segment in self.inference)

    def rows_of(self, base: str) -> int:
        """Inference rows chosen so far that pass one base."""
        return sum(segment.length for segment in self.inference if segment.base == base)

    def predict(self, cost: CostModel) -> float:
        """Seconds of the step, without training in a lane of its own beside inference."""
        if self.split is None:
            return cost.predict_features(self.features)
        updates = cost.weights["updates"] * len(self.updates)  # on the whole machine, after everything else
        if self.inference:
            return cost.predict_features(self.features) * cost.lanes.inference + updates
        if not self.training:
            return updates
        return (cost.predict_features(self.beside) - updates) * cost.lanes.training + updates

    @property
    def goes_back(self) -> bool:
        """Tells whether the step trains, and no window of it goes forward."""
        directions = {segment.direction for segment in self.training}
        return bool(directions or self.updates) and Direction.TRAIN_FORWARD not in directions

    def training_alone(self) -> "PlanBuilder":
        """The step without its inference."""
        alone = PlanBuilder(self.now, self.moving, training=self.training, updates=self.updates)
        for segment in self.training:
            alone.features.add_training(segment)
        for update in self.updates:
            alone.features.add_update(update.base)
        return alone

    def add(self, sequence: Sequence, rows: int, filled: int = 0) -> None:
        """Adds the next `rows` of a sequence, preceded by its adapter's last `filled` virtual tokens."""
        segment = inference_segment(sequence, sequence.computed, rows)
        self.answering.append(sequence)
        self.inference.append(segment)
        _count(self.features, sequence, segment, filled)

    def with_rows(self, sequence: Sequence, rows: int, filled: int) -> Features:
        """Features of the step with these rows too."""
        features = self.features.copy()
        _count(features, sequence, inference_segment(sequence, sequence.computed, rows), filled)
        return features


def _count(features: Features, sequence: Sequence, segment: InferenceSegment, filled: int) -> None:
    if filled:
        features.add_fill(sequence.virtual - filled, filled, segment.base)
    features.add(segment)
