"""BlockLLM's figures 16 and 18 to 26 (arXiv 2404.18322, 7.2 and 7.3): series that `bench draw` draws, of the
runs of `blockllm_cluster`.

A model of costs has neither accuracies nor outputs. In place of accuracy, figure 16 has the share of rows
that went through blocks of their own chain; and how similar an answer of figure 23 is follows from that share
as it does where both were measured (`SIMILARITIES`).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import cos, pi
from random import Random
from typing import Any, Final

from coserve.simulate.intervals import percentile
from coserve_benchmarks.simulation.clustered.setting import ClusterAsk, ClusterOutcome, ClusterSample
from coserve_benchmarks.simulation.papers.speculation import ChainFigures

Series = dict[str, list[Any]]
_POINTS: Final = 40  # of a distribution
_CALM: Final = 0.2  # of the peak's arrivals, at the beginning and the end of a rise
_GIGA: Final = 1e9
# The share of a full fine-tune's bytes that are its foundation's in place of its own, and the cosine of both
# vocabulary distributions: means over the four tasks at each step of their ladders, of `adaptive.chain.…` in
# docs/results/zoo.json (commit b187f5f236).
SIMILARITIES: Final = ((0.0, 1.0), (0.167, 0.972), (0.348, 0.923), (0.495, 0.742), (0.642, 0.660))


def distributions(kinds: Mapping[str, ClusterOutcome]) -> Series:
    """Figure 18: rows of (provision, share of the answers, seconds in which they were complete)."""
    shares = [point / _POINTS for point in range(_POINTS + 1)]
    rows = [
        [kind, share, percentile(one.latencies, share)] for kind, one in kinds.items() for share in shares
    ]
    return {"blockllm.fig18": rows}


def provisions(
    kinds: Mapping[str, ClusterOutcome], samples: Mapping[str, Sequence[ClusterSample]], devices: int
) -> Series:
    """Figure 19: rows of (provision, tokens/s, share of devices that compute). Figure 20: rows of (provision,
    seconds, share of devices that compute since the sample before). Figure 21: rows of (provision, mean GB of
    blocks, mean GB of pages)."""
    busy = [
        [kind, new.at, (new.computed - old.computed) / (new.at - old.at) / devices]
        for kind, own in samples.items()
        for old, new in pairwise(own)
    ]
    held = [
        [kind, *(sum(sizes) / len(own) / _GIGA for sizes in zip(*_nbytes(own), strict=True))]
        for kind, own in samples.items()
    ]
    return {
        "blockllm.fig19": [[kind, one.rate, one.busy] for kind, one in kinds.items()],
        "blockllm.fig20": busy,
        "blockllm.fig21": held,
    }


def _nbytes(samples: Sequence[ClusterSample]) -> list[tuple[int, int]]:
    return [(one.block_nbytes, one.page_nbytes) for one in samples]


def growth(blocks: Mapping[int, ClusterOutcome], models: Mapping[int, ClusterOutcome]) -> Series:
    """Figure 22: rows of (applications, throughput over that of per-model provisioning, 95th percentile over
    that of it)."""
    rows = [
        [count, one.rate / models[count].rate, _p95(one) / _p95(models[count])]
        for count, one in blocks.items()
    ]
    return {"blockllm.fig22": rows}


def ablations(
    dispatch: Mapping[str, ClusterOutcome],
    placements: Mapping[str, ClusterOutcome],
    chains: Sequence[ChainFigures],
) -> Series:
    """Figures 24 and 26: rows of (policy, median seconds, 95th percentile, tokens/s, seconds of transfers).
    Figure 25: rows of (speculation, median seconds, 95th percentile, tokens/s)."""
    names = ("none", "surrogates", "ideal")
    return {
        "blockllm.fig24": [[name, *_outcome(one)] for name, one in dispatch.items()],
        "blockllm.fig25": [
            [name, one.p50, one.p95, one.rate] for name, one in zip(names, chains, strict=True)
        ],
        "blockllm.fig26": [[name, *_outcome(one)] for name, one in placements.items()],
    }


def adaptation(samples: Sequence[ClusterSample], asks: Sequence[ClusterAsk]) -> Series:
    """Figure 16: rows of (seconds, requests a second, share of rows through blocks of their own chain), of
    the time between two samples; times in which nothing passed are left out."""
    rows = list[Any]()
    for old, new in pairwise(samples):
        own, others = new.own_rows - old.own_rows, new.stand_in_rows - old.stand_in_rows
        come = sum(old.at <= ask.at < new.at for ask in asks)
        if own + others:
            rows.append([new.at, come / (new.at - old.at), own / (own + others)])
    return {"blockllm.fig16": rows}


def similarity_of(replaced: float) -> float:
    """The similarity of an answer with such a share of stand-ins, by `SIMILARITIES`, of which the last holds
    for larger shares too."""
    for (x, y), (u, v) in pairwise(SIMILARITIES):
        if replaced <= u:
            return y + (v - y) * (replaced - x) / (u - x)
    return SIMILARITIES[-1][1]


def similarities(loads: Mapping[float, ClusterOutcome]) -> Series:
    """Figure 23: rows of (requests a second, share of the answers that are adapted, share of these, their
    similarity), ascending."""
    rows = list[Any]()
    for rate, one in loads.items():
        found = sorted(similarity_of(share) for share in one.stood_in if share > 0.0)
        adapted = len(found) / len(one.stood_in)
        rows += [[rate, adapted, (n + 1) / len(found), value] for n, value in enumerate(found)]
    return {"blockllm.fig23": rows}


def rising(asks: Sequence[ClusterAsk], seconds: float, seed: int = 1) -> list[ClusterAsk]:
    """The part of steady arrivals that stays where the rate rises to them and falls again in `seconds`."""
    draw = Random(seed)
    heights = (_CALM + (1 - _CALM) * (1 - cos(2 * pi * ask.at / seconds)) / 2 for ask in asks)
    return [ask for ask, height in zip(asks, heights, strict=True) if draw.random() < height]


def _outcome(one: ClusterOutcome) -> tuple[float, ...]:
    return percentile(one.latencies, 0.5), _p95(one), one.rate, one.sent_seconds


def _p95(one: ClusterOutcome) -> float:
    return percentile(one.latencies, 0.95)
