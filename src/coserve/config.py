"""Settings of an engine. Frozen: changing one gives a new object."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coserve.core.size import read_memory, read_size
from coserve.errors import ConfigError

MOST_THREADS: Final = 1024  # that compute


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine: its device, number formats, memory and scheduling."""

    dtype: str = "auto"  # float32, bfloat16, float16, float64, or what the model was saved in
    quantize: str = "none"  # bits of the base's weights: 8bit halves their bytes, 4bit thirds them; both err
    device: str = "cpu"  # or cuda, cuda:1, ...
    # Addresses of base executors that compute the base's linears, separated by commas; empty: none.
    base: str = ""
    base_patience: float = 5.0  # seconds that a step waits for one that went away, before all work waits
    # How executors at tls: addresses are known: certificates in PEM that may have signed theirs (empty: the
    # system's), or the SHA-256 of the one that an executor has; several pins are for the addresses in order.
    base_ca: str = ""
    base_pin: str = ""
    base_certificate: str = ""  # this engine's own in PEM, where executors ask their clients for one
    base_key: str = ""  # its private key in PEM, where the certificate's file has none
    # What executors may see of rows: none hides nothing, noise obfuscates, with shares two parties see random
    # numbers; the first half of the addresses is then one party's, the second half the other's.
    base_privacy: str = "none"
    threads: int = 0  # that compute; 0: one for each processor that the system and its control group allow
    executor: str = "local"  # runs steps in this process; remote: in one of its own, reached over sockets
    async_scheduling: bool | None = None  # plans a step while one runs; None: if the executor is remote
    cache_tokens: int = 32768  # keys and values held at once, over all sequences; costs bytes from the start
    page_size: int = 16  # tokens in a page of that cache; smaller wastes less, larger gathers faster
    cache_dtype: str = "auto"  # that of the model, or int8: half of bfloat16's bytes, a little less exact
    max_running: int = 64  # sequences that run at once; more wait
    # For keys and values of sequences that lose their pages, where reading them takes less than computing
    # them again: a file on a CPU, the host's memory on a GPU. 0: none.
    swap_space: str | int = "4GiB"
    # Seconds that a request which allows approximations may wait for a more accurate one, under load.
    approximation_delay: float = 0.1
    prefix_sharing: bool = True  # what prompts have in common is computed once; never across scopes
    memory: str | int | float = "auto"  # for everything: "6GiB", a share (0.5), or most of what is free
    # Of it, for the base's weights: a base that needs more is read from disk for each pass, but for the part
    # that fits. auto: a base that is larger than all of memory has half of it.
    base_memory: str | int | float = "auto"
    adapter_memory: str | int | float = "auto"  # of it, for stored adapters: bytes, a share, or what is free
    offload: bool = False  # moments of AdamW rest in slower memory between steps: the host's, or a file
    scratch: str = ""  # folder of such files; empty: the system's for temporary ones
    policy: str = "hybrid"  # how training is fitted between answers: a name, or name:options
    policy_options: dict[str, Any] = field(default_factory=dict)  # its options, by their names
    scheduler: dict[str, Any] = field(default_factory=dict)  # other fields of schedule.SchedulerConfig
    calibrate: bool = True  # measure the cost model at start-up (seconds); else start from a guess
    seed: int = 0  # of what is drawn for requests that bring no seed of their own
    deterministic: bool = False  # the same bits whatever else runs, on one machine and thread count; slower
    # Hosts that graders of jobs (`train/grading/http.py`) may reach although their addresses are not public.
    grader_hosts: tuple[str, ...] = ()
    # What spells a control token in prompts, messages and training data is that token; else it is text.
    allow_special_tokens: bool = False
    max_chat_turns: int = 2048  # messages of one chat, in requests and in training data
    # Characters of one record of training data; None: 128 for each position of the model, 1 Mi at least.
    max_text_characters: int | None = None

    def __post_init__(self) -> None:
        for name in ("cache_tokens", "page_size", "max_running", "max_chat_turns", "max_text_characters"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"engine.threads must be at most {MOST_THREADS}, or 0, not {self.threads}")
        if not self.approximation_delay >= 0:
            raise ConfigError(
                f"engine.approximation_delay must be at least 0 seconds, not {self.approximation_delay}"
            )
        _ = self.swap_nbytes
        read_memory(self.memory)
        read_memory(self.adapter_memory, "adapter_memory")
        read_memory(self.base_memory, "base_memory")
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

    @property
    def scheduler_settings(self) -> dict[str, Any]:
        """Fields of `schedule.SchedulerConfig`. The deterministic mode fixes the size of training windows and
        the order in which gradients add up."""
        fixed = {"training_window": 128, "micro_batches_in_flight": 1} if self.deterministic else {}
        return {**fixed, **self.scheduler}

    @property
    def plans_ahead(self) -> bool:
        """Tells whether the next step is planned while one runs. On the device's own processor that gains
        nothing: planning takes the time of computing."""
        return self.executor == "remote" if self.async_scheduling is None else self.async_scheduling

    @property
    def swap_nbytes(self) -> int:
        """Bytes of the second tier of keys and values. Raises ConfigError."""
        try:
            return read_size(str(self.swap_space))
        except ConfigError as error:
            raise ConfigError(f"engine.swap_space: {error}") from error

    @property
    def pages(self) -> int:
        """Pages in the cache."""
        return -(-self.cache_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class StitchedChain:
    """A chain of two bases of an engine, by their ids: the first layers of `first`, the stitching block in
    `folder`, the last layers of `second`."""

    folder: Path
    first: str
    second: str
