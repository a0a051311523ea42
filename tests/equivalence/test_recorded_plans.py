"""Plans recorded from engines, replayed against whole-sequence autograd."""

import random
from collections import Counter
from pathlib import Path

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.sequence import Direction
from coserve.train.save_policy import SavePolicy
from coserve_benchmarks.plans import (
    RecordedSegment,
    RecordedStep,
    load_plans,
    record_plans,
    save_plans,
    whole_journeys,
)
from models import Exact, prompts, tiny
from passages import Case, Passage, make_case

TOLERANCE = 1e-10
LENGTHS = (9, 40, 5, 21, 21)  # 96 rows: nothing is filled up, and none is without a label
ROWS = sum(LENGTHS)
FILES = Path(__file__).parent / "data"


def error(case: Case, journey: list[RecordedSegment], keep: SavePolicy) -> float:
    """The worst relative error of a gradient after one micro-batch's recorded way there and back."""
    left = list(range(len(case.lengths)))
    order = [left.pop([case.lengths[i] for i in left].index(length)) for length in journey[0].lengths]
    passage = Passage(case, keep, order)
    for segment in journey:
        passage.go(segment.direction, segment.start, segment.length, segment.span)
    return passage.error()


def record(name: str, case: Case, **scheduler: object) -> list[RecordedStep]:
    """The plans of an engine that answers requests while two jobs train on the case's examples."""
    engine = Engine(
        tiny(name), EngineConfig(calibrate=False, cache_tokens=1024, page_size=8, scheduler=scheduler)
    )
    draws = random.Random(f"record/{name}")
    with record_plans(engine) as steps:
        jobs = [
            engine.finetune(
                case.examples, adapter, LoRAConfig(rank=2), TrainingConfig(batch_size=5, epochs=3, seed=seed)
            )
            for seed, adapter in enumerate(("one", "two"))
        ]
        while any(job.status == "running" for job in jobs):
            if draws.random() < 0.3:
                (prompt,) = prompts(draws, [draws.randint(1, 30)])
                sampling = SamplingParams(max_tokens=draws.randint(1, 9), ignore_eos=True)
                engine.generate(prompt, sampling=sampling)
            engine.step()
        engine.run()
    return steps


SCHEDULERS: dict[str, dict[str, object]] = {
    "defaults": {},
    "small windows": {"max_training_rows": 16, "min_training_rows": 2},
    "short quanta": {
        "quantum": 1e-4, "quantum_with_inference": 1e-4, "min_training_rows": 5, "starvation": 1e-3,
    },
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "mixtral"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_plans_just_run_give_the_gradients_of_whole_sequences(name: str, kind: str, tmp_path: Path) -> None:
    """The three micro-batches that were cut into the most pieces, each with another save policy."""
    scheduler = SCHEDULERS[kind]
    with Exact():
        case = make_case(name, LENGTHS)
        save_plans(record(name, case, **scheduler), tmp_path / "plans.json")
        steps = load_plans(tmp_path / "plans.json")
        journeys = whole_journeys(steps)
        assert len(journeys) == 6 and any(step.inference and step.training for step in steps)
        for keep, journey in zip(SavePolicy, sorted(journeys.values(), key=len, reverse=True), strict=False):
            assert error(case, journey, keep) <= TOLERANCE
    segments = [segment for journey in journeys.values() for segment in journey]
    if scheduler:
        assert any(segment.length < ROWS for segment in segments), "no micro-batch was cut into windows"
    if "quantum" in scheduler:
        assert any(len(segment.span) < case.depth for segment in segments), "no window was put down"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("cut", "keep"), zip((-3, -2, -1), SavePolicy, strict=True))
def test_plans_of_the_bench_give_the_gradients_of_whole_sequences(cut: int, keep: SavePolicy) -> None:
    """Recorded runs of the co-serving bench, on a narrow model of the same depth: the three micro-batches
    that were cut into the most pieces, each with another save policy."""
    files = sorted(FILES.glob("plans*.json"))
    assert files, "plans of a bench run belong beside this file"
    for file in files:
        journeys = whole_journeys(load_plans(file))
        assert journeys, f"{file.name} holds no micro-batch that went there and back"
        journey = sorted(journeys.values(), key=len)[cut]
        lengths = tuple(sorted(journey[0].lengths))
        kinds = Counter(segment.direction for segment in journey)
        assert kinds[Direction.TRAIN_FORWARD] and kinds[Direction.BACKWARD]
        depth = max(s.span.last for s in journey if s.direction is Direction.TRAIN_FORWARD)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": depth}
        with Exact():
            case = make_case("llama", lengths, max_position_embeddings=max(*lengths, 256), **shape)
            assert error(case, journey, keep) <= TOLERANCE
