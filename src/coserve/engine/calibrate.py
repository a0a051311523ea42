"""Measures what a step costs on this machine, by running steps that answer nobody."""

from collections.abc import Iterator
from itertools import count

from coserve.adapters.bank import AdapterBank
from coserve.adapters.methods.lora import LoRAConfig
from coserve.core.plan import Plan, Segment
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.engine.runner import LocalRunner
from coserve.schedule.cost import Features
from coserve.train.example import Example
from coserve.train.trainer import TrainingConfig, TrainingRun, fresh_adapter

Sample = tuple[Features, float]

_JOB = "calibration"
_ROUNDS = 3  # of every step the quickest counts: whatever else the machine did only ever made it slower
_DECODE = ((1, 32), (4, 256), (16, 64), (16, 256))  # (sequences, cached tokens of each)
_PREFILL = ((1, 32), (1, 128), (1, 256), (8, 32))  # (sequences, prompt tokens of each)
_WINDOWS = ((1, 32), (1, 128), (1, 256), (8, 32))  # (examples, tokens of each); few long ones attend more
_KEYS = count(-1, -1)  # never a scheduler's


def measure(runner: LocalRunner, page_size: int, pages: int, positions: int) -> list[Sample]:
    """(features, seconds) of decode, prefill, training and mixed steps; nothing of them remains.

    Some hundred steps: about a second on a small model, eight on 255M parameters and two cores. Runs
    before the engine serves anybody, because it writes into the pages it likes.
    """
    probe = _Probe(runner, page_size)
    limit = min(pages * page_size, positions) - 2
    rounds = [[*_inference(probe, limit), *_training(probe, limit)] for _ in range(_ROUNDS)]
    return [(same[0][0], min(seconds for _, seconds in same)) for same in zip(*rounds, strict=True)]


class _Probe:
    """Runs one-off plans and times them."""

    def __init__(self, runner: LocalRunner, page_size: int) -> None:
        self.runner = runner
        self.page_size = page_size

    def run(self, plan: Plan) -> Sample:
        features = Features.of(plan)
        return features, self.runner.run(plan).seconds

    def sequence(self, tokens: int, answered: int, first_page: int) -> Sequence:
        """A sequence whose first tokens count as computed; pages from `first_page` on."""
        request = Request("calibration", (0,) * (tokens - answered), SamplingParams(seed=0))
        sequence = Sequence(next(_KEYS), request, output=[0] * answered)
        needed = -(-(tokens + 1) // self.page_size)
        sequence.pages = list(range(first_page, first_page + needed))
        return sequence


def _inference(probe: _Probe, limit: int) -> Iterator[Sample]:
    depth = Span(0, probe.runner.base.depth)
    for batch, context in (*_DECODE, *_PREFILL):
        pages = -(-(context + 1) // probe.page_size)
        if batch * pages * probe.page_size > limit or batch > probe.runner.table.capacity:
            continue
        answered = 1 if (batch, context) in _DECODE else 0
        answers = [probe.sequence(context, answered, i * pages) for i in range(batch)]
        start, rows = (context - 1, 1) if answered else (0, context)
        segments = tuple(Segment(a, start, rows, Direction.INFER, depth) for a in answers)
        yield probe.run(Plan(inference=segments))
        probe.runner.run(Plan(released=tuple(a.key for a in answers)))


def _training(probe: _Probe, limit: int) -> Iterator[Sample]:
    runner, base = probe.runner, probe.runner.base
    bank = AdapterBank()
    half = max(1, base.depth // 2)
    for batch, rows in _WINDOWS:
        if rows > limit:
            continue
        examples = [Example(tokens=(0,) * rows, labels=(0,) * rows)] * batch
        config = TrainingConfig(learning_rate=1e-30, batch_size=batch)
        run = TrainingRun(
            base, bank, _JOB, fresh_adapter(base, _JOB, LoRAConfig(), 0), examples, config, runner.arena
        )
        runner.runs[_JOB] = run
        (micro_batch,) = run.next_step(_KEYS)
        yield from _there_and_back(probe, micro_batch, batch * rows, half)
        yield probe.run(Plan(updates=(_JOB,)))
        del runner.runs[_JOB]


def _there_and_back(probe: _Probe, micro_batch: MicroBatch, rows: int, half: int) -> Iterator[Sample]:
    """One window forward in two spans, the first beside a decoding sequence, the tail, and back in two."""
    answer = probe.sequence(64, 1, 0)
    depth = probe.runner.base.depth
    inference: tuple[Segment, ...] = (Segment(answer, 63, 1, Direction.INFER, Span(0, depth)),)
    while not micro_batch.done:
        span = micro_batch.next_span(depth if micro_batch.is_put_down else half)
        segment = Segment(micro_batch, 0, rows, micro_batch.direction, span)
        yield probe.run(Plan(inference=inference, training=(segment,)))
        micro_batch.advance(0, rows, span)
        inference = ()
    probe.runner.run(Plan(released=(answer.key,)))
