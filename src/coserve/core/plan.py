"""Plans, from the scheduler to executors, and results, from executors to the scheduler. No tensors.

A `StepPlan` has a `BasePlan` for each base that the step concerns, and a `StepResult` the `BaseResult` of
each. What an executor reads of one base's plan or result does not say which base it is.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from coserve.core.request import Request
from coserve.core.sequence import CROSS_ENTROPY, Direction, LossSpec, Span
from coserve.errors import CoserveError


class InferenceSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of one sequence through the whole model: one for decode, many for prefill.

    They are its own tokens [start, start + length) and attend to the `context` positions before them, virtual
    ones included. `tail_rows` of them pass the final norm and the head: the sampled one, and those with
    requested log-probabilities. `new_pages` are appended to the sequence's block table.

    The first segment of a sequence describes it to the executor: by its `request`, `continued` by the
    answer's known tokens. Its context is then in the first `filled` of the new pages (shared and read-only
    ones, others that an earlier `SwapIn` filled), and in the beginning of the next one, which is to be copied
    from page `template`. Only sequences of one `scope` share pages with own tokens.

    An `offloaded` sequence has all its pages in slower memory, from which its rows read their context: they
    are numbered behind those of the device, and no other sequence reads them.

    The last rows are those of the `drafts`, tokens that are expected to follow those known. A token is
    sampled behind each of them too. The answer goes on with those of the longest beginning of the drafts that
    is sampled so, and one more. Pages that the sequence does not need for these are its own no longer.
    """

    key: int
    start: int
    length: int
    context: int
    tail_rows: int
    adapter: str | None = None
    new_pages: tuple[int, ...] = ()
    offloaded: bool = False
    request: Request | None = None
    filled: int = 0
    template: int | None = None
    drafts: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Rows of tokens that are known, without those of drafts."""
        return self.length - len(self.drafts)


@dataclass(frozen=True, slots=True)
class MicroBatchStart:
    """Describes a micro-batch to an executor, once, in the first plan that has it.

    `lengths` are the rows of its examples, those of the adapter's prompt first and `padding` rows last;
    `layers` is the model's depth. `tokens` and `labels` have an entry for each row; label -100 is none, and
    labels are shifted to the rows that predict them. The loss is the mean over `step_labels`, the labels of
    the whole optimizer step. `dropout_seed` seeds dropout. One that is `forward_only` gets no gradient; of
    one that `reports`, the result has the `MicroBatchOutput`. Micro-batches of one forward_backward have the
    same `pass_number`; their gradients can be dropped without those of earlier ones. One for `reference` is
    forward only, and passes what the job's training is compared with (`OpenSession.reference`) instead of the
    adapter in training. The output of a forward-only one has the `top_k` likeliest tokens of each labelled
    row.
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
    forward_only: bool = False
    reports: bool = False
    pass_number: int = 0
    reference: bool = False
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatchOutput:
    """Outcome of a micro-batch: its summed loss, and the log-probability of each row's label, 0 where a row
    has none. `losses` are those of the rows, where the loss has one for each. `top_tokens` are the likeliest
    tokens of the labelled rows, `top_k` for each row, the likeliest first, and `top_logprobs` their
    log-probabilities; both are empty where none were asked for."""

    loss: float
    logprobs: tuple[float, ...]
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingSegment:
    """A window of one micro-batch through the layers of `span`, of the model's `layers`.

    Rows [start, start + length), with `pairs` (query, key) pairs of attention. A micro-batch has
    TRAIN_FORWARD segments, LOGPROBS ones where its loss couples tokens, LOSS ones, then BACKWARD ones; one
    that is forward only has TRAIN_FORWARD and LOGPROBS ones. The tail, which LOGPROBS and LOSS span, is the
    layer after the last.
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
class AdamW:
    """Settings of AdamW, except the learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Ends a job's optimizer step: updates its weights by the gradients of its micro-batches, clipped to
    `max_grad_norm` (None: not clipped), and publishes the next version."""

    job: str
    learning_rate: float = 0.0
    max_grad_norm: float | None = None
    optimizer: AdamW = AdamW()


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages of an adapter version's virtual tokens, shared by its sequences.

    They hold `tokens` tokens; the last page may be partial. The last `rows` of these pass through the model;
    the adapter gives keys and values of the others.
    """

    adapter: str
    pages: tuple[int, ...]
    tokens: int
    rows: int = 0


STAGED: Final = 64 << 20  # bytes of copies that may wait to be written to the second tier, or to be placed


class CopyKind(StrEnum):
    """Kinds of entries that move to the second tier and back, by their places on the device."""

    PAGES = "pages"


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copies `pages` to the second tier as they are before the plan's rows. The name `copy` is the hash of a
    cached page's tokens, or a number for a part of a sequence, which nobody else can read. It is used again
    only once `Moved` has told of its last move. Copies that `Moved` has not told of have `STAGED` bytes at
    most, or are one alone."""

    copy: int | bytes
    pages: tuple[int, ...]
    kind: CopyKind = CopyKind.PAGES


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Fills `pages` with the pages of a copy from its `first` on; the copy is dropped. No row may read or
    write the pages until `Moved` has told of it, or the copy is dropped."""

    copy: int | bytes
    pages: tuple[int, ...]
    first: int = 0
    kind: CopyKind = CopyKind.PAGES


@dataclass(frozen=True, slots=True)
class Moved:
    """Copies that were written (`out`) and read (`back`) beside steps since the last result, with those that
    `failed`: they could not be written, or were not as they had been, and are gone. `seconds` are those in
    which they were written and read."""

    out: tuple[int | bytes, ...] = ()
    back: tuple[int | bytes, ...] = ()
    failed: tuple[int | bytes, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StateMove:
    """Copies the states of a sequence in recurrent layers: from a slot of those that are kept, before the
    plan's rows, or into it, after them, where it `keeps`; of a sequence without rows, before it is
    released."""

    key: int
    slot: int
    keeps: bool


class PassesAlone(IntEnum):
    """Members of a step that have passes of their own. Each value takes less memory, and more passes, than
    the one before."""

    NOBODY = 0
    WINDOWS = 1  # apart from answers, and one window after the other
    ALL = 2  # one sequence after the other, too


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a plan's forward rows. `decodes_apart`: decode rows have one of their own, which a
    graph may hold. `windows_apart`: windows do not share the pass of answers' other rows."""

    decodes_apart: bool = False
    windows_apart: bool = False


@dataclass(frozen=True, slots=True)
class BasePlan:
    """One base's work in a step: ids, token ids, pages and spans, immutable and independent of the
    scheduler's objects.

    `micro_batches` are those named for the first time. `prefixes` have new pages, which are
    filled before any segment runs. `updates` are optimizer steps, taken after the segments; `released` are
    keys of sequences and micro-batches that ended since the last plan, whose device state the executor drops
    first. `predicted` is the cost model's estimate of the step, seconds. `share` is the part of the machine
    that answers have while training runs beside them on the rest; None runs one after the other. A step does
    not wait for training beside its answers, which may go on through further steps with a share, without
    other training. `idle` is how long nothing runs although requests wait, seconds.

    `passes` says which forward rows share a pass. Training that shares none with answers follows in slices of
    `slice_layers` layers (0: of all that a segment spans). Where this is not 0, `Executor.pause_training`
    stops the plan's training between two slices, and within the layer under way where it `abandons`. `pauses`
    counts the results with such a stop when this plan was made: an executor skips the training of plans made
    before the last stop, as their positions are not reached.

    Whoever passes `alone` shares no pass. A plan with a pass that fails for those who share it
    (TogetherFailed) runs again as its `narrower` one.

    Pages move to and from the second tier (host memory beside a GPU, a file beside a CPU) beside this step
    and later ones, in the order of the plans: the copies `swap_dropped` are dropped, `swap_out` is written,
    then `swap_in` read. A step without rows waits a little for a move to end, unless `others_wait`: rows of
    another base. `states` are begun with, and kept, in this step.
    """

    inference: tuple[InferenceSegment, ...] = ()
    training: tuple[TrainingSegment, ...] = ()
    updates: tuple[OptimStep, ...] = ()
    released: tuple[int, ...] = ()
    predicted: float = 0.0
    prefixes: tuple[Prefix, ...] = ()
    share: float | None = None
    idle: float = 0.0
    slice_layers: int = 0
    abandons: bool = False
    passes: Passes = Passes()
    alone: PassesAlone = PassesAlone.NOBODY
    pauses: int = 0
    micro_batches: tuple[MicroBatchStart, ...] = ()
    swap_out: tuple[SwapOut, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    swap_dropped: tuple[int | bytes, ...] = ()
    states: tuple[StateMove, ...] = ()
    others_wait: bool = False

    @property
    def pausable(self) -> bool:
        """Tells whether a pause stops the plan's training."""
        return self.slice_layers > 0

    @property
    def fused(self) -> tuple[TrainingSegment, ...]:
        """Windows that share a pass with answers' rows."""
        shares = any(segment.length > 1 or not self.passes.decodes_apart for segment in self.inference)
        if not shares or self.passes.windows_apart or self.alone or self.share is not None:
            return ()
        return tuple(s for s in self.training if s.direction is Direction.TRAIN_FORWARD)

    @property
    def narrower(self) -> "BasePlan":
        """The plan with more passes, each for fewer rows."""
        return replace(self, alone=PassesAlone(self.alone + 1))

    @property
    def moves(self) -> tuple[SwapOut | SwapIn, ...]:
        """Copies that are written, and then those that are read."""
        return (*self.swap_out, *self.swap_in)

    @property
    def has_rows(self) -> bool:
        """Tells whether anything is computed."""
        return bool(self.inference or self.training or self.updates)

    @property
    def is_empty(self) -> bool:
        return not (self.has_rows or self.released or self.moves or self.swap_dropped)

    def without_training(self, jobs: Container[str] | None = None) -> "BasePlan":
        """The plan without the training of these jobs, or of all jobs."""
        if not (self.training or self.updates or self.micro_batches):
            return self
        gone = self.jobs if jobs is None else jobs
        return replace(
            self,
            training=tuple(segment for segment in self.training if segment.job not in gone),
            updates=tuple(update for update in self.updates if update.job not in gone),
            micro_batches=tuple(batch for batch in self.micro_batches if batch.job not in gone),
        )

    @property
    def jobs(self) -> set[str]:
        """Jobs that the plan trains."""
        running = {segment.job for segment in self.training} | {update.job for update in self.updates}
        return running | {batch.job for batch in self.micro_batches}

    @property
    def is_fused(self) -> bool:
        """Tells whether inference and training share a pass over the weights."""
        return bool(self.inference) and bool(self.training) and self.share is None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work on all bases: the plan of each base that has some, by the base's id, in the order in
    which they run. A step with no work at all has an empty plan of one base, which tells how long it rests.
    """

    bases: Mapping[str, BasePlan]

    @classmethod
    def of(cls, parts: Mapping[str, BasePlan], awaited: Container[str] = ()) -> "StepPlan":
        """From the parts of all bases, of which the empty ones are left out while there is another, but for
        those of bases whose results are `awaited`."""
        has_rows = any(part.has_rows for part in parts.values())
        kept = {
            base: replace(part, others_wait=True) if has_rows and not part.has_rows else part
            for base, part in parts.items()
            if not part.is_empty or base in awaited
        }
        return cls(kept or dict([*parts.items()][:1]))

    @property
    def only(self) -> BasePlan:
        """The plan of the one base that the step concerns."""
        (part,) = self.bases.values()
        return part

    @property
    def is_empty(self) -> bool:
        return all(part.is_empty for part in self.bases.values())

    @property
    def inference(self) -> list[InferenceSegment]:
        """Segments of sequences, of all bases."""
        return [segment for part in self.bases.values() for segment in part.inference]

    @property
    def training(self) -> list[TrainingSegment]:
        """Windows of micro-batches, of all bases."""
        return [segment for part in self.bases.values() for segment in part.training]

    @property
    def updates(self) -> list[OptimStep]:
        """Optimizer steps, of all bases."""
        return [update for part in self.bases.values() for update in part.updates]

    @property
    def first(self) -> BasePlan:
        """The part that runs first. `predicted`, `share`, `idle`, `slice_layers`, `abandons` and `pauses` are
        those of the step, in each of its parts."""
        return next(iter(self.bases.values()))

    @property
    def jobs(self) -> set[str]:
        """Jobs that the step trains."""
        return {job for part in self.bases.values() for job in part.jobs}

    def without_training(self) -> "StepPlan":
        """The plan without its training."""
        return StepPlan({base: part.without_training() for base, part in self.bases.items()})

    def as_run(self, result: "StepResult") -> "StepPlan":
        """The plan with the training alone that a result has done."""
        trained = {base: result.bases[base].trained for base in self.bases}
        return StepPlan({base: replace(self.bases[base], training=ran) for base, ran in trained.items()})

    def resting(self, seconds: float) -> "StepPlan":
        """The plan, which is empty, with a rest of so many seconds."""
        return StepPlan({base: replace(part, idle=seconds) for base, part in self.bases.items()})


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the likeliest alternatives, natural logarithm."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens sampled for one sequence: none where a prefill chunk ended before the prompt did, several
    where drafts held. `logprobs` are theirs, where asked for. `prompt_logprobs` are those of the prompt
    positions scored in this step, in order, without the first prompt token. `pooled` is what the step's rows
    add to an embedding, by its pooling: numbers for the model's width, float32, little-endian."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


@dataclass(frozen=True, slots=True)
class Updated:
    """Outcome of one optimizer step: mean loss per label, its labels, the gradient's norm before clipping,
    and the rows that passed forward and backward."""

    step: int
    loss: float
    labels: int
    grad_norm: float
    learning_rate: float
    version: str  # key of the adapter version this step published
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the job's objective, by name


@dataclass(frozen=True, slots=True)
class WeightReads:
    """Reading of a streamed base's weights: bytes, the seconds in which they were read, ahead or not, and the
    seconds that computation `waited` for them."""

    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def __sub__(self, earlier: "WeightReads") -> "WeightReads":
        return WeightReads(
            self.nbytes - earlier.nbytes, self.seconds - earlier.seconds, self.waited - earlier.waited
        )


@dataclass(frozen=True, slots=True)
class OffloadReads:
    """Reading of offloaded keys and values: bytes, and the seconds that computation waited for them."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelLaunches:
    """Work that ran kernel by kernel on a device with graphs: rows of `answers` that a graph should have
    held, all of which shared a pass, and windows of `jobs` that went back."""

    answers: bool = False
    jobs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BaseResult:
    """Result of one base's plan. Keys are sequence keys (`sampled`) and job ids (`updated`, `failed`).

    `trained` are the training segments done since the last result, each with the layers really passed:
    segments stopped by `pause_training` have fewer than planned or are missing, and the step is `paused`.
    `stream_seconds` are those of answers and of training that ran beside each other, 0 for none or
    unfinished. `reads` is what was read of a streamed base's weights meanwhile, `moved` the copies that were
    written or read. `lost` are sequences that end with an error: offloaded ones whose keys and values could
    not be written or read, those whose rows fail alone, for lack of memory or any other reason, and those
    that have no next token; `offload_reads` what was read of all of them. `outputs` are those of
    micro-batches that report and have ended, by key. `unfilled` are adapters whose virtual tokens failed:
    pages that the plan has filled with them are not to be read.

    `together_failed` tells that a pass that several share ran out of memory. The plan has run again as a
    narrower one, or its training has stopped there, as by a pause.
    """

    seconds: float
    sampled: Mapping[int, Sampled] = field(default_factory=dict)
    updated: Mapping[str, Updated] = field(default_factory=dict)
    failed: Mapping[str, CoserveError] = field(default_factory=dict)
    trained: tuple[TrainingSegment, ...] = ()
    paused: bool = False
    stream_seconds: tuple[float, float] = (0.0, 0.0)
    reads: WeightReads = WeightReads()
    moved: Moved = Moved()
    lost: Mapping[int, CoserveError] = field(default_factory=dict)
    offload_reads: OffloadReads = OffloadReads()
    outputs: Mapping[int, MicroBatchOutput] = field(default_factory=dict)
    unfilled: Mapping[str, CoserveError] = field(default_factory=dict)
    together_failed: bool = False
    launched: KernelLaunches = KernelLaunches()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a `StepPlan`, by base. Bases compute one after the other, so that their seconds add up."""

    bases: Mapping[str, BaseResult]

    @property
    def only(self) -> BaseResult:
        """The result of the one base that the step concerned."""
        (part,) = self.bases.values()
        return part

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.bases.values())

    @property
    def paused(self) -> bool:
        """Tells whether training of any base was stopped."""
        return any(part.paused for part in self.bases.values())

    @property
    def trained(self) -> list[TrainingSegment]:
        """Training segments done since the last result, of all bases."""
        return [segment for part in self.bases.values() for segment in part.trained]
