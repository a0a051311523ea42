"""The messages between the server and the engine's process.

The server sends `Command`s at any time; the engine sends one `Report` a step. A connection begins with the
engine's `Hello`. Requests belong to a connection: when it closes they are cancelled, and a server that
reconnects submits its live requests again, with their tokens so far. Jobs belong to the engine and continue
without a server. Their events are numbered, and reported on every new connection until the server has stored
and acknowledged them.
"""

from typing import Any, Final, Self

import msgspec

from coserve.core.job_status import JobStatus
from coserve.core.job_words import Rival
from coserve.core.plan import Updated
from coserve.core.request import BASE, FinishReason, Request
from coserve.core.training import AdamParams, Datum, PassOutput
from coserve.errors import CoserveError
from coserve.wire.scores import NONE, Scores

MethodFields = dict[str, Any] | list[dict[str, Any]]
Options = dict[str, float | int | str | list[float] | None]  # fields of TrainingConfig


class WireMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: msgpack maps tagged with their type's name."""


# Server to engine


class Cancel(WireMessage, frozen=True):
    """Cancels a request, as its client has disconnected or the server found a stop string. There is no
    reply."""

    id: str


class AddAdapter(WireMessage, frozen=True):
    """Registers the adapter in a folder (PEFT's format) as `key`; a `Reply` with `ref` follows.

    It is one of the base of the id `base`. Its files are checked now, with the weights of a `new` one;
    weights are loaded on the first request. A known key is a success.
    """

    ref: int
    key: str
    path: str
    new: bool = False
    base: str = BASE


class RemoveAdapter(WireMessage, frozen=True):
    """Removes an adapter version; answers under way keep it. A `Reply` with `ref` follows."""

    ref: int
    key: str


class PinAdapter(WireMessage, frozen=True):
    """Pins a known adapter in memory, or unpins it. A `Reply` with `ref` follows."""

    ref: int
    key: str
    pinned: bool


class CheckMethod(WireMessage, frozen=True):
    """Checks the settings of an adapter method; a `Reply` with `ref` follows."""

    ref: int
    method: MethodFields


class JobSpec(WireMessage, frozen=True):
    """A requested fine-tuning job, as paths and settings. As a command it has an adapter trained, from the
    newest good checkpoint of the job if there is one; it is ignored for a job that runs already.

    `data` and `validation` are checked files of training data, which errors call by their names
    (`data_name`, `validation_name`); checkpoints are written under `folder`, one after
    every `every` optimizer steps. `options` are fields of TrainingConfig, `method` of an adapter method's
    settings (`adapters.settings`), or of several. `start_from` is the folder of an adapter to continue from.
    With `keep_best` the job's result is its checkpoint with the lowest validation loss, and with `patience`
    the job ends after so many validations in a row that were not lower by more than `threshold`; `validated`
    are the losses of its checkpoints so far, by step. Where validation has a reward and no loss, its negative
    counts.
    `objective` is the type and the settings of the training method (`train.objectives`), and `teacher` the
    folder of the adapter that teaches in distillation, None for the base. `base` is the id of the base that
    it trains on. `weight` is its share among the jobs that train. `attempt` grows with every server that
    begins the job or goes on with it, and is in the names of its checkpoints.
    """

    job: str
    data: str
    folder: str
    options: Options = {}
    method: MethodFields = {}
    objective: dict[str, Any] = {}
    teacher: str | None = None
    start_from: str | None = None
    validation: str | None = None
    every: int = 50
    keep_best: bool = False
    patience: int | None = None
    threshold: float = 0.0
    validated: dict[int, float] = {}
    base: str = BASE
    data_name: str | None = None
    validation_name: str | None = None
    weight: float = 1.0
    attempt: int = 1


class CheckJob(WireMessage, frozen=True):
    """Checks whether a job can run on this engine; a `Reply` with `ref` follows.

    Only the beginning of a long file is read, so a job that passes may still fail when it starts.
    """

    ref: int
    spec: JobSpec


class PreviewJob(WireMessage, frozen=True):
    """Has a job read, and looked at, that is not created; a `Reply` with `ref` and a `preview` follows.
    `records` is the number of its file's records, which are not all read where that takes long. The preview
    has the tokens of the first `shown` ones."""

    ref: int
    spec: JobSpec
    records: int | None = None
    shown: int = 0


class TraceSteps(WireMessage, frozen=True):
    """Traces what the engine does for some seconds; a `Reply` with `ref` and `spans` follows."""

    ref: int
    seconds: float


class StopJob(WireMessage, frozen=True):
    """Ends a job's training. With `keep` a checkpoint is written first, to resume from."""

    job: str
    keep: bool


class WeighJob(WireMessage, frozen=True):
    """Changes a running job's share among the jobs that train."""

    job: str
    weight: float


class SessionCommand(WireMessage, frozen=True):
    """A command to the training session `session`. A `Reply` with `ref` follows. Sessions belong to the
    connection, as requests do."""

    ref: int
    session: str


class OpenTraining(SessionCommand, frozen=True):
    """Opens the training session `session` for a new adapter of a base; the reply has the key of its first
    version.

    `options` are fields of TrainingConfig: `rows`, `keep`, `seed` and `weight` count. `method` and
    `start_from` are as in `JobSpec`.
    """

    adapter: str
    method: MethodFields = {}
    options: Options = {}
    start_from: str | None = None
    base: str = BASE


class Forward(SessionCommand, frozen=True):
    """A pass over `data` in a session: a forward_backward, or without `backward` a forward. The reply has its
    `output`."""

    data: tuple[Datum, ...]
    loss: str = "cross_entropy"
    config: dict[str, float] = {}
    backward: bool = True


class StepOptimizer(SessionCommand, frozen=True):
    """An optimizer step of a session. The reply has what was `updated`."""

    params: AdamParams = AdamParams()


class SaveTraining(SessionCommand, frozen=True):
    """Writes a session's weights in PEFT's format to the folder `path`, or its `state` to a folder of its own
    in there. The reply has the folder."""

    path: str
    state: bool


class LoadTraining(SessionCommand, frozen=True):
    """Has a session go on from the state in the folder `path`, or from its weights alone. The reply has the
    key of the version published."""

    path: str
    optimizer: bool = True


class CloseTraining(SessionCommand, frozen=True):
    """Ends a session, if there is one, and drops its adapter."""


class Acknowledge(WireMessage, frozen=True):
    """All job events up to this number are stored: the engine may drop them."""

    number: int


class Drain(WireMessage, frozen=True):
    """Orders the engine to take no new work, checkpoint every job, report them stopped, and report itself
    drained."""


# A `Request` has a `sampling.seed`, so that another engine can continue the answer, and its adapter and
# alternatives have been loaded on the connection before.
Command = (
    Request | Cancel | AddAdapter | RemoveAdapter | PinAdapter | CheckMethod | CheckJob | PreviewJob
    | TraceSteps | JobSpec | StopJob | WeighJob | OpenTraining | Forward | StepOptimizer | SaveTraining
    | LoadTraining | CloseTraining | Acknowledge | Drain
)  # fmt: skip

# Engine to server


class FurtherBase(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of a base beside the engine's first one: those of `Hello` that are its own."""

    model: str
    parameters: int
    positions: int
    vocabulary: int
    width: int
    linears: dict[str, tuple[str, ...]] = {}
    offloaded_tokens: int = 0


class Hello(WireMessage, frozen=True):
    """The first message of a connection: the engine's identity and the properties of its first base; `bases`
    has those of the others, by id."""

    generation: str  # unique for each start of an engine
    model: str
    dtype: str
    device: str
    parameters: int
    positions: int  # most tokens of one sequence
    vocabulary: int
    width: int  # of the model's rows
    cache_tokens: int  # most tokens of all running sequences; of one, where workers of a cluster have fewer
    max_running: int
    deterministic: bool
    load_seconds: float
    jobs: tuple[str, ...] = ()  # that train right now, or wait for memory
    waiting: dict[str, str] = {}  # of these, which wait, and what they say about it
    starved: tuple["JobStarved", ...] = ()  # of `jobs`, those without time to train
    quantize: str = "none"  # or 8bit, 4bit
    cache_dtype: str = "auto"  # or int8
    offloaded_tokens: int = 0  # most tokens of a sequence in slower memory
    crash: str = ""  # how the engine before this one brought itself down; empty where it did not
    linears: dict[str, tuple[str, ...]] = {}  # targets of adapters: in attention, feed_forward and the head
    bases: dict[str, FurtherBase] = {}
    stitched: tuple[str, ...] = ()  # ids of the chains of two bases that the engine has
    methods: tuple[str, ...] = ()  # of adapters

    def of(self, base: str) -> "Hello":
        """The same of one base. A base that this engine does not have gives the first one's, and requests for
        it are refused by the engine."""
        if (found := self.bases.get(base)) is None:
            return self
        return msgspec.structs.replace(self, **msgspec.structs.asdict(found))


class Fault(WireMessage, frozen=True):
    """A deliberate error, by the name of its class in `coserve.errors`, and its one sentence."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: CoserveError) -> Self:
        """The message for an error."""
        return cls(type(error).__name__, str(error))


class Token(WireMessage, frozen=True):
    """A token of an answer, or its end alone (`token` is None).

    The first token has the number of `cached` prompt tokens. `alternative` is what answers: 0 the adapter
    asked for, from 1 on one of the alternatives to it.
    """

    id: str
    token: int | None = None
    logprobs: Scores = NONE  # of the token: one row, or none
    prompt_logprobs: Scores = NONE
    finish: FinishReason | None = None
    fault: Fault | None = None  # the request was refused; nothing follows
    cached: int = 0
    alternative: int = 0
    embedding: bytes = b""  # of a pooled prompt, with its end: float32, little-endian


class TokenCounts(msgspec.Struct, frozen=True):
    """Lengths of examples in tokens. `quantiles` are by name (p50), the `histogram` has the first and the
    last length of each bin, and how many there are."""

    total: int
    least: int
    most: int
    quantiles: dict[str, int]
    histogram: tuple[tuple[int, int, int], ...]


MOST_SHOWN: Final = 16  # examples of a preview that are told token by token


class TextPiece(msgspec.Struct, frozen=True):
    """A stretch of an example's text, and whether it is trained."""

    text: str
    trained: bool


class ShownExample(msgspec.Struct, frozen=True):
    """The first tokens of an example of so many `tokens`; whether it is the `rejected` answer of a pair."""

    pieces: tuple[TextPiece, ...]
    tokens: int
    rejected: bool = False


class JobPreview(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job that is not created, as it would be, and the `fault` for which it would be refused.

    Its data are `records` in a `container`, all of them if `is_whole`, with lengths of `tokens`; `over` are
    longer than the `limit`, the longest is at `longest_place`. Counts of what became of them are as in
    `JobStarted`, with so many `examples` left. `first` is the first one as it is rendered; of a pair
    `rejected` is the other answer. `shown` has the first examples token by token, of pairs both answers one
    after the other. `steps`, `seconds` and bytes of `memory`, of `memory_room`, are expected;
    None where that is not known.
    """

    fault: Fault | None = None
    container: str = ""
    format: str = ""
    records: int = 0
    is_whole: bool = True
    tokens: TokenCounts | None = None
    limit: int | None = None
    over: int = 0
    longest_place: str = ""
    truncated: int = 0
    skipped: int = 0
    dropped: int = 0
    split: int = 0
    pieces: int = 0
    examples: int = 0
    ignored: tuple[str, ...] = ()
    first: tuple[TextPiece, ...] = ()
    rejected: tuple[TextPiece, ...] = ()
    shown: tuple[ShownExample, ...] = ()
    steps: int = 0
    seconds: float | None = None
    memory: int | None = None
    memory_room: int | None = None


class StepSpans(msgspec.Struct, frozen=True, array_like=True):
    """The spans of a trace: name, thread, start and length in seconds, and rows; and how many had no room."""

    spans: tuple[tuple[str, str, float, float, int], ...]
    dropped: int


class Reply(WireMessage, frozen=True):
    """Outcome of a command with a `ref`. Those of a session say what it came to: a pass its `output`, an
    optimizer step what was `updated`, others what they are `said` to say; of a job there is a `preview`,
    of a trace there are `spans`."""

    ref: int
    fault: Fault | None = None
    output: PassOutput | None = None
    updated: Updated | None = None
    said: str = ""
    preview: JobPreview | None = None
    spans: StepSpans | None = None


class JobWaiting(WireMessage, frozen=True):
    """A job is read and waits for memory; `JobStarted` follows."""

    job: str
    reason: str


class JobNote(WireMessage, frozen=True):
    """A note on a job, of level "info", or "warn" where it deviates from its request."""

    job: str
    text: str
    level: str = "warn"


class JobStarved(WireMessage, frozen=True):
    """A running job gets no time: it trained last `seconds` ago, and requests or other jobs had the steps
    since (`by`). None: it trains again."""

    job: str
    seconds: float | None
    by: Rival = "requests"


class JobStarted(WireMessage, frozen=True):
    """A job's data is read, and training starts from optimizer step `step` of `steps`."""

    job: str
    step: int
    steps: int
    examples: int
    tokens: int  # in one epoch
    truncated: int
    dropped: int
    epochs: int
    batch_size: int
    learning_rate: float
    ignored: tuple[str, ...] = ()  # keys of the data's records that are not read
    # Of the data's examples that are too long: those left out, and texts that were cut into so many pieces.
    skipped: int = 0
    split: int = 0
    pieces: int = 0


class JobStep(WireMessage, frozen=True):
    """One optimizer step. `tokens` passed forward and backward in it; `seconds` is the time since the
    previous one."""

    job: str
    step: int
    loss: float
    labels: int
    tokens: int
    grad_norm: float
    learning_rate: float
    seconds: float
    validation_loss: float | None = None
    metrics: dict[str, float] = {}  # of the job's training method, by name


class JobCheckpoint(WireMessage, frozen=True):
    """A checkpoint is on disk. `path` holds the adapter in PEFT's format and the state for resuming."""

    job: str
    step: int
    path: str
    digest: str  # SHA-256 of its manifest
    loss: float | None = None
    validation_loss: float | None = None
    metrics: dict[str, float] = {}  # further figures of the validation, by name


class JobEnded(WireMessage, frozen=True):
    """A job left the engine: succeeded, failed, cancelled or paused (resumable from its checkpoint)."""

    job: str
    status: JobStatus
    step: int
    fault: Fault | None = None


JobNews = JobWaiting | JobStarted | JobStarved | JobNote | JobStep | JobCheckpoint | JobEnded


class Numbered(WireMessage, frozen=True):
    """A job event with its number among all of this engine's, from 1."""

    number: int
    news: JobNews


class Paging(WireMessage, frozen=True):
    """Statistics of stored adapters, loaded on demand; counters are since the engine's start."""

    known: int = 0
    resident: tuple[str, ...] = ()  # names of those in memory, the least recently used first
    pinned: tuple[str, ...] = ()
    hits: int = 0  # requests whose adapter was there when they came
    misses: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    dropped: int = 0  # to make room
    used_bytes: int = 0  # in memory or on their way, with their slots


class Holdings(WireMessage, frozen=True):
    """Owners of what an engine holds, and reasons of requests that wait. Each mapping is bounded
    (`engine/stats.py`)."""

    waits: dict[str, str] = {}  # reasons by request, the most urgent first
    pages: dict[str, int] = {}  # of requests under way, by the requests' scope
    cached_pages: int = 0  # free ones whose tokens can be found by later prompts
    states: int = 0  # sequences for which there is room in recurrent layers; 0 without such layers
    states_used: int = 0
    kept_states: int = 0  # room for states behind prefixes
    kept_states_used: int = 0
    adapters: dict[str, int] = {}  # bytes of those in memory, by name
    jobs: dict[str, int] = {}  # bytes that jobs hold or have reserved


class EngineStats(WireMessage, frozen=True):
    """Statistics of the engine; counters are since its start. Sent with a report about once a second."""

    steps: int
    fused_steps: int
    decode_tokens: int
    prefill_tokens: int
    trained_tokens: float  # rows that went all the way back
    updates: int
    preemptions: int
    running: int
    waiting: int
    pages: int
    free_pages: int
    cost_error: float  # mean relative error of predicted step times
    slo_met: int  # answers that ended within all their bounds
    slo_missed: int
    adapters: int
    memory: dict[str, int] = {}  # bytes by account of the ledger
    memory_budget: int = 0
    memory_peak: int = 0  # most bytes in use so far, measured, above those before the model was loaded
    memory_imports: int = 0  # bytes that the process held before that, beside the budget
    cost_margin: float = 0.0  # what is added to predicted times of steps that train, relative to them
    answer_seconds: float = 0.0  # of answers that ended, from arrival to the last token
    answer_deferred_seconds: float = 0.0  # of these, those that training took
    slowdown: float = 1.0  # of recent answers by training
    asked_tokens: int = 0  # of prompts that began to run
    found_tokens: int = 0  # of these, how many were in the cache
    paging: Paging = Paging()
    holdings: Holdings = Holdings()
    workers: tuple[str, ...] = ()  # what each worker of the cluster does that has the base's blocks
    swapped_out_pages: int = 0  # of preempted sequences and of prefixes, to the second tier
    swapped_in_pages: int = 0
    prefix_pages_swapped_out: int = 0  # of these, the prefixes'
    prefix_pages_swapped_in: int = 0
    swap_failures: int = 0  # copies that could not be written or read
    swap_pages: int = 0  # that the second tier has room for
    swap_pages_used: int = 0
    offloaded_pages: int = 0  # that slower memory has room for, of sequences longer than all pages
    offloaded_pages_used: int = 0
    offloaded_read_bytes: int = 0
    offload_failures: int = 0  # sequences whose keys and values could not be written or read
    recomputed_tokens: int = 0  # that passed the model again after a preemption
    drafts: int = 0  # of speculative decoding: how often tokens were drafted, how many, and how many held
    draft_tokens: int = 0
    accepted_tokens: int = 0
    unreadable: str = ""  # why weights of a streamed or remote base are not there now; all work waits

    @property
    def used_pages(self) -> int:
        return self.pages - self.free_pages


class Report(WireMessage, frozen=True):
    """All outcomes of one step for the server."""

    tokens: tuple[Token, ...] = ()
    replies: tuple[Reply, ...] = ()
    jobs: tuple[Numbered, ...] = ()
    stats: EngineStats | None = None
    drained: bool = False


Answer = Hello | Report
