"""Row `restart.ready_s`: time until a server whose engine was killed is ready again."""

import time
from statistics import median

import numpy as np

from coserve_benchmarks.intervals import interval
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.served import Served, Victim
from coserve_benchmarks.timing import ratio_of


def run(bench: Bench, served: Served) -> None:
    """Kills the engine of an idle server, as often as the settings say."""
    away, loading = [], []
    for _ in range(bench.settings.restarts):
        served.wait_standby()
        engine = served.running.engine
        killed = served.kill(Victim.ENGINE)
        served.wait_ready(without={engine})
        away.append(time.monotonic() - killed)
        loading.append(served.load_seconds)
    results = bench.results
    results.figure("restart.load_s", median(loading), "seconds", interval(np.median, loading))
    beyond = [whole - load for whole, load in zip(away, loading, strict=True)]
    results.figure("restart.beyond_load_s", median(beyond), "seconds", interval(np.median, beyond))
    results.raise_bar("restart.ready_s", median(loading))
    note = "from kill -9 of the engine to ready; the bar is 5 s and the model's own loading time"
    results.ratio("restart.ready_s", ratio_of(away), note)
