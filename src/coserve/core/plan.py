"""Plans, which the scheduler gives to an executor, and results, which come back. Plain data, no tensors."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from coserve.core.request import SamplingParams
from coserve.core.sequence import CROSS_ENTROPY, Direction, LossSpec, Span
from coserve.errors import CoserveError


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """Describes a sequence, once, to an executor that holds no state of it.

    `output` are the tokens of the answer that are known already. Its block table begins with `shared` pages
    that it only reads; they and the beginning of its first own page hold the `virtual` tokens of its adapter
    version and the first `computed` of its own. That beginning is a copy of page `template`, or is that very
    page. Only sequences of one `scope` share pages with their own tokens.
    """

    key: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: SamplingParams
    adapter: str | None = None
    virtual: int = 0
    computed: int = 0
    shared: int = 0
    template: int | None = None
    scope: str | None = ""


@dataclass(frozen=True, slots=True)
class InferenceSegment:
    """Rows of one sequence through the whole model: one for decode, many for prefill.

    They are its own tokens `start` to `start + length` and attend to the `context` positions before them,
    virtual ones included. `tail_rows` of them pass the final norm and the head: the one that is sampled, and
    those whose log-probabilities are asked for. `new_pages` are appended to the sequence's block table.
    """

    key: int
    start: int
    length: int
    context: int
    tail_rows: int
    adapter: str | None = None
    new_pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatchStart:
    """Describes a micro-batch, once, to an executor.

    `lengths` are the rows of its examples, those of the adapter's prompt first and `padding` rows last;
    `layers` is the model's depth. `tokens` and `labels` are those of all rows; label -100 is none, and each
    belongs to the row that predicts it. The loss is the mean over `step_labels`, the labels of the whole
    optimizer step. `dropout_seed` decides what dropout drops.
    """

    key: int
    job: str
    lengths: tuple[int, ...]
    layers: int
    tokens: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    padding: int = 0
    step_labels: int = 1
    dropout_seed: str = ""
    loss: LossSpec = CROSS_ENTROPY


@dataclass(frozen=True, slots=True)
class TrainingSegment:
    """A window of one micro-batch through the layers of `span`, of the model's `layers`.

    Rows `start` to `start + length`; they attend to `pairs` (row, earlier row) pairs. A micro-batch has
    TRAIN_FORWARD segments, LOGPROBS ones where its loss couples tokens, LOSS ones, then BACKWARD ones. The
    tail, which LOGPROBS and LOSS span, is the layer after the last.
    """

    key: int
    job: str
    adapter: str
    start: int
    length: int
    pairs: int
    direction: Direction
    span: Span
    layers: int


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Ends a job's optimizer step: the gradients of its micro-batches, clipped to `max_grad_norm` (None does
    not clip), move its weights, which become the next version."""

    job: str
    learning_rate: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages of an adapter version's virtual tokens, for every sequence that uses it to read.

    They hold `tokens` tokens, the last page perhaps only a part. The last `rows` of these pass through the
    model; keys and values of those before are the adapter's own.
    """

    adapter: str
    pages: tuple[int, ...]
    tokens: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """Work that runs on a `share` (up to 1) of the machine, in one pass over the weights."""

    share: float
    inference: tuple[InferenceSegment, ...]
    training: tuple[TrainingSegment, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work: ids, token ids, pages and spans, nothing that changes or is shared with the scheduler.

    `sequences` and `micro_batches` are those that this plan is the first to name.
    `prefixes` have got their pages just now and are filled before any sequence is looked at.
    `updates` are optimizer steps, taken after the segments have run; `released` are keys of sequences
    and micro-batches that ended since the last plan, whose device state the executor drops before anything
    else. `predicted` is what the cost model expects, in seconds. `split` is the share of the machine that
    inference has, beside training in a lane of its own; None fuses them. A step does not wait for training
    beside its inference: that may go on through further steps, as long as they are split and bring no other.
    `idle` is how long nothing runs although somebody waits, seconds. `pausable` says that training in this
    plan stops at the next boundary between layers when `Executor.pause_training` is called. `pauses` counts
    the results that told of such a stop before this plan was made: what a plan that was made before the last
    stop wants to train is left out, for it goes on from where nothing has come.
    """

    inference: tuple[InferenceSegment, ...] = ()
    training: tuple[TrainingSegment, ...] = ()
    updates: tuple[OptimStep, ...] = ()
    released: tuple[int, ...] = ()
    predicted: float = 0.0
    prefixes: tuple[Prefix, ...] = ()
    split: float | None = None
    idle: float = 0.0
    pausable: bool = False
    pauses: int = 0
    sequences: tuple[SequenceStart, ...] = ()
    micro_batches: tuple[MicroBatchStart, ...] = ()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that run side by side."""
        if self.split is None:
            return (Lane(1.0, self.inference, self.training),)
        return Lane(self.split, self.inference, ()), Lane(1 - self.split, (), self.training)

    @property
    def is_empty(self) -> bool:
        return not (self.inference or self.training or self.updates or self.released)

    def without_training(self, jobs: Container[str] | None = None) -> "Plan":
        """The plan without the training of these jobs, or of all."""
        gone = self.jobs if jobs is None else jobs
        return replace(
            self,
            training=tuple(segment for segment in self.training if segment.job not in gone),
            updates=tuple(update for update in self.updates if update.job not in gone),
            micro_batches=tuple(batch for batch in self.micro_batches if batch.job not in gone),
        )

    @property
    def jobs(self) -> set[str]:
        """Jobs that it trains."""
        running = {segment.job for segment in self.training} | {update.job for update in self.updates}
        return running | {batch.job for batch in self.micro_batches}

    @property
    def is_fused(self) -> bool:
        """Tells whether inference and training share a pass over the weights."""
        return bool(self.inference) and bool(self.training) and self.split is None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the likeliest alternatives, natural logarithm."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled for one sequence. `prompt_logprobs` covers the prompt positions that this step
    scored, in order (the first prompt token has none and is never in it)."""

    token: int | None  # None where a prefill chunk ended before the prompt did
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """Outcome of one optimizer step: mean loss per label, its labels, the gradient's norm before clipping,
    and how many rows passed there and back."""

    step: int
    loss: float
    labels: int
    grad_norm: float
    learning_rate: float
    version: str  # key of the adapter version this step published
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The executor's answer. Keys are sequence keys (`sampled`) and job ids (`updated`, `failed`).

    `trained` are the segments of training that have been done since the last answer, each with the layers it
    really passed: what `pause_training` stopped has fewer than planned, or is not there, and the step is
    `paused`. `lanes` are the seconds of the inference and of the training that a split machine did, 0 where
    there was none or it is not done.
    """

    seconds: float
    sampled: Mapping[int, Sampled] = field(default_factory=dict)
    updated: Mapping[str, Updated] = field(default_factory=dict)
    failed: Mapping[str, CoserveError] = field(default_factory=dict)
    trained: tuple[TrainingSegment, ...] = ()
    paused: bool = False
    lanes: tuple[float, float] = (0.0, 0.0)
