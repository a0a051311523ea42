"""The seam between host components (scheduler, training, admission) and a device.

Plans, results and commands are immutable and serialisable (`executors.codec`): the host holds no weight,
page, activation or session, and accesses them only through an `Executor`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.methods import method_of
from coserve.adapters.paging.cache import AdapterTier
from coserve.adapters.paging.stored import Outline, StoredVersion
from coserve.adapters.sites import Site
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.row_buckets import RowBuckets
from coserve.memory.ledger import Account
from coserve.streamed.planner import Streaming
from coserve.train.job import PreparedJob
from coserve.train.save_policy import SavePolicySetting
from coserve.train.session import SessionConfig
from coserve.train.state import Identity, TrainingState

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """Constant facts of an executor. `sequences` is its largest number of sequences; `eos_ids` end an answer.
    `cache_nbytes` are the bytes of keys, values and states, `grown` those that loading took and keeps beside
    the weights, `host_room` those for host copies of adapters. `fingerprint` is the base's content hash,
    `dtype` its type's name, `row_buckets` the row counts of the device's steps, `sites` the base's sites for
    adapters, `streaming` how the base is streamed (None for one that was loaded as a whole). `swap_pages` are
    those that the second tier has room for, `offload_pages` the same for sequences that lie there as a whole;
    `offload_refusal` says why there are none. `elsewhere` are paths of linears that base executors compute.
    `graphs` tells whether answers that share no pass with windows are replayed as graphs. `state_slots` are
    those for states of recurrent layers that prompts begin with. It runs `plans` at
    once, as a pipeline of so many stages does, and `plan_rate` of them begin in the seconds that one takes;
    where it `trains_apart`, training of two plans never runs at once (`schedule.overlap.Overlap`)."""

    sequences: int
    eos_ids: tuple[int, ...]
    cache_nbytes: int
    grown: int
    host_room: int
    fingerprint: str
    parameters: int
    dtype: str
    row_buckets: RowBuckets
    sites: tuple[Site, ...]
    streaming: Streaming | None = None
    swap_pages: int = 0
    offload_pages: int = 0
    offload_refusal: str = ""
    elsewhere: frozenset[str] = frozenset()
    graphs: bool = False
    state_slots: int = 0
    plans: int = 1
    plan_rate: float = 1.0
    trains_apart: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes held on the device: the base's weights, and what the backward of one linear unpacks; adapters'
    weights; slots with copies of adapters; each session's, by account. `graphs` are those of graphs and of
    the stores that graphs of training read, `graph_stores` those of the stores alone."""

    base: int
    base_backward: int
    adapters: int
    slots: int
    sessions: Mapping[str, Mapping[Account, int]]
    graphs: int = 0
    graph_stores: int = 0


class Command(Generic[R]):
    """A call other than a plan, with a reply of type R (`reply`).

    A command takes effect between two steps, after all plans launched before it. One that is `beside` runs
    while steps go on, on the calling thread. In one that `gathers` ranks talk to each other beside steps, so
    that it is alone among such.
    """

    reply: ClassVar[Any] = None
    beside: ClassVar[bool] = False
    gathers: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command[Outline]):
    """Holds a version whose weights the host passes."""

    adapter: AdapterVersion
    reply = Outline
    gathers = True


@dataclass(frozen=True, slots=True)
class ReadAdapter(Command[Outline]):
    """Loads a version from its host copy, or from its files, which leaves a host copy. Raises the errors of
    `StoredVersion.read`."""

    stored: StoredVersion
    reply = Outline
    beside = True
    gathers = True


@dataclass(frozen=True, slots=True)
class DropAdapters(Command[None]):
    """Frees versions, by their keys, on the device or, as `tier` says, their host copies."""

    keys: tuple[str, ...]
    tier: AdapterTier = AdapterTier.DEVICE


@dataclass(frozen=True, slots=True)
class FetchAdapter(Command[AdapterVersion]):
    """Returns the weights of a held version. Raises AdapterNotFound."""

    key: str
    reply = AdapterVersion
    gathers = True


@dataclass(frozen=True, slots=True)
class FreshAdapter:
    """An untrained adapter: its methods' settings as plain fields (`adapters.settings.settings_of`), and the
    random seed of its weights."""

    methods: tuple[Mapping[str, Any], ...]
    seed: int

    @classmethod
    def of(cls, methods: tuple[object, ...], seed: int) -> "FreshAdapter":
        """From the methods' settings."""
        return cls(tuple(_fields(method) for method in methods), seed)


@dataclass(frozen=True, slots=True)
class OpenSession(Command[Outline]):
    """Opens a training session under a job's name, and holds its first version, `adapter` at `version`.

    It starts from weights (`start`), from a fresh adapter (`fresh`), or from the job's saved state
    (`resume`). `identity` is kept with saved states. Micro-batches for reference pass `reference`, or the
    base without an adapter. Steps go on meanwhile; the first with work of the session follows the reply.
    Raises OutOfMemory, AdapterMismatch.
    """

    job: str
    adapter: str
    version: int
    config: SessionConfig
    start: AdapterVersion | None = None
    fresh: FreshAdapter | None = None
    identity: Identity | None = None
    resume: TrainingState | None = None
    reference: AdapterVersion | None = None
    reply = Outline
    beside = True
    gathers = True

    @classmethod
    def of(
        cls, job: PreparedJob, version: int, config: SessionConfig, identity: Identity | None = None
    ) -> "OpenSession":
        """Of a job or a session that begins as `version` of its adapter."""
        start = None if job.is_fresh or job.resume is not None else job.first
        fresh = FreshAdapter.of(job.methods, job.config.seed) if job.is_fresh else None
        return cls(job.job, job.adapter, version, config, start, fresh, identity, job.resume, job.reference)


@dataclass(frozen=True, slots=True)
class RestartStep(Command[None]):
    """Drops the optimizer step under way of a session, or of it only the pass `pass_number`. Later
    micro-batches keep activations as `config` says."""

    job: str
    config: SessionConfig
    pass_number: int | None = None


@dataclass(frozen=True, slots=True)
class CloseSession(Command[None]):
    """Drops a session if there is one; its published versions stay."""

    job: str


@dataclass(frozen=True, slots=True)
class StateMark:
    """Number of a snapshot of a session, and the optimizer step after which it was made."""

    snapshot: int
    step: int


@dataclass(frozen=True, slots=True)
class MarkState(Command[StateMark]):
    """Makes a snapshot of a session after its last optimizer step, without the one under way. Nothing is
    copied yet: `ReadState`, which must follow, does it beside steps."""

    job: str
    reply = StateMark


@dataclass(frozen=True, slots=True)
class ReadState(Command[TrainingState]):
    """Copies a snapshot, and drops it. The session may have gone on, or be closed."""

    snapshot: int
    reply = TrainingState
    beside = True
    gathers = True


@dataclass(frozen=True, slots=True)
class TraceLayers(Command[None]):
    """Finds which activations of a job are kept, so that no step waits for this when its session opens: most
    of a second for new kinds of layers. The adapter's shapes are enough: `start` or `fresh`."""

    keep: SavePolicySetting
    start: AdapterVersion | None = None
    fresh: FreshAdapter | None = None
    beside = True


@dataclass(frozen=True, slots=True)
class ReadParameter(Command[Tensor | None]):
    """Reads a frozen parameter of the base: the `weight`, `bias` or `gain` (of a norm) at a path, or the
    `row_norms` of its weight. None if it does not exist. Raises AdapterError."""

    path: str
    what: str
    reply = Tensor
    beside = True
    gathers = True
    gathers = True


@dataclass(frozen=True, slots=True)
class EmbedTokens(Command[Tensor]):
    """Returns the input embeddings [n, width] of token ids."""

    tokens: tuple[int, ...]
    reply = Tensor
    beside = True
    gathers = True


@dataclass(frozen=True, slots=True)
class CompileGrammar(Command[None]):
    """Compiles a grammar before a sequence needs it. Raises RequestError."""

    text: str
    beside = True


@dataclass(frozen=True, slots=True)
class SetLimits(Command[None]):
    """Limits of training: rows of a window group of several jobs, bytes of freed activations kept for reuse,
    and bytes of the stores of graphs. None leaves a limit unchanged."""

    window_group_rows: int | None = None
    activation_nbytes: int | None = None
    graph_store_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class SkipReads(Command[None]):
    """Has blocks of a streamed base compute with zeros, without reading their weights, or no longer: for
    measurements of their arithmetic."""

    skip: bool


@dataclass(frozen=True, slots=True)
class ReadMemory(Command[DeviceMemory]):
    """Returns the bytes held on the device."""

    reply = DeviceMemory


class DeviceWorker(Protocol):
    """The owner of a device (`worker/worker.py`), as its transport sees it."""

    @property
    def spec(self) -> ExecutorSpec: ...

    def run(self, plan: BasePlan) -> BaseResult:
        """Runs a plan. One that raised PassFailed may be run again, also as a narrower one: what of it has
        run computes the same once more."""

    def pause_training(self) -> None:
        """Stops the training of pausable plans between two slices, until `resume_training`; where a plan
        `abandons`, between two products, and the layer under way is lost.

        May be called by any thread, at any time. At least every other plan does a slice, so arrivals in every
        step slow training down and never stop it.
        """

    def resume_training(self) -> None:
        """Withdraws `pause_training`."""

    def call(self, command: Command[R]) -> R:
        """Executes a command and returns its reply."""

    def on_progress(self, beat: Callable[[], object]) -> None:
        """Sets a callback for progress: called by the collecting thread while plans run, after each layer and
        before a plan runs again, or some times a second if the executor is remote."""


class Executor(DeviceWorker, Protocol):
    """Anything that can run plans: a local device, another process, a scripted fake."""

    def launch(self, plan: BasePlan) -> None:
        """Queues a plan and returns at once; several may be under way, and run in this order."""

    def collect(self, wait: bool = True) -> BaseResult | None:
        """The result of the oldest plan without one collected. None if no plan was launched or, without
        `wait`, if it is not done."""

    def run(self, plan: BasePlan) -> BaseResult:
        """Launches one plan and waits for its result; no other may be under way."""
        self.launch(plan)
        result = self.collect()
        assert result is not None, "a plan that was launched has a result"
        return result


def _fields(method: object) -> Mapping[str, Any]:
    """A method's settings as plain fields, with the method's name."""
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
    return {"type": method_of(method).name, **fields}
