"""The seam between what decides (scheduler, training, admission) and what owns a device.

Plans, results and commands are immutable and serialisable (`executors.codec`): whatever decides holds no
weight, page, activation or session, and reaches none of them but through an `Executor`.
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
from coserve.core.plan import Plan, StepResult
from coserve.core.row_buckets import RowBuckets
from coserve.memory.ledger import Account
from coserve.train.save_policy import SavePolicySetting
from coserve.train.session import SessionConfig
from coserve.train.state import Identity, TrainingState

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """Facts of an executor that never change. `sequences` is the most it holds state of at once, `eos_ids`
    end an answer; `cache_nbytes` is what keys and values take, `grown` what loading took beside the weights
    and keeps, `host_room` what host copies of adapters may take, all in bytes; `fingerprint` is the base's
    content hash, `dtype` the name of its type, `row_buckets` the row counts that the device's steps use,
    `sites` the places of the base where adapters may stand."""

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


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes held on the device: the base's weights, and what they will grow by once something trains;
    adapters' weights; slots that copies of adapters have; each session's, by account."""

    base: int
    base_to_train: int
    adapters: int
    slots: int
    sessions: Mapping[str, Mapping[Account, int]]


class Command(Generic[R]):
    """A call beside steps, with a reply of type R (`reply`).

    A command takes effect between two steps, after all plans launched before it. Those that are `beside`
    go on while steps run, on the thread that calls.
    """

    reply: ClassVar[Any] = None
    beside: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command[Outline]):
    """Holds a version that the host has the weights of."""

    adapter: AdapterVersion
    reply = Outline


@dataclass(frozen=True, slots=True)
class ReadAdapter(Command[Outline]):
    """Reads a version from its copy on the host or else from its files, of which it leaves a copy there, and
    holds it. Raises what `StoredVersion.read` does."""

    stored: StoredVersion
    reply = Outline
    beside = True


@dataclass(frozen=True, slots=True)
class DropAdapters(Command[None]):
    """Frees versions, by their keys, on the device or (`tier`) their copies on the host."""

    keys: tuple[str, ...]
    tier: AdapterTier = AdapterTier.DEVICE


@dataclass(frozen=True, slots=True)
class FetchAdapter(Command[AdapterVersion]):
    """Returns the weights of a version that is held. Raises AdapterNotFound."""

    key: str
    reply = AdapterVersion


@dataclass(frozen=True, slots=True)
class FreshAdapter:
    """An adapter that nobody has trained: the settings of its methods as plain fields
    (`adapters.settings.settings_of`), and the seed that its weights are drawn from."""

    methods: tuple[Mapping[str, Any], ...]
    seed: int

    @classmethod
    def of(cls, methods: tuple[object, ...], seed: int) -> "FreshAdapter":
        """From the methods' settings."""
        return cls(tuple(_fields(method) for method in methods), seed)


@dataclass(frozen=True, slots=True)
class OpenSession(Command[Outline]):
    """Opens a training session under a job's name, and holds its first version, `adapter` at `version`.

    It starts from weights (`start`), from a fresh adapter (`fresh`), or where the job stood before
    (`resume`). `identity` is kept with the states that are saved. Raises OutOfMemory, AdapterMismatch.
    """

    job: str
    adapter: str
    version: int
    config: SessionConfig
    start: AdapterVersion | None = None
    fresh: FreshAdapter | None = None
    identity: Identity | None = None
    resume: TrainingState | None = None
    reply = Outline


@dataclass(frozen=True, slots=True)
class RestartStep(Command[None]):
    """Gives back all that the optimizer step under way of a session holds: its micro-batches come again, and
    are kept as `config` says."""

    job: str
    config: SessionConfig


@dataclass(frozen=True, slots=True)
class CloseSession(Command[None]):
    """Drops a session if there is one; what it has published stays."""

    job: str


@dataclass(frozen=True, slots=True)
class SaveState(Command[TrainingState]):
    """Copies where a session stands after its last optimizer step, without the one under way."""

    job: str
    reply = TrainingState


@dataclass(frozen=True, slots=True)
class TraceLayers(Command[None]):
    """Finds out which activations of a job will be kept, so that no step waits for it when its session opens:
    most of a second for layers that were never traced. The adapter's shapes are enough: `start` or
    `fresh`."""

    keep: SavePolicySetting
    start: AdapterVersion | None = None
    fresh: FreshAdapter | None = None
    beside = True


@dataclass(frozen=True, slots=True)
class ReadParameter(Command[Tensor | None]):
    """Reads a frozen parameter of the base: the `weight`, `bias` or `gain` (of a norm) at a path, or the
    `row_norms` of its weight. None where there is none. Raises AdapterError."""

    path: str
    what: str
    reply = Tensor
    beside = True


@dataclass(frozen=True, slots=True)
class EmbedTokens(Command[Tensor]):
    """Returns the input embeddings [n, width] of token ids."""

    tokens: tuple[int, ...]
    reply = Tensor
    beside = True


@dataclass(frozen=True, slots=True)
class CompileGrammar(Command[None]):
    """Compiles a grammar before a sequence needs it. Raises RequestError."""

    text: str
    beside = True


@dataclass(frozen=True, slots=True)
class SetLimits(Command[None]):
    """Limits of training: rows of several jobs that go back together, and bytes of activations whose memory
    is kept to be used again. None leaves a limit as it is."""

    window_group_rows: int | None = None
    activation_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadMemory(Command[DeviceMemory]):
    """Tells what is held on the device."""

    reply = DeviceMemory


class Executor(Protocol):
    """Anything that can run plans: a local device, another process, a scripted fake."""

    @property
    def spec(self) -> ExecutorSpec: ...

    def launch(self, plan: Plan) -> None:
        """Takes a plan and returns at once; several may be under way, and run in this order."""
        ...

    def collect(self, wait: bool = True) -> StepResult | None:
        """The result of the oldest plan that was not collected. None where none was launched or, without
        `wait`, where it is not done."""
        ...

    def pause_training(self) -> None:
        """Has training of pausable plans stop at the next boundary between layers, until `resume_training`.

        May be called by any thread, at any time. The first layer of a plan's training always runs, so that
        arrivals in every step slow training down and never stop it.
        """
        ...

    def resume_training(self) -> None:
        """Withdraws `pause_training`."""
        ...

    def call(self, command: Command[R]) -> R:
        """Does what a command says, and returns its reply."""
        ...

    def on_progress(self, beat: Callable[[], object]) -> None:
        """Has `beat` called while plans run, as often as there is progress (a layer at least), at most some
        times a second from afar: by whoever collects."""
        ...

    def run(self, plan: Plan) -> StepResult:
        """Launches one plan and waits for it; nothing else is under way."""
        self.launch(plan)
        result = self.collect()
        assert result is not None, "a plan that was launched has a result"
        return result


def _fields(method: object) -> Mapping[str, Any]:
    """A method's settings as plain fields, with the method's name."""
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
    return {"type": method_of(method).name, **fields}
