"""Modules that one prompt, and one training job, are handed to between a route and the device:
python tests/shape/passed.py prints them.

A server and an engine of the embedded model run in this process. While the only request, or job, is under way
every call of the package is looked at, on all threads. A module counts if one of its functions is called with
an argument that carries the request: its id, one of the types of a request, its rows in a plan or a result, a
piece of its answer, or a tensor, as no other work has any. Kernels are left out: which ones there are depends
on the machine.
"""

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx2
from counts import JOBS, REQUESTS, SOURCE

from coserve import tiny
from coserve.config import EngineConfig
from coserve.core.job_status import JobStatus
from coserve.engine.background import Background
from coserve.engine.engine import Engine
from coserve.engine.link import Inbox, Link
from coserve.engine.process import Loop, _hello
from coserve.engine.served_engine import ServedEngine
from coserve.serve.app import create_app
from coserve.serve.compose import build_state
from coserve.serve.settings import ServerSettings
from coserve.wire.control import EngineStart

# Types that carry some work of a step, or what comes of it.
STEP: Final = {"StepPlan", "BasePlan", "StepResult", "BaseResult", "Tensor"}
PROMPT: Final = STEP | {*REQUESTS, "ChatRequest", "InferenceSegment", "Sampled", "TokenEvent", "Token"}
PROMPT |= {"AnswerPiece"}
EXAMPLE: Final = STEP | {*JOBS, "MicroBatch", "MicroBatchStart", "TrainingSegment", "OptimStep", "Updated"}
EXAMPLE |= {"JobRequest", "Example", "Prepared", "JobStep", "StepDone"}
LESSON: Final = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SECONDS: Final = 120.0


class Watch:
    """Notes the modules whose functions are called with something that carries the work under way."""

    def __init__(self) -> None:
        self.carriers: set[str] | None = None  # names of types; None while nothing is noted
        self.prefix = "-"  # of the work's id
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """The profile function."""
        code = frame.f_code
        if self.carriers is None or event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        module = str(Path(code.co_filename).relative_to(SOURCE).with_suffix(""))
        if module in self.modules or module.startswith("kernels/"):
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(self._carries(frame.f_locals.get(name)) for name in given):
            self.modules.add(module)

    def _carries(self, value: Any) -> bool:
        if isinstance(value, list | tuple) and value:
            return self._carries(value[0])
        if isinstance(value, str):
            return value.startswith(self.prefix)
        return type(value).__name__ in (self.carriers or ())

    async def during(self, carriers: set[str], prefix: str, work: Callable[[], Awaitable[None]]) -> set[str]:
        """Modules that are handed a carrier during some work."""
        self.modules, self.prefix, self.carriers = set(), prefix, carriers
        await work()
        self.carriers = None
        return self.modules


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, Any]]:
    """A client of a server with an engine, both in this process, and the server's state."""
    model, socket = str(tiny.path()), folder / "engine.sock"
    config = EngineConfig(calibrate=False, scheduler={"interruptible": True})
    inbox, engine = Inbox(), Engine(model, config)
    inbox.pauses(engine.arrivals)
    hello = _hello(EngineStart(model, str(socket), config), engine, 0.0)
    loop = Loop(ServedEngine(engine, hello, Background(inbox)), inbox, lambda: None)
    Link(socket, inbox).start()
    threading.Thread(target=loop.run, daemon=True).start()
    (folder / "state").mkdir()
    settings = ServerSettings(model=model, state=folder / "state", name="tiny")
    async with build_state(settings, socket) as state:
        await state.link.wait_ready(SECONDS)
        transport = httpx2.ASGITransport(app=create_app(state))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, state


async def main() -> None:
    watch = Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    async with serving(Path(tempfile.mkdtemp())) as (http, state):
        asked = {"model": "tiny", "messages": LESSON["messages"][:1], "max_tokens": 4, "seed": 1}
        data = "\n".join([json.dumps(LESSON)] * 2)
        upload = {"file": ("lessons.jsonl", data.encode())}
        sent = await http.post("/v1/files", files=upload, data={"purpose": "fine-tune"})
        wanted = {"model": "tiny", "training_file": sent.json()["id"], "hyperparameters": {"n_epochs": 1}}

        async def answer() -> None:
            assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200

        async def train() -> None:
            made = (await http.post("/v1/fine_tuning/jobs", json=wanted)).json()
            latest = time.monotonic() + SECONDS
            while (job := await state.store.jobs.get("local", made["id"])).status is not JobStatus.SUCCEEDED:
                assert time.monotonic() < latest and not job.status.is_final, job.error
                await asyncio.sleep(0.05)

        await answer()  # what is made once is made
        prompt = await watch.during(PROMPT, "chatcmpl-", answer)
        example = await watch.during(EXAMPLE, "ftjob-", train)
    sys.setprofile(None)
    print(json.dumps({"prompt": sorted(prompt), "example": sorted(example)}, indent=1), flush=True)
    os._exit(0)  # the engine's loop has no end


if __name__ == "__main__":
    asyncio.run(main())
