"""Set-ups without coserve: requests answered, jobs trained, and one clock for all."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from coserve.core.request import SLO
from coserve.errors import ConfigError, ServerError
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.wire.control import encode_line
from coserve.workload.requests import TimedJob, TimedRequest, Workload, fixed_prompts, training_tokens
from coserve.workload.shapes import shape_named
from coserve_benchmarks.policies.instead import least_ahead
from coserve_benchmarks.policies.without.launch import Contestant
from coserve_benchmarks.policies.without.messages import Prepare, ProcessRole, Serving, Start
from coserve_benchmarks.policies.without.onestops import OneProcess, Turns, best_turns
from coserve_benchmarks.policies.without.serving import TimedAnswer, make_server
from coserve_benchmarks.policies.without.training import PeftTrainer, mini_batches, tensors
from coserve_benchmarks.policies.without.trials import TrialResult, beginning, best, frontier, measure
from coserve_benchmarks.policies.without.turns import take_turns
from coserve_benchmarks.policies.without.twoprocess import Split, TwoProcesses, splits, try_splits

SHAPE = shape_named("tiny")
ENDLESS = 10**6
PROMPTS = fixed_prompts(3, 12, SHAPE.vocabulary)
REQUESTS = tuple(TimedRequest(0.3 * i, prompt[: 12 - i], 4 + i) for i, prompt in enumerate(PROMPTS))
JOB = TimedJob(0.2, "adapter", tuple(training_tokens([16] * 8, SHAPE.vocabulary)), 4, epochs=ENDLESS)
WORKLOAD = Workload("small", "a few requests and a job", 1.5, REQUESTS, (JOB,))


def check_load(load: LoadResult, workload: Workload) -> None:
    """Checks any set-up: whole answers after their arrivals, mini-batches after the job's."""
    assert [len(answer.tokens) for answer in load.answers] == [
        request.answer for request in workload.requests
    ]
    for answer, request in zip(load.answers, workload.requests, strict=True):
        assert answer.arrival == pytest.approx(load.started + request.at)
        assert answer.slo == request.slo
        stamps = [answer.arrival, *answer.tokens]
        assert all(before < after for before, after in pairwise(stamps))
    assert load.finished_at == max(answer.tokens[-1] for answer in load.answers)
    assert {tokens for _, tokens in load.trained} == {64}
    assert min(when for when, _ in load.trained) > load.started + workload.jobs[0].at
    assert max(when for when, _ in load.trained) > load.started + 0.8 * workload.seconds
    assert len(load.losses) == len(load.trained) > 3
    assert all(0 < loss < 10 for loss in load.losses)
    assert 0.5 < load.processor < 8 * workload.seconds


# The processes


@pytest.mark.slow
def test_two_processes_serve_and_train_at_once() -> None:
    with TwoProcesses(SHAPE, Split(1, 1, nice=1)) as contestant:
        load = contestant.run(WORKLOAD)
        assert contestant.matched in (False, True)  # measured
    check_load(load, WORKLOAD)


@pytest.mark.usefixtures("forks")
def test_a_process_that_fails_says_why() -> None:
    crooked = replace(SHAPE, hidden=65)
    with (
        Contestant(crooked, ProcessRole.TRAIN, 1) as contestant,
        pytest.raises(ServerError, match=r"to train ended with status 1: .*65"),
    ):
        contestant.prepare(WORKLOAD, Serving.STATIC)


@pytest.mark.usefixtures("forks")
def test_a_process_ends_with_its_parent() -> None:
    orders = [
        Start(SHAPE, ProcessRole.TRAIN, 1),
        Prepare(WORKLOAD, Serving.STATIC),
    ]  # and nobody says `Begin`
    command = [sys.executable, "-m", "coserve_benchmarks.policies.without.process"]
    lines = "".join(encode_line(order) + "\n" for order in orders)
    assert subprocess.run(command, input=lines, text=True, timeout=60).returncode == 0


def test_adapters_are_nobodys_business_here() -> None:
    named = replace(WORKLOAD, requests=(replace(REQUESTS[0], adapter="some"),))
    with pytest.raises(ConfigError, match="base alone"):
        Contestant(SHAPE, ProcessRole.SERVE, 1).prepare(named, Serving.STATIC)


@pytest.mark.slow
def test_one_process_serves_and_trains_in_turns() -> None:
    with OneProcess(SHAPE, Turns(1)) as contestant:
        for serving in Serving:
            check_load(contestant.run(WORKLOAD, serving), WORKLOAD)


@pytest.mark.slow
def test_the_best_settings_are_among_those_tried() -> None:
    tried = try_splits(SHAPE, WORKLOAD, threads=2)
    assert len(tried) == len(splits(2)) + 2
    assert all(found.training > 0 and split.matched is not None for split, found in tried.items())
    turns, figures = best_turns(SHAPE, WORKLOAD, threads=2, seconds=1.0)
    assert len(figures) == 3
    assert turns.matched is not None
    assert figures[turns.describe()].training > 0


# Serving


@pytest.mark.parametrize("serving", Serving)
def test_every_server_answers_as_generate_does(serving: Serving) -> None:
    model = SHAPE.build()
    expected = [
        model.generate(
            torch.tensor([request.prompt]), max_new_tokens=request.answer, do_sample=False, pad_token_id=0
        )[0, len(request.prompt) :].tolist()
        for request in REQUESTS
    ]
    server = make_server(serving, SHAPE, REQUESTS)
    try:
        replies = [server.submit(request) for request in REQUESTS]
        assert server.open == 3
        while server.open:
            server.serve(1.0)
    finally:
        server.close()
    assert [reply.tokens for reply in replies] == expected
    assert all(len(set(reply.stamps)) == len(reply.stamps) == reply.request.answer for reply in replies)


# Training


def test_jobs_train_one_after_another_from_when_they_arrive() -> None:
    first = replace(JOB, at=1.0, epochs=1)
    second = replace(JOB, at=0.5, examples=JOB.examples[:3], batch=2, epochs=2, targets=("q_proj",), rank=4)
    trainer = PeftTrainer(SHAPE, (first, second), matched=True)
    assert not trainer.has_work(0.4)
    steps = []
    while trainer.has_work(0.6):
        steps.append(trainer.step()[0])
    assert steps == [32, 16, 32, 16]
    assert not trainer.has_work(0.9)
    assert trainer.has_work(1.0)
    losses = [trainer.step()[1] for _ in range(2)]
    assert losses[1] != losses[0] > 0
    assert not trainer.has_work(9.0)


def test_an_adapter_begins_anew_and_learns() -> None:
    job = replace(JOB, at=0.0, examples=JOB.examples[:2], batch=2, epochs=20)
    trainer = PeftTrainer(SHAPE, (job, replace(job, at=1.0)), matched=False)
    assert trainer.has_work(0.0)
    first = [trainer.step()[1] for _ in range(20)]
    assert first[-1] < first[0] - 0.05
    assert trainer.has_work(1.0)
    assert trainer.step()[1] == pytest.approx(first[0], rel=1e-3)


def test_padding_changes_no_loss() -> None:
    model = SHAPE.build().float()
    long, short = training_tokens([9, 5], SHAPE.vocabulary)
    apart = [model(**tensors([tokens])).loss for tokens in (long, short)]
    together = model(**tensors([long, short])).loss
    torch.testing.assert_close(together, (8 * apart[0] + 4 * apart[1]) / 12)


def test_mini_batches_repeat_the_examples() -> None:
    job = replace(JOB, examples=((1,), (2,), (3,)), batch=2, epochs=2)
    assert list(mini_batches(job)) == [((1,), (2,)), ((3,),), ((1,), (2,)), ((3,),)]


# Turns, on a scripted clock


@dataclass
class Script:
    """A server that takes 2 s for whatever waits, and a trainer that takes 5 s for each of `steps`."""

    steps: int
    now: float = 100.0
    waiting: list[TimedAnswer] = field(default_factory=list)
    log: list[tuple[str, float]] = field(default_factory=list)

    @property
    def open(self) -> int:
        return len(self.waiting)

    def submit(self, request: TimedRequest) -> TimedAnswer:
        self.waiting.append(TimedAnswer(request))
        return self.waiting[-1]

    def serve(self, patience: float) -> None:
        self.now += 2.0
        self.log.append((f"served {self.open}", self.now - 101))
        for reply in self.waiting:
            reply.add(7, self.now)
        self.waiting.clear()

    def has_work(self, elapsed: float) -> bool:
        return self.steps > 0 and elapsed >= 1.0

    def step(self) -> tuple[int, float]:
        self.steps -= 1
        self.now += 5.0
        self.log.append(("trained", self.now - 101))
        return 64, 0.5

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None: ...


def test_requests_wait_for_the_mini_batch_that_is_under_way() -> None:
    requests = tuple(TimedRequest(at, (1,), 1) for at in (0.5, 4.0, 5.0, 20.0))
    script = Script(steps=3)
    outcome = take_turns(
        replace(WORKLOAD, requests=requests),
        101.0,
        script,
        script,
        lambda elapsed: elapsed >= 10,
        lambda: script.now,
        script.sleep,
    )
    expected = [("served 1", 2.5), ("trained", 7.5), ("served 2", 9.5), ("trained", 14.5), ("trained", 19.5)]
    assert [what for what, _ in script.log] == [*(what for what, _ in expected), "served 1"]
    assert [when for _, when in script.log] == pytest.approx(
        [*(when for _, when in expected), 22.0], abs=0.01
    )
    assert [stamps[0] - 101 for stamps in outcome.stamps] == pytest.approx([2.5, 9.5, 9.5, 22.0], abs=0.01)
    assert [tokens for _, tokens in outcome.trained] == [64, 64, 64]


# Choosing


def test_two_processes_are_compared_at_the_bound_at_which_ours_is_least_ahead() -> None:
    """A split that trains most has the widest bound; one that another beats in both is not asked."""
    wide, narrow, beaten = (Split(1, threads) for threads in (1, 2, 3))
    tried = {
        wide: TrialResult(1.0, 2.0, 4.0, 10.0, 300.0),
        narrow: TrialResult(1.0, 1.0, 2.0, 10.0, 200.0),
        beaten: TrialResult(1.0, 1.0, 3.0, 10.0, 100.0),
    }
    assert frontier(tried).keys() == {wide, narrow}
    ours = {4.0: TrialResult(1.0, 1.0, 4.0, 10.0, 600.0), 2.0: TrialResult(1.0, 1.0, 2.0, 10.0, 300.0)}
    assert least_ahead(tried, ours.__getitem__) == narrow  # 1.5 times what they train there, and not 2
    ours[4.0] = replace(ours[4.0], attainment=0.9)
    assert least_ahead(tried, ours.__getitem__) == wide  # which ours does not keep


def test_attainment_is_chosen_before_training() -> None:
    tried = {
        "late": TrialResult(0.9, 1.0, 2.0, 10.0, 500.0),
        "good": TrialResult(1.0, 1.0, 2.0, 10.0, 300.0),
        "idle": TrialResult(1.0, 0.1, 0.2, 10.0, 200.0),
    }
    assert best(tried) == "good"


def test_a_load_is_measured_by_each_requests_own_bounds() -> None:
    strict = SLO(end_to_end=0.4)
    load = LoadResult(10.0, 4.0, trained=[(11.0, 64.0), (13.5, 64.0), (14.5, 64.0)])
    load.answers = [AnswerTimes(10.0, [10.5], SLO()), AnswerTimes(11.0, [11.5], strict)]
    assert measure(load) == TrialResult(0.5, 0.5, 0.5, 0.5, 40.0)  # half of the last step's tokens


def test_a_trial_is_the_beginning_from_the_first_job_on() -> None:
    requests = tuple(TimedRequest(float(at), (1,), 1) for at in range(10))
    late, later = replace(JOB, at=3.0), replace(JOB, at=9.0)
    part = beginning(replace(WORKLOAD, seconds=10.0, requests=requests, jobs=(late, later)), 4.0)
    assert part.seconds == 4.0
    assert [request.at for request in part.requests] == [0.0, 1.0, 2.0, 3.0]
    assert [job.at for job in part.jobs] == [0.0]


def test_splits_share_the_cores_or_crowd_them() -> None:
    pairs = {(split.serve, split.train, split.passive) for split in splits(2)}
    assert pairs == {(1, 1, False), (1, 2, True), (2, 1, True), (2, 2, True)}
    assert {split.nice for split in splits(2)} == {0, 19}
    assert len({split.describe() for split in splits(8)}) == len(splits(8))
