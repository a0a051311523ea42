"""The single checks of `coserve doctor`. None of them leaves anything behind."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from coserve.core.control_group import usable_processors
from coserve.core.masking import masked
from coserve.errors import ConfigError, CoserveError, StateError
from coserve.memory.budget import process_capacity
from coserve.serve.processes.claim import find_running
from coserve.serve.settings import ServerSettings
from coserve.serve.store.examine import examine

LEAST_PYTHON = (3, 11)
STATE = "state folder"
SCRATCH = "scratch folder"
LITTLE_MEMORY = 4e9  # bytes; the embedded model needs far less, a small real one more
LITTLE_DISK = 2e9  # bytes
MATRIX_UNITS = ("amx_bf16", "avx512_bf16", "avx10", "bf16")  # as Linux calls them on x86 and on ARM
EXTRAS = {
    "peft": "pip install 'coserve[bench]' (comparisons in the bench)",
    "matplotlib": "pip install 'coserve[bench]' (pictures of the bench)",
    "openai": "pip install openai (OpenAI's own client)",
    "triton": "pip install 'coserve[triton]' (kernels for CUDA devices)",
}


class Level(StrEnum):
    """Outcome of a check. NOTE is informational; with BROKEN coserve cannot run."""

    GOOD = "good"
    NOTE = "note"
    LACKING = "lacking"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One checked item (`what`), its finding, and advice."""

    what: str
    level: Level
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", masked(self.found))


def run_checks(settings: ServerSettings) -> list[Check]:
    """Runs all checks for a server with these settings. Imports torch, which takes seconds."""
    return [
        _python(),
        _system(),
        _processor(),
        _memory(),
        *_torch(),
        *_kernels(),
        _package("transformers", Level.BROKEN, "pip install transformers"),
        *_state_folder(settings),
        *_scratch(settings),
        _address(settings),
        *(_package(name, Level.NOTE, advice) for name, advice in EXTRAS.items()),
    ]


def _python() -> Check:
    found = platform.python_version()
    if sys.version_info[:2] < LEAST_PYTHON:
        return Check("python", Level.BROKEN, found, "install Python 3.11 or newer")
    return Check("python", Level.GOOD, found)


def _system() -> Check:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if os.name != "posix":
        return Check("system", Level.BROKEN, found, "the server needs Unix sockets: use Linux or macOS")
    return Check("system", Level.GOOD, found)


def _processor() -> Check:
    threads = usable_processors()
    units = [name for name in MATRIX_UNITS if name in _processor_flags()]
    found = f"{threads} threads, {'bfloat16 units: ' + ', '.join(units) if units else 'no bfloat16 units'}"
    if units:
        return Check("processor", Level.GOOD, found)
    return Check("processor", Level.LACKING, found, "serve on this processor with --dtype float32")


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    named = (line.partition(":") for line in lines)
    return {flag for key, _, flags in named if key.strip() in ("flags", "Features") for flag in flags.split()}


def _memory() -> Check:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Check("memory", Level.NOTE, "this system does not tell")
    limit = process_capacity().total
    found = f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB unused"
    if limit < total:
        found += f", this process may use {limit / 1e9:.1f} GB"
    if limit < LITTLE_MEMORY:
        return Check("memory", Level.LACKING, found, "enough for the embedded model; others need more")
    return Check("memory", Level.GOOD, found)


def _torch() -> Iterator[Check]:
    if find_spec("torch") is None:
        yield Check("torch", Level.BROKEN, "not installed", "pip install torch")
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", Level.GOOD, f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Check(f"cuda:{index}", Level.GOOD, f"{device.name}, {device.total_memory / 1e9:.0f} GB")
    elif Path("/dev/nvidiactl").exists():
        yield Check("cuda", Level.LACKING, "an NVIDIA device, not usable", "install torch's CUDA build")
    else:
        yield Check("cuda", Level.NOTE, "no device: coserve runs on the processor")


def _kernels() -> Iterator[Check]:
    """Tells whether this machine has compiled kernels for its processor. Compiles none."""
    if find_spec("torch") is None:
        return
    from coserve.kernels.native.build import find_problem

    if not (problem := find_problem()):
        yield Check("kernels", Level.GOOD, "compiled here, at the first start")
        return
    advice = "torch computes in their place, and takes longer; gcc compiles them at the next start"
    yield Check("kernels", Level.LACKING, problem, advice)


def _package(name: str, lack: Level, advice: str) -> Check:
    """Checks for a package; without it the outcome is `lack`."""
    try:
        return Check(name, Level.GOOD, version(name))
    except PackageNotFoundError:
        return Check(name, lack, "not installed", advice)


def _state_folder(settings: ServerSettings) -> Iterator[Check]:
    folder = settings.state
    there = _existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Check(STATE, Level.BROKEN, f"{folder} cannot be written", "choose another with --state")
        return
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if free < LITTLE_DISK:
        yield Check(STATE, Level.LACKING, found, "checkpoints need room: choose another with --state")
    else:
        yield Check(STATE, Level.GOOD, found)
    try:
        if settings.database:
            from coserve.serve.store.opening import open_database

            open_database(folder, settings.database).close()
            yield Check("database", Level.GOOD, "PostgreSQL answers, and has this version's tables")
        else:
            examine(settings.database_file)
    except (StateError, ConfigError) as error:
        what, _, advice = str(error).partition("; ")
        yield Check("database", Level.BROKEN, what, advice)
    running = find_running(folder)
    if running is not None:
        yield Check("server", Level.NOTE, f"process {running.pid} serves from there on {running.url}")


def _scratch(settings: ServerSettings) -> Iterator[Check]:
    """Checks the disk from which a base larger than memory would be read."""
    if find_spec("torch") is None:
        return
    from coserve.streamed.scratch import file_system_of, is_in_memory
    from coserve.streamed.trial import folder_rate

    folder = Path(settings.engine.scratch or settings.scratch)
    there = _existing(folder)
    kind, free = file_system_of(str(there)) or "a file system of unknown kind", shutil.disk_usage(there).free
    found = f"{folder}, {kind}, {free / 1e9:.1f} GB free"
    if is_in_memory(str(there)):
        yield Check(SCRATCH, Level.LACKING, found, "no base is streamed from memory: set engine.scratch")
    elif free < LITTLE_DISK:
        yield Check(SCRATCH, Level.LACKING, found, "a streamed base may need room: set engine.scratch")
    else:
        try:
            rate = folder_rate(str(there))
        except CoserveError as error:
            yield Check(SCRATCH, Level.LACKING, str(error), "choose another: set engine.scratch")
        else:
            yield Check(SCRATCH, Level.GOOD, f"{found}, read at {rate / 1e9:.2f} GB/s")


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _address(settings: ServerSettings) -> Check:
    what = f"port {settings.port}"
    running = find_running(settings.state)
    if running is not None and running.url.endswith(f":{settings.port}"):
        return Check(what, Level.NOTE, "taken by the server that runs")
    try:
        with socket.create_server((settings.host, settings.port)):
            return Check(what, Level.GOOD, f"free on {settings.host}")
    except OSError as error:
        reason = error.strerror or str(error)
        return Check(what, Level.LACKING, f"{settings.host}: {reason}", "choose another with --port")
