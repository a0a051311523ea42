"""Fine-tuning against a scripted engine: what a test says that the engine did."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from coserve.wire.messages import (
    Fault,
    JobCheckpoint,
    JobEnded,
    JobNews,
    JobSpec,
    JobStarted,
    JobStep,
    Numbered,
    StopJob,
    WeighJob,
)
from serving import World

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


async def upload(world: World, key: str = "unused", examples: int = 30) -> str:
    """A training file's id."""
    data = jsonl(*[CHAT] * examples)
    return (await world.client(key).files.create(file=("chats.jsonl", data), purpose="fine-tune")).id


async def create(world: World, key: str = "unused", **more: Any) -> Any:
    """A job, on a file of its own unless `training_file` is given."""
    fields = {"model": "tiny", **more}
    if "training_file" not in fields:
        fields["training_file"] = await upload(world, key)
    return await world.client(key).fine_tuning.jobs.create(**fields)


def started(world: World) -> list[JobSpec]:
    return [command for command in world.engine.said if isinstance(command, JobSpec)]


def stopped(world: World) -> list[StopJob]:
    return [command for command in world.engine.said if isinstance(command, StopJob)]


def weighed(world: World) -> dict[str, float]:
    """The current weight of every job."""
    weights = {}
    for command in world.engine.said:
        if isinstance(command, JobSpec | WeighJob):
            weights[command.job] = command.weight
    return weights


class Trainer:
    """The training of an engine, told piece by piece."""

    def __init__(self, world: World) -> None:
        self.world, self.number = world, 0

    async def tell(self, *news: JobNews) -> None:
        """Returns when the server has taken it in and said so."""
        for piece in news:
            self.number += 1
            self.world.engine.tell(Numbered(self.number, piece))
        await self.world.until(lambda: not self.world.engine.news)

    async def start(self, job: str, step: int = 0, steps: int = 10, dropped: int = 0) -> None:
        await self.tell(JobStarted(job, step, steps, 30, 600, 0, dropped, 1, 3, 2e-4))

    async def step(self, job: str, step: int, loss: float = 0.5, tokens: int = 60, **figures: float) -> None:
        await self.tell(JobStep(job, step, loss, 40, tokens, 1.0, 2e-4, 2.0, metrics=figures))

    async def checkpoint(self, job: str, step: int, **figures: float) -> Path:
        spec = next(spec for spec in started(self.world) if spec.job == job)
        path = checkpoint_folder(Path(spec.folder), step, spec.attempt)
        await self.tell(JobCheckpoint(job, step, str(path), "digest", 0.5, 0.6, figures))
        return path

    async def end(self, job: str, status: str, step: int = 0, fault: Fault | None = None) -> None:
        await self.tell(JobEnded(job, status, step, fault))

    async def succeed(self, job: str, steps: int = 3) -> None:
        """A whole job."""
        await self.start(job, steps=steps)
        for step in range(1, steps + 1):
            await self.step(job, step, loss=1.0 / step)
        await self.checkpoint(job, steps)
        await self.end(job, "succeeded", steps)

    def folder(self, job: str) -> Path:
        return Path(next(spec.folder for spec in started(self.world) if spec.job == job))


def checkpoint_folder(folder: Path, step: int, attempt: int = 1) -> Path:
    """The files of a checkpoint, as an engine writes them."""
    path = folder / (f"step-{step:06d}" + f".{attempt}" * (attempt > 1))
    path.mkdir(parents=True)
    header = b"{}      "
    contents = {
        "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 8}).encode(),
        "adapter_model.safetensors": struct.pack("<Q", len(header)) + header + bytes(step + attempt - 1),
        "training.safetensors": b"moments",
        "training.json": b"{}",
    }
    files = {}
    for name, data in contents.items():
        (path / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return path
