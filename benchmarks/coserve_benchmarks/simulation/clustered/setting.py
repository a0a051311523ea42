"""Settings of a simulated cluster: its workers, links, blocks and applications, and what is asked of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coserve.cluster.dispatch import DispatchSettings
from coserve.cluster.records import ClusterBlock, ClusterLink, ClusterWorker, ComputeProfile
from coserve.cluster.scaling import ScalingSettings
from coserve.core.ranges import MOST_COUNT, check_range
from coserve.errors import ConfigError

_DISPATCH = DispatchSettings()


@dataclass(frozen=True, slots=True)
class ClusterAsk:
    """A request: when it comes, the application it is for, tokens of its prompt and of its answer."""

    at: float
    application: str
    prompt: int
    answer: int

    def __post_init__(self) -> None:
        check_range("prompt", self.prompt, 1, MOST_COUNT, int)
        check_range("answer", self.answer, 1, MOST_COUNT, int)


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """A cluster. `chains` are the blocks of each application in order, and `placed` the workers that hold
    each block at the start. `within` and `between` are links of workers of one host and of two; the scheduler
    is on a host of its own. `others` are the links of pairs of hosts (sender and receiver) that are not what
    they are thought to be, which dispatch learns from what goes over them. `batch_rows` are the most rows of
    a pass, `most_queued` those that may wait at an instance. A block brings `branches` seconds to a pass for
    each further application in it, where applications branch within a model. Pages are swept, and instances
    scaled where `scaling` is set, at each look."""

    workers: Sequence[ClusterWorker]
    blocks: Mapping[str, ClusterBlock]
    chains: Mapping[str, tuple[str, ...]]
    placed: Mapping[str, Sequence[str]]
    within: ClusterLink
    between: ClusterLink
    dispatch: DispatchSettings = _DISPATCH
    batch_rows: int = 512
    most_queued: int = 4096
    chunk: int = 256
    branches: float = 0.0
    approximates: bool = False
    scaling: ScalingSettings | None = None
    look: float = 1.0
    sweep: float = 60.0
    others: Mapping[tuple[str, str], ClusterLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("batch_rows", self.batch_rows, 1, MOST_COUNT, int)
        check_range("chunk", self.chunk, 1, MOST_COUNT, int)
        missing = {one for chain in self.chains.values() for one in chain} - set(self.blocks)
        if missing:
            raise ConfigError(f"chains have blocks that the cluster has not: {', '.join(sorted(missing))}")
        names = {worker.name for worker in self.workers}
        if unknown := {one for places in self.placed.values() for one in places} - names:
            raise ConfigError(
                f"blocks are placed on workers that are not there: {', '.join(sorted(unknown))}"
            )


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The cluster at a time of a load: seconds that its devices have computed, rows that chains' own blocks
    and those that stand in for one have passed since the beginning, and bytes of blocks and of pages in
    memory."""

    at: float
    computed: float
    own_rows: int
    stand_in_rows: int
    block_nbytes: int
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """The answers of a load: the seconds of each, tokens a second from the first arrival to the last answer,
    bytes between hosts and within them, seconds that devices computed over those that they had, the share of
    each answer's passes that were those of stand-ins, blocks loaded, instances added, and tokens whose pages
    were recomputed and copied."""

    latencies: tuple[float, ...]
    rate: float
    between_nbytes: float
    within_nbytes: float
    busy: float
    sent_seconds: float
    stood_in: tuple[float, ...]
    loads: int
    added: int
    recomputed: int
    copied: int

    @property
    def adapted(self) -> int:
        """Answers that any stand-in took part in."""
        return sum(share > 0.0 for share in self.stood_in)


def linear_profile(fixed: float, per_row: float, most: int = 4096) -> ComputeProfile:
    """A profile of a block that takes `fixed` seconds, and `per_row` for each row."""
    return ComputeProfile(((1, fixed + per_row), (most, fixed + per_row * most)))
