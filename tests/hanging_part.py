"""A part of `make gpu` that finds something, and then hangs with a child of its own."""

import subprocess
import sys
import time

from coserve_benchmarks.gpu.log import PartLog


def run_bare(log: PartLog, device: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    log.figure("child", child.pid, "process")
    time.sleep(600)
