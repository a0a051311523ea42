"""Features of a step beside a count of every row at every layer, and what margins and places remember."""

import random
from collections.abc import Iterator
from itertools import product
from math import exp

import pytest
from msgspec import structs

from coserve.core.plan import BasePlan, InferenceSegment, Passes, TrainingSegment
from coserve.core.row_buckets import GRAPHS
from coserve.core.sequence import Direction, Span
from coserve.schedule.cost import CostModel
from coserve.schedule.features import NAMES, Features
from coserve.schedule.places import TAKEN, Places
from coserve.schedule.step_costs import Margin

DEPTH = 5
ADAPTERS = (None, "a@1", "b@1", "job0@0")


def answers(draw: random.Random) -> Iterator[InferenceSegment]:
    for key in range(draw.randint(0, 4)):
        rows = draw.choice([1, 1, draw.randint(2, 30), draw.randint(2, 900)])
        context, adapter = draw.randint(0, 40), draw.choice(ADAPTERS)
        yield InferenceSegment(
            key, context, rows, context, draw.randint(0, rows), adapter, (), draw.random() < 0.2
        )


def windows(draw: random.Random) -> Iterator[TrainingSegment]:
    ways = (Direction.TRAIN_FORWARD, Direction.BACKWARD, Direction.LOSS, Direction.LOGPROBS)
    for key in range(draw.randint(0, 5)):
        job, rows, way = (
            f"job{draw.randint(0, 2)}",
            draw.randint(2, draw.choice([30, 900])),
            draw.choice(ways),
        )
        first = draw.randrange(DEPTH)
        span = Span(DEPTH, DEPTH + 1) if way.is_tail else Span(first, draw.randint(first + 1, DEPTH))
        yield TrainingSegment(key, job, f"{job}@0", 0, rows, draw.randint(1, 500), way, span, DEPTH)


Pass = tuple[list[InferenceSegment], list[TrainingSegment]]  # its segments, and its windows


def partitions(
    inference: list[InferenceSegment], training: list[TrainingSegment]
) -> Iterator[tuple[str, list[Pass]]]:
    """All ways to pass decode rows (d), prompts (p) and windows that go forward (w), with their passes."""
    rows = {kind: [one for one in inference if (one.length == 1) is (kind == "d")] for kind in "dp"}
    there = [w for w in training if w.direction is Direction.TRAIN_FORWARD]
    for way in ("dpw", "dp w", "d pw", "d p w", "dw p"):
        passes = way.split()
        of = [[one for kind in "dp" if kind in each for one in rows[kind]] for each in passes]
        yield way, [(one, there if "w" in each else []) for one, each in zip(of, passes, strict=True)]


def held(rows: int) -> int:
    """Rows of the smallest graph that holds so many, or as many."""
    return min((size for size in GRAPHS if size >= rows), default=rows)


def counted(
    inference: list[InferenceSegment],
    training: list[TrainingSegment],
    fills: list[tuple[int, int]],
    passes: list[Pass],
    graphs: bool,
) -> dict[str, float]:
    """The features by visiting: passes over each layer, and rows and windows at it."""
    found = dict.fromkeys(Features().counted(), 0.0) | {"step": 1.0}
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
    for rows, windows in passes:
        decodes, prompts = (any((one.length == 1) is is_one for one in rows) for is_one in (True, False))
        is_replayed = graphs and not rows  # windows alone
        for layer in range(DEPTH):
            here = [w for w in windows if w.span.first <= layer < w.span.last]
            # A graph holds answers' rows that meet no window, through all layers, or a window at a layer.
            launched = bool(here and not is_replayed) or (bool(rows and windows) if graphs else prompts)
            found["forward_layers"] += bool(rows or here) / DEPTH
            found["prefill_layers"] += launched / DEPTH
            found["mixed_layers"] += ((launched or prompts) and decodes) / DEPTH
            for window in here:
                count = held(window.length) if is_replayed else window.length
                found["window_rows"] += count / DEPTH
                found["window_wide_rows"] += max(count - 512, 0) / DEPTH
                found["forward_attention"] += window.pairs / DEPTH
        if graphs and prompts and not windows:
            count = sum(one.length for one in rows)
            found["forward_rows"] += held(count) - count
    for layer in range(DEPTH):
        back = [
            w for w in training if w.direction is Direction.BACKWARD and w.span.first <= layer < w.span.last
        ]
        counts = [held(window.length) if graphs else window.length for window in back]
        found["backward_rows"] += sum(counts) / DEPTH
        found["backward_wide_rows"] += sum(max(count - 512, 0) for count in counts) / DEPTH
        found["backward_attention"] += sum(window.pairs for window in back) / DEPTH
        seen = set[str]()
        for window in back:  # another job's first window here shares the visit
            found["backward_layers"] += (not seen or window.job in seen) / DEPTH
            seen.add(window.job)
    for window in training:
        if window.direction.is_tail:
            found["loss_rows"] += window.length
        else:
            found["windows"] += (window.span.last - window.span.first) / DEPTH
    found["adapters"] = len({one.adapter for one in inference if one.adapter is not None})
    return found


def features_of(
    inference: list[InferenceSegment],
    training: list[TrainingSegment],
    fills: list[tuple[int, int]],
    abandons: bool = False,
) -> Features:
    """As the builder counts them: virtual tokens before rows that need them, then training."""
    features = Features()
    for given, rows in fills:
        features.add_fill(given, rows)
    for one in inference:
        features.add(one)
    for window in training:
        features.add_training(window, abandons)
    return features


def test_features_are_what_rows_meet_at_each_layer() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    chosen = {"dpw": Passes(), "dp w": Passes(False, True), "d pw": Passes(True), "d p w": Passes(True, True)}
    for _ in range(500):
        inference, training = [*answers(draw)], [*windows(draw)]
        fills = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(draw.randint(0, 2))]
        features, graphs = features_of(inference, training, fills), draw.random() < 0.5
        some, every = draw.randrange(1 << DEPTH), (1 << DEPTH) - 1
        for way, passes in partitions(inference, training):
            if way not in chosen:
                continue
            want = counted(inference, training, fills, passes, graphs)
            found = features.counted(chosen[way], graphs)
            assert found == pytest.approx(want), (inference, training, way)
            visits = [features.visits(layers, chosen[way]) for layers in (some, every - some, every)]
            there = features.visits(every, chosen[way]) - features.visits_back(every)
            assert visits[0] + visits[1] == visits[2] and there == round(want["forward_layers"] * DEPTH)
        assert features.offloaded == sum(one.context for one in inference if one.offloaded)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_rows_share_the_passes_that_are_cheapest(graphs: bool, streamed: bool) -> None:
    """The choice beside all ways, each priced by visiting. Without graphs the rows of answers stay together;
    windows that arrivals abandon are apart."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, taken = random.Random(seed), set[Passes]()
    for _ in range(600):
        inference, training = [*answers(draw)], [*windows(draw)]
        inference = [structs.replace(one, offloaded=False) for one in inference]
        fills = [(0, 3)] * draw.randint(0, 1)
        abandons = draw.random() < 0.2
        weights = {name: draw.choice([0.0, draw.random()]) for name in NAMES}
        weights |= {"forward_rows": weights["forward_rows"] / 50, "forward_attention": 0.0}
        model = CostModel(weights)
        model.graphs, layers = graphs, sorted(draw.sample(range(DEPTH), 3)) if streamed else []
        model.reads.start(layers, 3000, draw.uniform(1000.0, 9000.0))
        prices = {}
        for way, passes in partitions(inference, training):
            is_windows_own = way.endswith(" w") or not inference
            if (graphs or "dp" in way) and (is_windows_own or not abandons):
                found = counted(inference, training, fills, passes, graphs)
                prices[way] = priced(model, found, passes, training)
        features = features_of(inference, training, fills, abandons)
        chosen = model.passes(features)
        plan = BasePlan(tuple(inference), tuple(training), passes=chosen)
        assert model.predict_features(features) == pytest.approx(min(prices.values())), (plan, prices)
        if not fills:
            assert model.predict(plan) == pytest.approx(min(prices.values())), (plan, prices)
        taken.add(chosen)
    assert taken == {Passes(*each) for each in product((False, True) if graphs else (False,), (False, True))}


def priced(
    model: CostModel, found: dict[str, float], passes: list[Pass], training: list[TrainingSegment]
) -> float:
    """Seconds of features: forward, and back, the longer of computing and of reading a streamed base."""
    seconds = {name: model.weights[name] * number for name, number in found.items()}
    back = sum(taken for name, taken in seconds.items() if name.startswith("backward"))
    between = seconds["loss_rows"] + seconds["updates"]
    there, read = sum(seconds.values()) - back - between, [0.0, 0.0]
    fills = found["forward_layers"] * DEPTH
    for layer in range(DEPTH):
        is_read, layer_seconds = model.reads.layers >> layer & 1, model.reads.seconds(1)
        visits = 0
        for rows, windows in passes:
            visits += bool(rows or any(w.span.first <= layer < w.span.last for w in windows))
        fills -= visits
        read[0] += is_read * visits * layer_seconds
        seen = set[str]()
        for window in training:
            if window.direction is Direction.BACKWARD and window.span.first <= layer < window.span.last:
                read[1] += is_read * layer_seconds * (not seen or window.job in seen)
                seen.add(window.job)
    read[0] += round(fills) / DEPTH * model.reads.pass_seconds
    return max(there, read[0]) + max(back, read[1]) + between


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
