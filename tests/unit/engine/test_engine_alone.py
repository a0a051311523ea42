"""The engine needs none of the server's packages."""

import os
import subprocess
import sys

SERVER = (
    "fastapi",
    "starlette",
    "sqlalchemy",
    "alembic",
    "uvicorn",
    "typer",
    "pydantic",
    "prometheus_client",
)
CODE = """
import sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ImportError(f"{name} is the server's")

sys.meta_path.insert(0, Blocked())
from coserve.engine.engine import Engine
from coserve import EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.train.example import Example
from coserve.workload.shapes import shape_named

engine = Engine(shape_named("tiny").build(), EngineConfig(calibrate=False, cache_tokens=256))
data = [Example((1, 2, 3, 4), (2, 3, 4, -100))]
job = engine.finetune(data, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=1))
answer = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=2, ignore_eos=True))
engine.run()
engine.generate([1, 2, 3], "mine", SamplingParams(max_tokens=2, ignore_eos=True)).result()
assert len(answer.tokens) == 2 and job.status == "succeeded"
print("answered and trained")
"""


def test_it_answers_and_trains_without_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *SERVER],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "answered and trained"
