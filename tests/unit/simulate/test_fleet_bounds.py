"""The time, patience and lateness that end a fleet's run, and what counts within its seconds."""

import random
from collections.abc import Callable

from coserve.core.events import Event, TokenEvent
from coserve.core.request import SLO
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.simulate.fleet import Fleet, FleetResult, RoundRobin
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import tokens_trained
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import TimedJob, TimedRequest

TIMES = WeightedTimes(DEFAULT_WEIGHTS, 4)


class Noting(SimulatedMachine):
    """A machine that notes when its jobs start, and what its steps tell."""

    def __init__(self) -> None:
        settings = MachineSettings(jitter=Jitter(0.0, 0.0), scheduler={"max_running": 2})
        super().__init__("hybrid", TIMES, settings, 0)
        self.started = list[tuple[str, float]]()
        self.told = list[tuple[float, list[Event]]]()  # events of each step, and its end

    def start(self, job: TimedJob) -> Callable[[], None]:
        self.started.append((job.adapter, self.clock()))
        return super().start(job)

    def step(self, arrival: float = float("inf")) -> list[Event]:
        events = super().step(arrival)
        self.told.append((self.clock(), events))
        return events


def run(
    asked: list[TimedRequest], jobs: list[TimedJob], seconds: float, patience: float, most_late: float = 1e9
) -> tuple[FleetResult, Noting]:
    machine = Noting()
    return Fleet([machine], RoundRobin(1)).run(asked, jobs, seconds, patience, most_late), machine


def test_a_run_ends_with_its_patience_and_with_more_late_answers_than_are_allowed() -> None:
    """More requests than the machine can answer: the later ones wait ever longer."""
    draw = random.Random(1)
    asked = [
        TimedRequest(0.005 * n, (0,) * 8, draw.randint(20, 60), slo=SLO(first_token=0.3)) for n in range(100)
    ]
    whole, _ = run(asked, [], 1.0, 1e9)
    late = sorted(one.newest for one in whole.answers if not one.is_within)
    assert all(one.is_done for one in whole.answers) and len(late) == whole.late > 30

    for patience in (0.0, 2.0):
        found, _ = run(asked, [], 1.0, patience)
        assert 1.0 + patience < found.ended < 1.0 + patience + 0.5
        done = [one for one in found.answers if one.is_done]
        assert len(done) == sum(one.newest <= found.ended for one in whole.answers) < len(asked)
    for most in (0, 20):
        found, _ = run(asked, [], 1.0, 1e9, most)
        assert found.late == sum(at <= found.ended for at in late) > most
        assert found.ended == late[most], "with the first answer too many"


def test_tokens_and_training_count_within_the_seconds_and_jobs_start_in_order() -> None:
    asked = [TimedRequest(0.8, (0,) * 8, 100, slo=SLO())]
    jobs = [TimedJob(at, f"at {at}", ((0,) * 64,) * 8, 4, epochs=9) for at in (0.9, 0.2, 3.0, 0.5)]
    found, machine = run(asked, jobs, 1.0, 30.0)
    assert [name for name, _ in machine.started] == ["at 0.2", "at 0.5", "at 0.9"]
    assert all(0 <= started - float(name[3:]) < 0.5 for name, started in machine.started)
    (answer,) = found.answers
    early = sum(isinstance(event, TokenEvent) for at, events in machine.told if at <= 1.0 for event in events)
    assert answer.tokens == 100 and answer.is_done and 0 < found.tokens == early < 100

    beyond = 0.0
    for seconds in (0.31, 0.7, 1.3, 2.0, 2.9):
        busy = [TimedJob(0.0, "job", ((0,) * 512,) * 8, 8, epochs=1000)]
        found, machine = run([], busy, seconds, 30.0)
        trained = [(at, tokens_trained(events)) for at, events in machine.told]
        assert found.trained == sum(tokens for at, tokens in trained if at <= seconds) > 0
        beyond += sum(tokens for at, tokens in trained if at > seconds)
    assert beyond > 0, "of steps under way"
