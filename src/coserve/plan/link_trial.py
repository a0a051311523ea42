"""Measures the link between ranks that are processes of this machine."""

import multiprocessing
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import torch

from coserve.errors import ConfigError
from coserve.parallel.links import MEASURED, RankLink
from coserve.parallel.ranks import Rank, join

_REPEATS: Final = 15
_SIZES: Final = (1 << 10, 1 << 22)  # bytes of the tensors that are summed
_PATIENCE: Final = 120.0  # seconds for the processes to start, to import torch and to sum


def measured_link(count: int) -> RankLink:
    """The link between so many processes, from sums of few and of many bytes, as their slowest one finds it:
    medians, so that a process that was late once does not count. Raises ConfigError where they do not
    answer."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="coserve-ranks-") as folder, context.Pool(count) as pool:
        ranks = [Rank(number, count, f"{folder}/ranks") for number in range(count)]
        try:
            found = pool.map_async(_seconds, ranks, chunksize=1).get(_PATIENCE)
        except (multiprocessing.TimeoutError, RuntimeError) as error:
            raise ConfigError(f"--link {MEASURED}: {count} processes did not sum a tensor") from error
    few, many = (max(of_rank[place] for of_rank in found) for place in range(len(_SIZES)))
    rounds = 2 * (count - 1)  # of a sum in a ring
    rate = rounds * (_SIZES[1] - _SIZES[0]) / count / max(many - few, 1e-9)
    return RankLink(MEASURED, max(few / rounds - _SIZES[0] / count / rate, 0.0), rate)


def _seconds(rank: Rank) -> list[float]:
    """Seconds of a sum of each size, in one of the processes."""
    torch.set_num_threads(1)
    ranks, taken = join(rank, torch.device("cpu"), _PATIENCE), []
    for nbytes in _SIZES:
        x, times = torch.zeros(nbytes // 4), []
        for _ in range(_REPEATS):
            ranks.totals([0.0])  # they begin together
            began = time.perf_counter()
            ranks.sum(x)
            times.append(time.perf_counter() - began)
        taken.append(median(times))
    return taken
