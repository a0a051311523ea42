"""Settings of an engine. Frozen: changing one gives a new object."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from coserve.core.ranges import MOST_COUNT
from coserve.core.setting import Flag, Range, check_ranges
from coserve.core.size import read_memory, read_size
from coserve.core.speculation import SpeculativeConfig
from coserve.errors import ConfigError

MOST_THREADS: Final = 1024  # that compute
MOST_RANKS: Final = 64  # of one model
_MOST_BLOCKS: Final = 1024  # of one model


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine: its device, number formats, memory and scheduling."""

    device: Annotated[str, Flag("cpu, or cuda, cuda:1, ...")] = "cpu"
    threads: Annotated[
        int, Range(0, MOST_THREADS), Flag("Threads that compute; 0: one for each processor allowed.")
    ] = 0
    dtype: Annotated[str, Flag("auto, float32, bfloat16, float16 or float64.")] = "auto"
    # 8bit halves the bytes, 4bit thirds them; both err.
    quantize: Annotated[
        str, Flag("Bits of the base's weights: 8bit or 4bit (4bit needs coserve[quantized]).")
    ] = "none"
    # Held from the start.
    cache_tokens: Annotated[
        int, Range(1), Flag("Keys and values held at once, in tokens over all sequences.")
    ] = 32768
    # auto: most of what is free.
    memory: Annotated[str | int | float, Flag("Bytes for everything, as 6GiB, or a share, as 0.5.")] = "auto"
    base: Annotated[
        str,
        Flag(
            "Base executors that compute the base's linears: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT; "
            "several are separated by commas. Their key is read from COSERVE_EXECUTOR_KEY.",
            "ADDRESS",
        ),
    ] = ""
    base_patience: float = 5.0  # seconds that a step waits for one that went away, before all work waits
    # Empty: the system's.
    base_ca: Annotated[
        str,
        Flag("Certificates in PEM that may have signed those of executors at tls: addresses.", "FILE"),
    ] = ""
    base_pin: Annotated[
        str,
        Flag(
            "SHA-256 of the certificate of the executor at a tls: address, as it prints at its start; of "
            "several, one each, with commas.",
            "HEX",
        ),
    ] = ""
    base_certificate: Annotated[
        str,
        Flag("Own certificate in PEM, where executors ask for one.", "FILE"),
    ] = ""
    base_key: Annotated[str, Flag("Its private key in PEM, where that file has none.", "FILE")] = ""
    base_privacy: Annotated[
        str,
        Flag(
            "What executors may see of rows: none hides nothing, noise obfuscates, shares needs those of "
            "two parties: the first half of --base is one's, the second the other's."
        ),
    ] = "none"
    # A base that needs more is read from disk for each pass, but for the part that fits. auto: a base that is
    # larger than all of memory has half of it.
    base_memory: Annotated[
        str | int | float,
        Flag("Of that, for the base's weights: what exceeds it is read in each pass, as from disk."),
    ] = "auto"
    # auto: half of what is free. Nothing on a CPU, whose base is read from disk.
    host_memory: Annotated[
        str | int | float,
        Flag("Beside a GPU, the host's memory for what exceeds it; the rest is read from disk. 0 for none."),
    ] = "auto"
    adapter_memory: Annotated[
        str | int | float,
        Flag("Of that, for adapters from disk: bytes, a share, or auto: what is free."),
    ] = "auto"
    # Where reading pages takes less than computing them again: a file on a CPU, the host's memory on a GPU.
    swap_space: Annotated[
        str | int,
        Flag("For keys and values of preempted answers, outside that: as 4GiB; 0 for none."),
    ] = "4GiB"
    offload: Annotated[bool, Flag("Optimizer state rests in slower memory between steps.")] = False
    max_running: Annotated[int, Range(1), Flag("Answers that run at once; more wait.")] = 64
    cache_dtype: Annotated[
        str,
        Flag("auto (the model's), or int8: half the bytes, a little less exact."),
    ] = "auto"
    prefix_sharing: Annotated[
        bool,
        Flag(
            "Compute what a tenant's prompts have in common once; on by default.",
            name="--prefix-sharing/--no-prefix-sharing",
        ),
    ] = True
    speculative_config: Annotated[
        str | dict[str, Any],
        Flag(
            "Answers draft their next tokens from what they repeat, as in vLLM: "
            '{{"method": "ngram", "num_speculative_tokens": 5}} and prompt_lookup_max, prompt_lookup_min.',
            "JSON",
        ),
    ] = ""
    policy: Annotated[
        str,
        Flag(
            "How training is fitted between answers, such as adaptive or temporal:5; {default} by default.",
            "NAME[:OPTIONS]",
        ),
    ] = "hybrid"
    # On one machine and with one number of threads.
    # Each holds a part of every layer, in a process of its own: on a CPU they share its cores and memory.
    tensor_parallel: Annotated[
        int,
        Range(1, MOST_RANKS),
        Flag("Ranks that compute the base together, each with a part of it: GPUs, or processes.", "N"),
    ] = 1
    # Each in a process of its own, as ranks are.
    pipeline_parallel: Annotated[
        int,
        Range(1, MOST_RANKS),
        Flag("Stages of a pipeline, each with some of the base's layers on --tensor-parallel ranks.", "N"),
    ] = 1
    # Each holds some of the base's layers, in a process of its own on any host.
    cluster: Annotated[
        str,
        Flag(
            "Workers that have the base's blocks (`coserve cluster`): unix:PATH or tcp:HOST:PORT, separated "
            "by commas, or ray, or ray:HOST:PORT, for those of a Ray cluster. Their key is read from "
            "COSERVE_CLUSTER_KEY.",
            "ADDRESSES",
        ),
    ] = ""
    cluster_blocks: Annotated[
        int,
        Range(0, _MOST_BLOCKS),
        Flag("Blocks that --cluster cuts the base into; 0: as many as workers.", "N"),
    ] = 0
    cluster_copies: Annotated[
        int, Range(1, MOST_RANKS), Flag("Workers of --cluster that have each of the blocks, at most.", "N")
    ] = 1
    cluster_cache_tokens: Annotated[
        int,
        Range(0),
        Flag(
            "Keys and values that each worker of --cluster has room for of a block, in tokens; the longest "
            "sequence is no longer. 0: all of --cache-tokens.",
            "N",
        ),
    ] = 0
    cluster_queue: Annotated[
        int,
        Range(0),
        Flag("Rows waiting at a block above which another worker of --cluster loads it too; 0: never.", "N"),
    ] = 0
    cluster_idle: Annotated[
        float, Range(0), Flag("Seconds without work after which such a further instance goes.", "SECONDS")
    ] = 30.0
    cluster_speculation: Annotated[
        float,
        Range(0, 1),
        Flag(
            "Share of the blocks on --cluster, the slowest, beside which surrogates predict for requests "
            "that allow approximations; 0: none.",
            "SHARE",
        ),
    ] = 0.0
    deterministic: Annotated[bool, Flag("Bitwise the same results, whatever else runs; slower.")] = False
    allow_special_tokens: Annotated[
        bool, Flag("Control tokens spelled in prompts, messages and training data are such, not text.")
    ] = False
    executor: str = "local"  # runs steps in this process; remote: in one of its own, reached over sockets
    async_scheduling: bool | None = (
        None  # plans a step while one runs; None: where that is elsewhere, or on a GPU
    )
    page_size: Annotated[int, Range(1)] = 16  # tokens of the cache; smaller wastes less, larger is faster
    # Seconds that a request which allows approximations may wait for a more accurate one, under load.
    approximation_delay: Annotated[float, Range(0)] = 0.1
    scratch: str = ""  # folder of files of offloaded state; empty: the system's for temporary ones
    policy_options: dict[str, Any] = field(default_factory=dict)  # the policy's options, by their names
    scheduler: dict[str, Any] = field(default_factory=dict)  # other fields of schedule.SchedulerConfig
    calibrate: bool = True  # measure the cost model at start-up (seconds); else start from a guess
    seed: int = 0  # of what is drawn for requests that bring no seed of their own
    # Hosts that graders of jobs (`train/grading/http.py`) may reach although their addresses are not public.
    grader_hosts: tuple[str, ...] = ()
    max_chat_turns: Annotated[int, Range(1)] = 2048  # messages of one chat, in requests and in training data
    # Characters of one record of training data; None: 128 for each position of the model, 1 Mi at least.
    max_text_characters: Annotated[int | None, Range(1)] = None

    def __post_init__(self) -> None:
        check_ranges(self, "engine.")
        _ = self.swap_nbytes, self.speculation
        read_memory(self.memory)
        read_memory(self.adapter_memory, "adapter_memory")
        read_memory(self.base_memory, "base_memory")
        read_memory(self.host_memory, "host_memory", may_be_none=True)
        if self.quantize not in ("none", "8bit", "4bit"):
            raise ConfigError(f"engine.quantize must be none, 8bit or 4bit, not {self.quantize!r}")
        if self.dtype not in ("auto", "float64", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"engine.dtype must be auto, float32, bfloat16, float16 or float64, not {self.dtype!r}"
            )
        if self.cache_dtype not in ("auto", "int8"):
            raise ConfigError(f"engine.cache_dtype must be auto or int8, not {self.cache_dtype!r}")
        if self.executor not in ("local", "remote"):
            raise ConfigError(f"engine.executor must be local or remote, not {self.executor!r}")
        self._check_base()
        self._check_ranks()
        self._check_cluster()
        if self.deterministic:
            settings = self.scheduler_settings
            if settings["micro_batches_in_flight"] != 1 or settings["training_window"] is None:
                raise ConfigError(
                    "engine.deterministic needs a scheduler.training_window, and micro_batches_in_flight of 1"
                )

    def _check_base(self) -> None:
        """Raises ConfigError for settings that need the base's weights in this process, or need a base."""
        for name in ("base", "base_ca", "base_pin", "base_certificate", "base_key", "base_privacy"):
            if not isinstance(given := getattr(self, name), str):
                raise ConfigError(f"engine.{name} must be text, not {given!r}")
        if self.base_privacy not in ("none", "noise", "shares"):
            raise ConfigError(f"engine.base_privacy must be none, noise or shares, not {self.base_privacy!r}")
        if not self.base:
            usual = {"base_privacy": "none"}
            for name in ("base_ca", "base_pin", "base_certificate", "base_key", "base_privacy"):
                if getattr(self, name) != usual.get(name, ""):
                    raise ConfigError(f"engine.{name} is for the executors of engine.base, which is not set")
            return
        if self.base_key and not self.base_certificate:
            raise ConfigError("engine.base_key is the key of engine.base_certificate, which is not set")
        needs = {
            "quantize": (self.quantize != "none", "an executor's linears are as it has loaded them"),
            "base_memory": (self.base_memory != "auto", "the executors' memory is not this engine's"),
            "deterministic": (
                self.deterministic,
                "an executor computes rows of several clients together, which changes their last bits",
            ),
        }
        for name, (is_set, reason) in needs.items():
            if is_set:
                raise ConfigError(f"engine.{name} does not go with engine.base: {reason}")
        patience: object = self.base_patience
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 <= patience <= 1e9:
            raise ConfigError(f"engine.base_patience must be at least 0 seconds, not {patience!r}")

    def _check_ranks(self) -> None:
        """Raises ConfigError for settings that do not go with several ranks."""
        if self.ranks == 1:
            return
        staged = self.pipeline_parallel > 1
        setting = "pipeline_parallel" if staged else "tensor_parallel"
        refused = {
            "tensor_parallel": (self.ranks > MOST_RANKS, f"a model has at most {MOST_RANKS} ranks in all"),
            "deterministic": (staged and self.deterministic, "stages run several plans at once"),
            "base": (bool(self.base), "its linears are computed elsewhere already"),
            "base_memory": (staged and self.base_memory != "auto", "layers of a stage stay in its memory"),
            "offload": (self.offload, "optimizer state that is cut stays beside its weights"),
            "speculative_config": (
                staged and bool(self.speculative_config),
                "stages run several plans at once",
            ),
        }
        for name, (is_set, reason) in refused.items():
            if is_set:
                raise ConfigError(f"engine.{name} does not go with engine.{setting}: {reason}")

    def _check_cluster(self) -> None:
        """Raises ConfigError for settings that do not go with blocks on a cluster, or need one."""
        if not isinstance(given := self.cluster, str):
            raise ConfigError(f"engine.cluster must be text, not {given!r}")
        if not self.cluster:
            return
        refused = {
            "base": (bool(self.base), "its linears are computed elsewhere already"),
            "tensor_parallel": (self.tensor_parallel > 1, "a block is not cut"),
            "pipeline_parallel": (self.pipeline_parallel > 1, "its blocks are the stages"),
            "quantize": (self.quantize != "none", "a block has its layers as they are"),
            "base_memory": (self.base_memory != "auto", "the workers' memory is not this engine's"),
            "deterministic": (self.deterministic, "workers compute rows together as they come"),
            "speculative_config": (bool(self.speculative_config), "its workers take one token of a sequence"),
            "cache_dtype": (self.cache_dtype != "auto", "workers keep keys and values in the model's type"),
            "executor": (self.executor != "local", "its workers are processes of their own already"),
            "scheduler.training_window": (
                "training_window" in self.scheduler,
                "a window is a whole micro-batch",
            ),
        }
        for name, (is_set, reason) in refused.items():
            if is_set:
                raise ConfigError(f"engine.{name} does not go with engine.cluster: {reason}")

    @property
    def measures_costs(self) -> bool:
        """Tells whether engines measure the costs of steps as they start. Those of a base on a cluster depend
        on its workers' other work: they are learned from the steps that run."""
        return self.calibrate and not self.cluster

    @property
    def ranks(self) -> int:
        """Processes that compute the base together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def scheduler_settings(self) -> dict[str, Any]:
        """Fields of `schedule.SchedulerConfig`. The deterministic mode fixes the size of training windows and
        the order in which gradients add up."""
        fixed: dict[str, int] = {}
        if self.deterministic:
            fixed = {"training_window": 128, "micro_batches_in_flight": 1}
        if self.cluster:  # a worker keeps nothing of a window, so that all of a micro-batch is in one
            fixed = {"training_window": MOST_COUNT}
        return {**fixed, **self.scheduler}

    @property
    def plans_ahead(self) -> bool:
        """Tells whether the next step is planned while one runs. On the device's own processor that gains
        nothing: planning takes the time of computing."""
        is_elsewhere = self.executor == "remote" or self.ranks > 1 or self.device != "cpu"
        return is_elsewhere if self.async_scheduling is None else self.async_scheduling

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Settings of speculative decoding; None where there is none. Raises ConfigError."""
        return SpeculativeConfig.read(self.speculative_config)

    @property
    def swap_nbytes(self) -> int:
        """Bytes of the second tier of keys and values: none with several ranks, of which each would have its
        own when it comes back, or where a cluster has the pages. Raises ConfigError."""
        try:
            nbytes = read_size(str(self.swap_space))
            return nbytes if self.ranks == 1 and not self.cluster else 0
        except ConfigError as error:
            raise ConfigError(f"engine.swap_space: {error}") from error

    @property
    def pages(self) -> int:
        """Pages in the cache."""
        return -(-self.cache_tokens // self.page_size)

    @property
    def cluster_pages(self) -> int | None:
        """Pages that each worker of a cluster has of a block, where these are fewer than in the cache."""
        pages = -(-self.cluster_cache_tokens // self.page_size)
        return pages if self.cluster and 0 < pages < self.pages else None

    @property
    def sequence_pages(self) -> int:
        """Pages of one sequence, at most."""
        return self.cluster_pages or self.pages


@dataclass(frozen=True, slots=True)
class StitchedChain:
    """A chain of two bases of an engine, by their ids: the first layers of `first`, the stitching block in
    `folder`, the last layers of `second`."""

    folder: Path
    first: str
    second: str
