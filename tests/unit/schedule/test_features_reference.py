"""Features of a step beside a count of every row at every layer, and what margins and places remember."""

import random
from collections.abc import Iterator
from math import exp

import pytest

from coserve.core.plan import InferenceSegment, TrainingSegment
from coserve.core.sequence import Direction, Span
from coserve.schedule.features import Features
from coserve.schedule.margin import Margin
from coserve.schedule.places import TAKEN, Places

DEPTH = 5
ADAPTERS = (None, "a@1", "b@1", "job0@0")


def answers(draw: random.Random) -> Iterator[InferenceSegment]:
    for key in range(draw.randint(0, 4)):
        rows = draw.choice([1, 1, draw.randint(2, 30)])
        context, adapter = draw.randint(0, 40), draw.choice(ADAPTERS)
        yield InferenceSegment(
            key, context, rows, context, draw.randint(0, rows), adapter, (), draw.random() < 0.2
        )


def windows(draw: random.Random) -> Iterator[TrainingSegment]:
    ways = (Direction.TRAIN_FORWARD, Direction.BACKWARD, Direction.LOSS, Direction.LOGPROBS)
    for key in range(draw.randint(0, 5)):
        job, rows, way = f"job{draw.randint(0, 2)}", draw.randint(2, 30), draw.choice(ways)
        first = draw.randrange(DEPTH)
        span = Span(DEPTH, DEPTH + 1) if way.is_tail else Span(first, draw.randint(first + 1, DEPTH))
        yield TrainingSegment(key, job, f"{job}@0", 0, rows, draw.randint(1, 500), way, span, DEPTH)


def counted(
    inference: list[InferenceSegment],
    training: list[TrainingSegment],
    fills: list[tuple[int, int]],
    apart: bool,
) -> dict[str, float]:
    """The features by visiting: passes over each layer, rows at it, adapters that they pass there."""
    found = dict.fromkeys(Features().as_dict(), 0.0) | {"step": 1.0}
    there = [w for w in training if w.direction is Direction.TRAIN_FORWARD]
    adapters: dict[str, dict[str, int]] = {}  # by adapter and pass, its layers
    for given, rows in fills:
        if rows:
            for name in ("forward_layers", "prefill_layers"):
                found[name] += 1
            found["forward_rows"] += rows
            found["forward_attention"] += sum(given + row + 1 for row in range(rows))
    for one in inference:
        found["forward_rows"] += one.length
        found["tail_rows"] += one.tail_rows
        if one.length == 1:
            found["decode_context"] += one.context + 1
        else:
            found["forward_attention"] += sum(one.context + row + 1 for row in range(one.length))
        if one.adapter is not None:
            adapters.setdefault(one.adapter, {})["answers"] = DEPTH
    beside = apart and bool(inference)
    for layer in range(DEPTH):
        passes = [w for w in there if w.span.first <= layer < w.span.last]
        shares = bool(inference) or (bool(passes) and not beside)
        found["forward_layers"] += (shares + (beside and bool(passes))) / DEPTH
        prompts = any(one.length > 1 for one in inference)
        prefills = prompts or (bool(passes) and not beside)
        found["prefill_layers"] += (prefills + (beside and bool(passes))) / DEPTH
        for window in passes:
            found["window_rows"] += window.length / DEPTH
            found["forward_attention"] += window.pairs / DEPTH
        back = [
            w for w in training if w.direction is Direction.BACKWARD and w.span.first <= layer < w.span.last
        ]
        found["backward_rows"] += sum(window.length for window in back) / DEPTH
        found["backward_attention"] += sum(window.pairs for window in back) / DEPTH
        seen = set[str]()
        for window in back:  # another job's first window here shares the visit
            found["backward_layers"] += (not seen or window.job in seen) / DEPTH
            seen.add(window.job)
    for window in training:
        if window.direction.is_tail:
            found["loss_rows"] += window.length
        else:
            ways = adapters.setdefault(window.adapter, {})
            ways[str(window.key)] = window.span.last - window.span.first
    found["adapters"] = sum(max(ways.values()) / DEPTH for ways in adapters.values())
    return found


def test_features_are_what_rows_meet_at_each_layer() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(500):
        inference, training = [*answers(draw)], [*windows(draw)]
        fills = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(draw.randint(0, 2))]
        apart = draw.random() < 0.5
        features = Features()
        for given, rows in fills:  # as the builder counts them, before rows that need them
            features.add_fill(given, rows)
        for one in inference:
            features.add(one)
        for window in training:
            features.add_training(window, apart)
        want = counted(inference, training, fills, apart)
        assert features.as_dict() == pytest.approx(want), (inference, training, fills, apart)
        assert features.offloaded == sum(one.context for one in inference if one.offloaded)
        some = draw.randrange(1 << DEPTH)
        every = features.visits((1 << DEPTH) - 1)
        assert features.visits(some) + features.visits((1 << DEPTH) - 1 - some) == every


def test_margins_below_the_tail_are_plain_quantiles() -> None:
    draw = random.Random(7)
    for _ in range(50):
        margin, ratios = Margin(), [draw.uniform(0.8, 1.6) for _ in range(draw.randint(16, 256))]
        for ratio in ratios:
            margin.observe(ratio, trains=False)
        share = draw.uniform(0.1, 0.89)
        covered = 1.0 + margin.covering(share, trains=False)
        beyond = sum(ratio > covered for ratio in ratios) / len(ratios)
        # An exponential tail over the threshold: few samples, so a tenth of them on either side.
        assert abs((1.0 - share) - beyond) < 0.1 or covered == 1.0, (share, beyond)


def test_places_remember_arrivals_and_answers_of_late() -> None:
    draw = random.Random(11)
    for _ in range(50):
        places, now, began = Places(), 100.0, None
        events = list[tuple[float, str, int]]()
        times = list[float]()
        for _ in range(draw.randint(1, 60)):
            now += draw.expovariate(2.0)
            began = now if began is None else began
            kind, tokens = draw.choice(["arrived", "presses", "ended"]), draw.randint(1, 300)
            if kind == "ended":
                places.ended(now, tokens)
            else:
                places.arrived(now, presses=kind == "presses")
            events.append((now, kind, tokens))
            times.append(now)
        now += draw.uniform(0.0, 5.0)
        spans = zip([*times, now], [*times, now][1:], strict=False)
        elapsed = sum((after - before) * exp(-(now - after) / 10) for before, after in spans)

        def faded(*kinds: str, now: float = now, of: list[tuple[float, str, int]] = events) -> float:
            return sum(exp(-(now - at) / 10) for at, kind, _ in of if kind in kinds)

        tokens_ended = sum(exp(-(now - at) / 10) * count for at, kind, count in events if kind == "ended")
        rate = faded("arrived", "presses") / max(elapsed, 1.0)
        steps = (tokens_ended + 50.0) / (faded("ended") + 1.0)
        assert places.rate(now) == pytest.approx(rate)
        assert places.pressing_rate(now) == pytest.approx(faded("presses") / max(elapsed, 1.0))
        longest = TAKEN * 8 / (rate * steps) if rate else float("inf")
        assert places.longest_step(now, 8, 50.0) == pytest.approx(longest)
