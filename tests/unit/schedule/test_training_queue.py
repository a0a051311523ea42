from coserve.core.plan import BasePlan, OptimStep
from coserve.core.request import BASE
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.schedule.segments import training_segment
from coserve.schedule.training_queue import TrainingQueue
from steps import step_plan

LAYERS = 2


def book(**weights: float) -> TrainingQueue:
    it = TrainingQueue(in_flight=2)
    for key, (name, weight) in enumerate(weights.items()):
        it.add(name, [MicroBatch(key, name, f"{name}@0", (10,), LAYERS)], weight)
    return it


def order(it: TrainingQueue, now: float = 0.0, starvation: float | None = None) -> list[str]:
    return [job.name for job in it.turns(now, starvation)[0]]


def train(it: TrainingQueue, name: str, rows: float) -> None:
    (job,) = [job for job in it.turns(0.0, None)[0] if job.name == name]
    job.micro_batches[0].under_way += 1
    it.ran(job.micro_batches[0], rows)


def test_least_trained_for_its_weight_comes_first() -> None:
    it = book(a=1.0, b=2.0)
    train(it, "a", 10)
    assert order(it) == ["b", "a"]
    train(it, "b", 10)
    assert order(it) == ["b", "a"]
    train(it, "b", 11)
    assert order(it) == ["a", "b"]


def test_starving_jobs_come_first_and_the_hungriest_before_them() -> None:
    it = book(a=1.0, b=1.0, c=1.0)
    assert order(it, now=0.0) == ["a", "b", "c"]
    train(it, "b", 5)
    train(it, "c", 9)
    served = {"a": 9.9, "b": 3.0, "c": 2.0}
    for job in it.turns(0.0, None)[0]:
        job.wait.served_at = served[job.name]
    assert order(it, now=10.0, starvation=None) == ["a", "b", "c"]
    assert order(it, now=10.0, starvation=7.5) == ["c", "a", "b"]
    assert order(it, now=10.0, starvation=5.0) == ["c", "b", "a"]
    assert it.turns(10.0, 5.0)[1] and not it.turns(10.0, 8.0)[1]


def test_waiting_begins_when_there_is_something_to_run() -> None:
    it = book(a=1.0)
    assert not it.turns(100.0, 1.0)[1]
    assert it.turns(101.1, 1.0)[1]


def test_a_job_without_work_has_no_turn() -> None:
    it = book(a=1.0)
    (job,), _ = it.turns(0.0, None)
    (batch,) = job.micro_batches
    ways = {
        Direction.TRAIN_FORWARD: Span(0, LAYERS),
        Direction.LOSS: Span(LAYERS, LAYERS + 1),
        Direction.BACKWARD: Span(0, LAYERS),
    }
    for direction, span in ways.items():
        assert not job.is_due and it.has_work
        it.planned(step_plan(BasePlan(training=(training_segment(batch, 0, 10, direction, span),))), now=0.0)
        it.ran(batch, 10)
    assert job.is_due and it.released == [(BASE, 0)] and order(it) == ["a"]
    it.planned(step_plan(BasePlan(updates=(OptimStep("a"),))), now=0.0)
    assert not job.is_due and order(it) == [] and it.has_work
    it.updated("a")
    assert order(it) == [] and not it.has_work and job.update in it


def test_forgetting_a_job_releases_what_is_left_of_it() -> None:
    it = book(a=1.0, b=1.0)
    kept, forgotten = (job.update for job in it.turns(0.0, None)[0])
    it.remove("b")
    it.remove("b")
    assert it.released == [(BASE, 1)] and order(it) == ["a"] and kept in it and forgotten not in it
    it.add("b", [MicroBatch(2, "b", "b@1", (10,), LAYERS)])
    assert forgotten not in it, "it ended the step of another job by this name"


def test_optimizer_steps_are_counted_as_long_as_the_job_is_there() -> None:
    it = book(a=1.0)
    (job,), _ = it.turns(0.0, None)
    for steps in (1, 2):
        it.updated("a")
        assert job.steps == steps
    it.remove("a")
    it.add("a", [MicroBatch(7, "a", "a@0", (10,), LAYERS)], 1.0)
    assert it.turns(0.0, None)[0][0].steps == 0
