"""Seconds of passes, slices and optimizer steps on a GPU, interpolated between those that were measured."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Final

from coserve.core.plan import BasePlan, InferenceSegment
from coserve.core.request import Request
from coserve.core.row_buckets import graph_rows
from coserve.core.sequence import Direction, Sequence
from coserve.schedule.cost import CostModel, Costs
from coserve.schedule.reads import ReadCosts
from coserve.schedule.segments import causal_pairs, inference_plan
from coserve.simulate.times import Times, probes

Points = tuple[tuple[int, float], ...]  # (rows, milliseconds), in ascending order of rows

# Of an H200 with the 8B shape (docs/results/gpu.md), milliseconds.
LAYERS: Final = 32
# `decode.step`, by graph, with 512 cached tokens each.
_DECODE: Final[Points] = ((1, 6.56), (8, 6.77), (32, 7.52), (128, 11.0), (256, 17.0))
_CACHED: Final = 512
_ATTEND: Final = 0.945 / (32 * 512)  # `_attend` of the profile: a cached token of a decode row
# `prefill` from 2,048 rows on. Smaller prompts took 44 ms, which Python took to launch their kernels; these
# are the 8 and 14 ms that graphs of them are to take. Nobody has measured those graphs yet.
_PASS: Final[Points] = ((1, 6.56), (128, 8.0), (512, 14.0), (2048, 51.2), (4096, 99.3), (8192, 198.0))
# (`prefill[1x8192]` - `prefill[4x2048]`) over the pairs that one has beyond the other.
_PAIR: Final = (260.0 - 198.0) / (causal_pairs(0, 8192) - 4 * causal_pairs(0, 2048))
# `training[everything].rate` is 13,267 tokens/s in windows of 4,096 rows, so these take 308.7 ms there, loss
# and way back: the head at the rate of other products, an optimizer step of two windows, and the rest.
_LOSS: Final = 4e-3
_UPDATE: Final = 2.0
_WINDOW: Final = 4096
_BACK: Final = (_WINDOW / 13.267 - 99.3 - _WINDOW * _LOSS - _UPDATE / 2) / 99.3  # times the way forward
_LAUNCHING: Final = 44.0  # of a pass from Python
_FEW: Final = 32  # rows of the one window that shares a pass with answers as the cost model is fitted
_MILLI: Final = 1e-3


class GpuTimes(Times):
    """Seconds of an H200 with the 8B shape, whose scheduler knows what calibration would have found: weights
    fitted to probes.

    Rows of answers pass by graph, those of prompts padded to the graph's, alone or with decode rows. Windows
    pass by graph, too, each alone and padded; what shares a pass with one is launched. A slice takes its
    layers' share of a pass.
    """

    layers = LAYERS
    host = 0.0
    read_costs = ReadCosts()

    def predict(self, plan: BasePlan) -> float:
        """See `Times`."""
        decodes = [segment for segment in plan.inference if segment.length == 1]
        prompts = [segment for segment in plan.inference if segment.length > 1]
        seconds = _attention(decodes) + sum(map(_prompt_attention, prompts))
        rows, fused = sum(segment.length for segment in prompts), plan.fused
        if (rows and not plan.passes.decodes_apart) or fused:
            rows += len(decodes)
        else:
            seconds += _at(_DECODE, len(decodes)) - _ATTEND * _CACHED * len(decodes)
        seconds += _launched(rows) if fused else _graphed(rows)
        there = Counter[int]()  # rows of windows by layer, which share a pass with `rows` of answers
        for window in plan.training:
            if window.direction.is_tail:
                seconds += _LOSS * window.length
            elif window.direction is Direction.BACKWARD:
                seconds += _BACK * len(window.span) / LAYERS * _graphed(window.length)
            elif not fused:
                seconds += len(window.span) / LAYERS * _graphed(window.length)
            else:
                there.update(dict.fromkeys(range(window.span.first, window.span.last), window.length))
        for here in there.values():
            seconds += (_launched(rows + here) - _launched(rows)) / LAYERS
        return (seconds + _UPDATE * len(plan.updates)) * _MILLI

    def computed(self, plan: BasePlan) -> float:
        """See `Times`."""
        return self.predict(plan)

    def known(self) -> CostModel:
        """See `Times`."""
        model = CostModel()
        model.recall(self._learned)
        model.graphs = True
        return model

    @cached_property
    def _learned(self) -> Costs:
        model = CostModel()
        model.graphs = True
        # Launching hides behind a large window's products, and is all that a small one takes.
        alone = (plan for plan in probes(LAYERS) if not plan.fused or plan.training[0].length <= _FEW)
        model.fit((plan, self.predict(plan)) for plan in (*alone, *map(_mixed, (64, 512, 2048))))
        return model.learned


def _mixed(rows: int) -> BasePlan:
    """A prompt of so many rows beside decode rows."""
    asked = Request("calibration", (0,) * max(rows, _CACHED))
    decodes = [(Sequence(-2 - place, asked), _CACHED - 1, 1) for place in range(32)]
    return inference_plan([*decodes, (Sequence(-1, asked), 0, rows)])


def _attention(decodes: Iterable[InferenceSegment]) -> float:
    """Milliseconds of decode rows' attention to what is cached."""
    return _ATTEND * sum(segment.context + 1 for segment in decodes)


def _prompt_attention(prompt: InferenceSegment) -> float:
    """Milliseconds of a prompt's attention beyond that in prompts of 2,048 rows, which a pass has."""
    beyond = causal_pairs(prompt.context, prompt.length) - causal_pairs(0, 2048) * prompt.length / 2048
    return _PAIR * max(beyond, 0.0)


def _graphed(rows: int) -> float:
    """Milliseconds of a pass by the smallest graph that holds it; of one that none holds it is the same per
    row."""
    return _at(_PASS, rows and (graph_rows(rows) or rows))


def _launched(rows: int) -> float:
    """Milliseconds of a pass that Python launches, kernel by kernel."""
    return max(_at(_PASS, rows), _LAUNCHING if rows else 0.0)


def _at(points: Points, rows: int) -> float:
    """Milliseconds at a number of rows: between two points on the line through them, beyond the last one on
    that of the last two; none for no rows."""
    if not rows:
        return 0.0
    place = min(max(bisect_left(points, rows, key=lambda point: point[0]), 1), len(points) - 1)
    (low, least), (high, most) = points[place - 1], points[place]
    return least + (most - least) * (rows - low) / (high - low)
