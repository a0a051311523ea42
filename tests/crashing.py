"""Faults that bring an engine's process down, for tests. Python imports the module by itself where it is
`sitecustomize.py` in a folder of PYTHONPATH; the product knows nothing of it.

A prompt that begins with `POISON`, a session's pass whose first datum does, the seed of a job and the
revision of an adapter file name one of `FAULTS`. It strikes in the engine's loop, in the middle of the
answer, the pass or the job, or on the thread that looks at the file, where nothing that contains the errors
of one tenant's work catches it.
"""

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = ("segfault", "hang", "exception")
POISON = 7  # the first token; then come the fault's place in FAULTS and the length of the answer at that time
SEED = 700  # of a job, before the fault's place is added
MARK = "crash-"  # before a fault's name: in an adapter file's `revision`
STEPS = 2  # of a job before it crashes
_ENGINE = "coserve.engine.engine"


def strike(fault: str) -> None:
    """Ends this process, or stops all of its threads for good."""
    match fault:
        case "exception":
            raise ZeroDivisionError("what nobody foresaw")
        case "hang":
            ctypes.PyDLL(None).sleep(3600)  # and holds the interpreter's lock
        case "segfault":
            ctypes.string_at(0)


def spoil(module: ModuleType) -> None:
    """Makes the engine of this module one that can be brought down."""
    engine: Any = module.Engine
    step: Callable[[Any], Any] = engine.step
    jobs: Any = module.Training
    start: Callable[..., Any] = jobs.start
    adapters: Any = module.EngineAdapters
    look: Callable[..., Any] = adapters.look_at

    def step_or_strike(self: Any) -> Any:
        for completion in list(self.completions.values()):
            match completion.sequence.request.prompt:
                case (first, fault, place, *_) if first == POISON and len(completion.tokens) >= place:
                    strike(FAULTS[fault])
        for session in self.sessions._sessions.values():
            work = getattr(session.current, "work", None)
            match () if work is None else work.data[0].tokens:
                case (first, fault, *_) if first == POISON:
                    strike(FAULTS[fault])
        for job in list(self.jobs.values()):
            if job.fault and len(job.history) >= STEPS:
                strike(job.fault)
        return step(self)

    def noted(self: Any, prepared: Any, *rest: Any) -> Any:
        job = start(self, prepared, *rest)
        place = prepared.config.seed - SEED
        job.fault = FAULTS[place] if 0 <= place < len(FAULTS) else ""
        return job

    def look_or_strike(self: Any, name: str, folder: Any, *rest: Any) -> Any:
        revision = json.loads((Path(folder) / "adapter_config.json").read_bytes()).get("revision")
        if isinstance(revision, str) and revision.startswith(MARK):
            strike(revision.removeprefix(MARK))
        return look(self, name, folder, *rest)

    engine.step, jobs.start, adapters.look_at = step_or_strike, noted, look_or_strike


class Spoiler(MetaPathFinder):
    """Spoils the engine's module as soon as it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _ENGINE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def spoilt(module: ModuleType) -> None:
            execute(module)
            spoil(module)

        spec.loader.exec_module = spoilt  # type: ignore[method-assign]
        return spec


if "coserve.wire.launch" in sys.orig_argv:  # children of a server only
    if _ENGINE in sys.modules:  # they were forked
        spoil(sys.modules[_ENGINE])
    else:
        sys.meta_path.insert(0, Spoiler())
