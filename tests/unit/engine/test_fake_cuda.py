"""Engines on a GPU that is not there (`fake_cuda.py`), in a process of their own, whose torch they change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forking import forked

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[2]
CASES = "fake_cuda_cases.py"

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="torch's table of device guards is found on Linux"),
]


def run(*names: str, script: str = CASES) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(TESTS), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", Path(script).stem, *names]
    with forked():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [line.rpartition(" in ")[0] for line in done.stdout.splitlines() if " in " in line] == list(names)


def test_steps_have_their_tensors_on_one_device() -> None:
    """Answers of adapters of several methods and all kinds of sampling, and jobs of several methods; then by
    the policy `spatial`, whose training goes on beside several steps of answers and waits where memory
    crosses."""
    run("llama", "spatial")


def test_a_missed_wait_between_streams_is_found_and_a_right_one_is_none() -> None:
    run("streams", script="fake_cuda_streams.py")


def test_moves_between_the_host_and_the_device_are_waited_for() -> None:
    """Blocks of a streamed base, keys and values of long prompts, pages of preempted sequences. How much of a
    base stays in a GPU's memory is found as on a processor."""
    run("moves", script="fake_cuda_moves.py")


@pytest.mark.slow
def test_a_layer_takes_few_kernels() -> None:
    """A decode step of 32 rows at an 8B shape, by modules and by fused layers, with adapters and without."""
    run(script="fake_cuda_kernels.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "calibrated",
        "8bit",
        "int8 cache",
        "gemma2",
        "gpt_oss",
        "deepseek_v3",
        "gpt2",
        "streamed",
        "streamed spatial",
    ],
)
def test_other_models_and_settings_have_their_tensors_on_one_device(name: str) -> None:
    run(name)
