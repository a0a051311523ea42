import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.plan import (
    BasePlan,
    BaseResult,
    InferenceSegment,
    KernelLaunches,
    OptimStep,
    Passes,
    StepPlan,
    StepResult,
    TrainingSegment,
)
from coserve.core.request import BASE, Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.cost import CostModel, Costs, added_seconds
from coserve.schedule.features import DEFAULT_WEIGHTS, NAMES, Features, StepFeatures
from coserve.schedule.segments import causal_pairs, inference_segment, training_segment, window_pairs
from coserve.schedule.step_costs import StepCosts

DEPTH = 8


def infer(
    start: int, rows: int, prompt: int = 64, adapter: str | None = None, scored: bool = False
) -> InferenceSegment:
    """A segment of a sequence whose answer has just enough tokens for it."""
    sampling = SamplingParams(prompt_logprobs=0 if scored else None)
    sequence = Sequence(1, Request("r", (1,) * prompt, sampling, adapter))
    sequence.output = [1] * max(0, start + rows - prompt)
    return inference_segment(sequence, start, rows)


def train(way: Direction, rows: int, first: int, last: int, adapter: str = "t@0") -> TrainingSegment:
    batch = MicroBatch(2, "job", adapter, (512,), DEPTH)
    return training_segment(batch, 0, rows, way, Span(first, last))


def random_plan(rng: random.Random) -> BasePlan:
    decode = [infer(rng.randint(64, 900), 1, adapter=f"a{n % 5}@1") for n in range(rng.randint(0, 20))]
    prefill = [infer(0, rng.randint(2, 300), prompt=300)] if rng.random() < 0.4 else []
    training = []
    if rng.random() < 0.4:
        training.append(train(Direction.LOSS, rng.randint(8, 512), DEPTH, DEPTH + 1))
    for way in (Direction.TRAIN_FORWARD, Direction.BACKWARD):
        if rng.random() < 0.4:
            first = rng.randint(0, DEPTH - 1)
            training.append(train(way, rng.randint(16, 512), first, rng.randint(first + 1, DEPTH)))
    updates = (OptimStep("job"),) if rng.random() < 0.2 else ()
    return BasePlan(tuple(decode + prefill), tuple(training), updates)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_pairs_are_those_of_packed_examples(lengths: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sum(lengths) - 1))
    rows = data.draw(st.integers(1, sum(lengths) - start))
    positions = [position for length in lengths for position in range(length)]
    batch = MicroBatch(1, "job", "a@0", tuple(lengths), DEPTH)
    assert window_pairs(batch, start, rows) == sum(p + 1 for p in positions[start : start + rows])


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 4), st.booleans(), st.data())
def test_pairs_with_virtual_tokens(
    lengths: list[int], prefix: int, has_prompt: bool, data: st.DataObject
) -> None:
    """Every example comes after all that is virtual, and the prompt's rows after what is given."""
    start = data.draw(st.integers(0, sum(lengths) - 1))
    rows = data.draw(st.integers(1, sum(lengths) - start))
    prompt = lengths[0] if has_prompt else 0
    seen = [
        prefix + (prompt if n else 0) + row + 1 for n, length in enumerate(lengths) for row in range(length)
    ]
    batch = MicroBatch(1, "job", "a@0", tuple(lengths), DEPTH, prefix=prefix, prompt=prompt)
    assert window_pairs(batch, start, rows) == sum(seen[start : start + rows])


def test_causal_pairs() -> None:
    assert causal_pairs(0, 3) == 1 + 2 + 3
    assert causal_pairs(10, 2) == 11 + 12


def test_features_of_decode_and_prefill() -> None:
    plan = BasePlan((infer(99, 1, adapter="a@1"), infer(70, 1, adapter="a@1"), infer(0, 10)))
    found = Features.of(plan).counted()
    assert found == dict.fromkeys(NAMES, 0.0) | {
        "step": 1,
        "forward_layers": 1,
        "forward_rows": 12,
        "prefill_layers": 1,
        "mixed_layers": 1,
        "tail_rows": 2,  # the prompt goes on after its chunk
        "decode_context": 100 + 71,
        "forward_attention": 55,
        "adapters": 1,
    }


def test_decode_rows_alone_are_no_prefill() -> None:
    decode = [infer(99, 1), infer(70, 1)]
    back = train(Direction.BACKWARD, 32, 0, 8)
    assert Features.of_segments(decode, [back]).counted()["prefill_layers"] == 0
    kept = [train(Direction.TRAIN_FORWARD, 16, first, first + 2) for first in (0, 4)]
    assert Features.of_segments(decode, kept).counted()["prefill_layers"] == 4 / 8
    assert Features.of_segments([*decode, infer(0, 4)], kept).counted()["prefill_layers"] == 1
    copied = Features.of_segments(decode, kept[:1]).copy()
    copied.add_training(kept[1])
    assert copied.counted()["prefill_layers"] == 4 / 8
    empty = Features()
    empty.add_inference(0, 0, 0, None)  # as estimates of later steps begin
    assert empty.counted()["prefill_layers"] == 0


def test_rows_share_a_pass_where_that_is_cheaper() -> None:
    """A replayed pass takes 1 second, one that is launched 5, and two windows' layers of eight 5/4."""
    model = CostModel(dict.fromkeys(NAMES, 0.0) | {"forward_layers": 1.0, "prefill_layers": 4.0})
    decode, prompt = infer(99, 1), infer(0, 4)
    few, most = (train(Direction.TRAIN_FORWARD, 16, 0, layers) for layers in (2, 7))
    shared, apart = Passes(), Passes(windows_apart=True)

    def choice(*rows: InferenceSegment | TrainingSegment) -> tuple[Passes, float]:
        answers = [one for one in rows if isinstance(one, InferenceSegment)]
        features = Features.of_segments(answers, [one for one in rows if isinstance(one, TrainingSegment)])
        return model.passes(features), model.predict_features(features)

    # Without graphs decode rows beside a window are launched at its layers alone, as compiled calls.
    assert choice(decode, few) == (shared, 1 + 4 * 2 / 8) and choice(decode, prompt) == (shared, 5.0)
    model.graphs = True
    assert choice(decode, few) == (apart, 1 + 2 / 8) and choice(decode, most) == (apart, 1 + 7 / 8), (
        "replayed"
    )
    assert choice(decode, prompt, few) == (apart, 1 + 2 / 8) and choice(prompt, most) == (apart, 1 + 7 / 8)
    model.launched = {few.job}
    assert choice(decode, few) == (apart, 1 + 5 * 2 / 8), "else eight layers are launched for two"
    assert choice(decode, most) == (shared, 5.0), "for 1 + 5 * 7 / 8"
    assert choice(decode) == choice(prompt) == choice(decode, prompt) == (shared, 1.0), "one graph"
    assert choice(decode, prompt, few) == (apart, 1 + 5 * 2 / 8) and choice(prompt, most) == (shared, 5.0)
    model = CostModel(model.weights | {"mixed_layers": 1.5})
    assert choice(decode, few) == (apart, 1 + 5 * 2 / 8)
    model.graphs = True
    assert choice(decode, prompt) == (Passes(decodes_apart=True), 2.0), "decode rows are faster alone"
    assert choice(decode, prompt, few) == (Passes(True, True), 2 + 2 / 8)


def test_a_graph_of_a_prompt_computes_its_padding() -> None:
    weights = {"forward_rows": 1.0, "forward_layers": 1e3, "prefill_layers": 1e4}
    model = CostModel(dict.fromkeys(NAMES, 0.0) | weights)
    model.graphs = True
    decodes = [infer(99, 1)] * 3
    seconds = [model.predict_features(Features.of_segments([*decodes, infer(0, n)])) for n in (9, 125, 126)]
    assert seconds == [1e3 + 128, 1e3 + 128, 1e3 + 256]
    assert model.predict_features(Features.of_segments(decodes)) == 1e3 + 3
    assert model.predict_features(Features.of_segments([infer(0, 2049)])) == 1e3 + 2049, "has no graph"
    window = train(Direction.TRAIN_FORWARD, 16, 0, DEPTH)
    beside = Features.of_segments([infer(0, 9)], [window])
    beside._passes = Passes()
    assert model.predict_features(beside) == 9 + 1e3 + 1e4, "a window has none"


def test_rows_that_no_graph_had_are_counted_in_the_pass_that_they_had() -> None:
    """Alone they are launched; planned apart from a prompt they shared its pass."""
    decode, prompt, window = infer(99, 1), infer(0, 4), train(Direction.TRAIN_FORWARD, 16, 0, 2)
    names = ("forward_layers", "prefill_layers", "mixed_layers")

    def counts(plan: BasePlan) -> list[list[float]]:
        features = Features.of(plan)
        return [[each.counted(None, True)[name] for name in names] for each in (features, features.launched)]

    assert counts(BasePlan((decode,))) == [[1, 0, 0], [1, 1, 0]]
    assert counts(BasePlan((decode, prompt), passes=Passes(True))) == [[2, 0, 0], [1, 1, 1]]
    assert counts(BasePlan((prompt,))) == [[1, 0, 0], [1, 1, 0]]
    apart = BasePlan((decode,), (window,), passes=Passes(windows_apart=True))
    assert counts(apart) == [[1 + 2 / 8, 0, 0], [1 + 2 / 8, 1, 0]], "the window has a graph of its own"


@pytest.mark.parametrize("launched", [False, True])
def test_a_launched_pass_teaches_nothing_about_replays(launched: bool) -> None:
    """A replay takes 10 ms and a launched pass 30; the graphs of a mix of adapters are not there yet."""
    weights = dict.fromkeys(NAMES, 0.0) | {"forward_layers": 0.01, "prefill_layers": 0.02}
    costs, plan = StepCosts(CostModel(weights)), StepPlan({BASE: BasePlan((infer(99, 1),))})
    costs.first.graphs = True
    for _ in range(200):
        result = BaseResult(0.03, launched=KernelLaunches(launched))
        costs.observe(StepFeatures.of(plan), StepResult({BASE: result}))
    predicted = costs.first.predict(plan.only)
    assert predicted == pytest.approx(0.01 if launched else 0.03, rel=0.05)


def test_what_decode_rows_cost_in_a_pass_with_others_is_learned_from_steps() -> None:
    """It is more than a pass of their own costs, and was measured as less."""
    weights = dict.fromkeys(NAMES, 0.0) | {"forward_layers": 0.01, "prefill_layers": 0.02}
    model, real = (CostModel(weights | {"mixed_layers": mixed}) for mixed in (0.008, 0.02))
    mixed, window = (infer(99, 1), infer(0, 8)), train(Direction.TRAIN_FORWARD, 16, 0, DEPTH)
    features = Features.of_segments(mixed[:1], [window])
    assert model.passes(features) == Passes()
    for plan in (BasePlan(mixed), BasePlan(mixed[:1]), BasePlan(mixed[1:])) * 200:
        model.observe(plan, real.predict(plan))
    assert model.passes(features) == Passes(windows_apart=True)


def test_rows_add_no_negative_seconds() -> None:
    cost = CostModel(dict.fromkeys(NAMES, 0.0) | {"prefill_layers": 1.0, "forward_rows": 0.01})
    added = [added_seconds(cost, 10, rows) for rows in (0, 1, 2, 5)]
    assert added == pytest.approx([0.0, 0.01, 1.02, 1.05])


def test_scored_prompt_rows_pay_for_the_head() -> None:
    assert Features.of(BasePlan((infer(0, 10, scored=True),))).counted()["tail_rows"] == 10
    assert (
        Features.of(BasePlan((infer(0, 64, scored=True),))).counted()["tail_rows"] == 64
    )  # 63 and the sampled


def test_features_of_training() -> None:
    keep, back = train(Direction.TRAIN_FORWARD, 16, 0, 4), train(Direction.BACKWARD, 32, 6, 8)
    loss = train(Direction.LOSS, 24, DEPTH, DEPTH + 1)
    found = Features.of(BasePlan(training=(keep, loss, back), updates=(OptimStep("job"),))).counted()
    assert found == dict.fromkeys(NAMES, 0.0) | {
        "step": 1,
        "forward_layers": 0.5,
        "window_rows": 8,
        "prefill_layers": 0.5,
        "forward_attention": causal_pairs(0, 16) / 2,
        "windows": 0.5 + 0.25,
        "backward_layers": 0.25,
        "backward_rows": 8,
        "backward_attention": causal_pairs(0, 32) / 4,
        "loss_rows": 24,
        "updates": 1,
    }


def test_rows_of_windows_cost_what_they_take() -> None:
    """256 rows of a prompt and as many of a window's, counted over the depth: 4,096 through few layers. On a
    GPU the first pass while weights are read, at half of the seconds of the others, which are arithmetic."""
    model, window = CostModel(), replace(train(Direction.TRAIN_FORWARD, 2048, 0, 1), pairs=0)
    prompts = [infer(0, rows, prompt=rows, adapter="t@0") for rows in (128, 256)]
    decode = [infer(99, 1, adapter="t@0")] * 32
    taken = [
        (Features.of_segments([prompts[0], *decode]), 0.009),
        (Features.of_segments([prompts[1], *decode]), 0.0105),
        (Features.of_segments(decode), 0.0075),
        (Features.of_segments(decode, [window]), 0.0075 + 2048 / DEPTH * 24e-6),
    ]
    model.fit(taken)
    for features, seconds in taken:
        assert model.predict_features(features) == pytest.approx(seconds, rel=0.02)


def test_only_losses_have_loss_rows() -> None:
    loss = Features.of_segments((), [train(Direction.LOSS, 24, DEPTH, DEPTH + 1)]).counted()
    assert loss == dict.fromkeys(NAMES, 0.0) | {"step": 1, "loss_rows": 24}
    for way in (Direction.TRAIN_FORWARD, Direction.BACKWARD):
        for first in (0, DEPTH - 1):
            assert Features.of_segments((), [train(way, 24, first, DEPTH)]).counted()["loss_rows"] == 0


def test_forward_weights_are_read_once_and_backward_ones_by_each_segment() -> None:
    spans = [train(Direction.TRAIN_FORWARD, 16, 0, 4), train(Direction.TRAIN_FORWARD, 16, 2, 6)]
    assert Features.of_segments((), spans).counted()["forward_layers"] == 6 / 8
    assert Features.of_segments([infer(0, 4)], spans).counted()["forward_layers"] == 1
    after = Features.of_segments((), spans)
    after.add(infer(0, 4))
    assert after.counted() == Features.of_segments([infer(0, 4)], spans).counted()
    twice = [train(Direction.BACKWARD, 16, 0, 4), train(Direction.BACKWARD, 16, 0, 4)]
    assert Features.of_segments((), twice).counted()["backward_layers"] == 1


def test_a_copy_is_apart() -> None:
    features = Features.of_segments([infer(99, 1)])
    twin = features.copy()
    twin.add(infer(0, 10, adapter="b@1"))
    twin.add_update()
    assert features.counted() == Features.of_segments([infer(99, 1)]).counted()
    features.add(infer(0, 10, adapter="b@1"))
    features.add_update()
    assert features.counted() == twin.counted()
    features.add_training(train(Direction.TRAIN_FORWARD, 16, 0, 4), abandons=True)
    assert [*features.copy().ways(False)] == [*features.ways(False)] == [Passes(windows_apart=True)]
    planned = Features.of(BasePlan((infer(99, 1),), passes=Passes(True, True)))
    assert planned.copy().ways(True) == planned.ways(True) == (Passes(True, True),)


def truth(seed: int) -> CostModel:
    rng = random.Random(seed)
    return CostModel({name: weight * rng.uniform(0.2, 5.0) for name, weight in DEFAULT_WEIGHTS.items()})


def test_fit_recovers_what_made_the_samples() -> None:
    rng, real, model = random.Random(1), truth(1), CostModel()
    plans = [random_plan(rng) for _ in range(120)]
    model.fit([(plan, real.predict(plan)) for plan in plans])
    assert model.error < 0.01
    for plan in [random_plan(rng) for _ in range(50)]:
        assert model.predict(plan) == pytest.approx(real.predict(plan), rel=0.03)


def test_fit_with_noise_stays_non_negative_and_close() -> None:
    rng, real, model = random.Random(2), truth(2), CostModel()
    plans = [random_plan(rng) for _ in range(200)]
    model.fit([(plan, real.predict(plan) * rng.uniform(0.8, 1.2)) for plan in plans])
    assert min(model.weights.values()) >= 0
    assert 0.05 < model.error < 0.2
    misses = [abs(model.predict(p) / real.predict(p) - 1) for p in plans]
    assert sum(misses) / len(misses) < 0.06


def test_fit_leaves_what_no_sample_has() -> None:
    model = CostModel()
    model.fit([(BasePlan((infer(99, 1),)), 0.01), (BasePlan((infer(99, 1), infer(199, 1))), 0.012)])
    assert model.weights["backward_rows"] == DEFAULT_WEIGHTS["backward_rows"]
    assert model.predict(BasePlan((infer(99, 1),))) == pytest.approx(0.01, rel=0.01)
    model.fit([])
    assert model.predict(BasePlan((infer(99, 1),))) == pytest.approx(0.01, rel=0.01)


def test_observing_halves_the_error_of_a_wrong_start() -> None:
    rng, real, model = random.Random(3), truth(3), CostModel()
    unseen = [random_plan(rng) for _ in range(50)]

    def miss() -> float:
        return sum(abs(model.predict(p) / real.predict(p) - 1) for p in unseen) / len(unseen)

    before = miss()
    for _ in range(1500):
        plan = random_plan(rng)
        model.observe(plan, real.predict(plan))
    assert miss() < min(before / 3, 0.1)
    assert model.error < 0.1


def test_a_slower_machine_is_noticed_soon() -> None:
    rng, model = random.Random(4), CostModel()
    plans = [random_plan(rng) for _ in range(60)]
    real = CostModel()
    for plan in plans:
        model.observe(plan, 2 * real.predict(plan))
    worst = max(abs(model.predict(p) / (2 * real.predict(p)) - 1) for p in plans)
    assert worst < 0.25


def test_decode_alone_says_little_about_training() -> None:
    model = CostModel()
    before = model.weights["backward_rows"]
    plan = BasePlan((infer(99, 1),))
    for _ in range(200):
        model.observe(plan, 0.05)
    assert model.predict(plan) == pytest.approx(0.05, rel=0.02)
    assert model.weights["backward_rows"] == pytest.approx(before)


def test_one_stall_does_not_spoil_the_model() -> None:
    model, plan = CostModel(), BasePlan((infer(99, 1),))
    before = model.predict(plan)
    model.observe(plan, 1000 * before)
    assert model.predict(plan) < 1.5 * before
    model.observe(plan, 0.0)
    assert model.predict(plan) < 1.5 * before


def test_error_follows_what_was_missed() -> None:
    model, plan = CostModel(), BasePlan((infer(99, 1),))
    model.fit([(plan, 0.01)])
    assert model.error < 0.01
    model.observe(plan, 0.02)
    assert model.error == pytest.approx(0.05 * 0.5, rel=0.1)


def test_another_model_goes_on_from_what_one_has_learned() -> None:
    rng, model, again = random.Random(5), CostModel(), CostModel()
    model.fit([(plan, 3 * CostModel().predict(plan)) for plan in (random_plan(rng) for _ in range(40))])
    for _ in range(20):
        plan = random_plan(rng)
        model.observe(plan, 2 * model.predict(plan))
    model.interference.start(1.5, 2.5)
    assert model.learned.is_sound
    again.recall(Costs(**json.loads(json.dumps(asdict(model.learned)))))
    assert again.weights == model.weights and again.error == model.error
    for _ in range(200):  # the same range around what was measured, too
        plan = random_plan(rng)
        for each in (model, again):
            each.observe(plan, 20 * CostModel().predict(plan))
    assert again.weights == model.weights and again.learned == model.learned


@pytest.mark.parametrize(
    "change",
    [
        {"measured": {}},
        {"weights": {**DEFAULT_WEIGHTS, "step": -1e-9}},
        {"weights": {**DEFAULT_WEIGHTS, "step": float("nan")}},
        {"weights": {**DEFAULT_WEIGHTS, "more": 1.0}},
        {"weights": dict.fromkeys(NAMES, 0.0)},
        {"measured": {**DEFAULT_WEIGHTS, "step": float("inf")}},
        {"factors": {"forward": 1.0}},
        {"factors": {"forward": 1.0, "backward": 1.0, "loss_rows": 5.0, "updates": 1.0}},
        {"factors": {"forward": 1.0, "backward": 1.0, "loss_rows": 0.0, "updates": 1.0}},
        {"error": float("nan")},
        {"interference": (1.8, 0.0)},
        {"interference": (5.0, 1.8)},
    ],
    ids=str,
)
def test_what_no_model_can_have_learned_is_not_sound(change: dict[str, Any]) -> None:
    learned = CostModel().learned
    assert learned.is_sound and not replace(learned, **change).is_sound


def test_an_iteration_is_there_and_back_and_the_optimizer() -> None:
    """By hand, from the assumed weights: 100 rows and 50 of two micro-batches of one adapter."""
    batches = [MicroBatch(1, "job", "a@0", (60, 40), DEPTH), MicroBatch(2, "job", "a@0", (50,), DEPTH)]
    pairs = (60 * 61 + 40 * 41 + 50 * 51) / 2
    there = 1e-2 + 150 * 1e-4 + pairs * 1e-8
    back = 2 * 2e-2 + 150 * 3e-4 + pairs * 4e-8
    rest = 1e-3 + 4 * 1e-3 + 150 * 2e-4 + 5e-3  # the step, the windows both ways, the loss, the update
    assert CostModel().predict_iteration(batches) == pytest.approx(there + back + rest)


@pytest.mark.parametrize("count", [1, 2])
def test_an_iteration_is_what_its_steps_take(count: int) -> None:
    """With micro-batches in one step, the prediction lacks only the costs that every step has."""
    batches = [MicroBatch(n, "job", "a@0", (100,), DEPTH) for n in range(count)]
    whole = [Span(0, DEPTH), Span(DEPTH, DEPTH + 1), Span(0, DEPTH)]
    ways = [Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD]
    plans = [
        BasePlan(training=tuple(training_segment(batch, 0, 100, way, span) for batch in batches))
        for way, span in zip(ways, whole, strict=True)
    ]
    model = CostModel()
    taken = sum(model.predict(plan) for plan in (*plans, BasePlan(updates=(OptimStep("job"),))))
    assert model.predict_iteration(batches) == pytest.approx(taken - 3 * 1e-3)
