"""Plans that are made before the results of those under way change nothing of what comes out."""

import secrets
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from coserve.core.events import Event, Finished, JobFailed, RequestFailed, StepDone, TokenEvent
from coserve.core.plan import InferenceSegment
from coserve.core.request import SLO, FinishReason, Request, SamplingParams, VersionTraits
from coserve.core.sequence import Direction, MicroBatch, Sequence
from coserve.core.speculation import SpeculativeConfig
from coserve.errors import LossNotFinite, OffloadFailed, OutOfPages
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swapping import Swapping
from scripted_executor import ScriptedExecutor, next_token, virtual_tokens

DEPTH, PAGE, VOCABULARY = 3, 4, 50
POLICIES = ["hybrid", "adaptive", "temporal:n=3", "enhanced-temporal", "spatial"]


class World:
    """Requests, jobs, cancellations, stops and pauses at random, over few pages; a record of what came."""

    def __init__(self, draws: Random, ahead: int, policy: str) -> None:
        self.draws = draws
        # Without it answers are of tokens that nothing before them foretells.
        self.memory = memory = draws.choice((0, 1, 1, 2))
        longest = draws.randint(1, 4)
        speculation = SpeculativeConfig(
            draws.randint(1, 8), prompt_lookup_max=longest, prompt_lookup_min=draws.randint(1, longest)
        )
        config = SchedulerConfig(
            DEPTH, 96, eos_token_ids=(7, 8), max_running=6, max_prefill_rows=16, min_prefill_rows=2,
            max_training_rows=16, min_training_rows=2, prefix_sharing=draws.random() < 0.7,
            micro_batches_in_flight=draws.choice((1, 2)), speculation=draws.choice((None, speculation)),
        )  # fmt: skip
        cost, swap_pages = CostModel(), draws.choice((0, 10, 100))
        pages = PagePool(draws.choice((9, 16, 30, 60)), PAGE)
        swapping = Swapping(cost, swap_pages)
        elsewhere = Offloading(swapping.tier, pages.pages + 1, swap_pages, PAGE)
        self.it = Scheduler(BaseCache(config, pages, swapping, elsewhere), cost, make_policy(policy))
        failures = {"bad": LossNotFinite("nan")}
        lost = draws.choice((0.0, 0.0, 0.2))
        self.executor = ScriptedExecutor(
            PAGE, None, VOCABULARY, failures, ahead, swap_pages=swap_pages, swap_seconds=(1e-9, 1e-9),
            loses=lambda move: draws.random() < (lost / 4 if isinstance(move, InferenceSegment) else lost),
            memory=memory,
        )  # fmt: skip
        self.asked: dict[int, Sequence] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.steps: Counter[str] = Counter()
        self.failed: list[str] = []
        self.lost: set[int] = set()
        self.rows_of: Counter[str] = Counter()

    def ask(self) -> None:
        draws = self.draws
        virtual = draws.choice((0, 0, 3, 8))
        prompt = tuple(draws.randrange(4) for _ in range(draws.randint(1, 30)))
        scored = draws.choice((None, None, 0))
        least = 1 if scored is None else 0
        sampling = SamplingParams(
            max_tokens=draws.randint(least, 20), ignore_eos=draws.random() < 0.5, prompt_logprobs=scored
        )
        slo = SLO(between_tokens=draws.choice((None, 0.01)), first_token=draws.choice((None, 0.1)))
        now = self.executor.now
        adapter = f"a{virtual}@0" if virtual else None
        asked = Request(
            "r", prompt, sampling, adapter, slo, now, traits=VersionTraits(virtual),
            scope=draws.choice(("", None)), newcomer=draws.random() < 0.4,
        )  # fmt: skip
        try:
            sequence = self.it.requests.submit(asked, now)
        except OutOfPages:
            return
        self.asked[sequence.key], self.got[sequence.key] = sequence, []

    def train(self, job: str) -> None:
        rows = [self.draws.randint(1, 40) for _ in range(self.draws.randint(1, 3))]
        batches = [MicroBatch(self.it.new_key(), job, f"{job}@0", (count,), DEPTH) for count in rows]
        self.it.training.add(job, batches, self.draws.choice((1.0, 2.0)))
        self.rows_of[job] += sum(rows)

    def step(self) -> None:
        (self.executor.pause_training if self.draws.random() < 0.3 else self.executor.resume_training)()
        self.executor.layers_before_pause = self.draws.randint(1, 2)
        for event in self.executor.step(self.it):
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, TokenEvent) and event.token is not None:
            self.got[event.key].append(event.token)
        reason = getattr(event, "finish_reason", None) or getattr(event, "reason", None)
        if isinstance(event, TokenEvent | Finished) and reason is not None:
            assert event.key not in self.ended, "an answer ends once"
            self.ended[event.key] = reason
        if isinstance(event, RequestFailed):
            assert isinstance(event.error, OffloadFailed) and self.asked[event.key].offloaded
            assert event.key not in self.ended, "an answer ends once"
            self.ended[event.key] = FinishReason.CANCELLED
            self.lost.add(event.key)
        if isinstance(event, StepDone):
            self.steps[event.job] += 1
            if self.steps[event.job] < 4:
                self.train(event.job)
        if isinstance(event, JobFailed):
            self.failed.append(event.job)


def whole_answer(sequence: Sequence, memory: int) -> Iterator[int]:
    """The tokens that the fake model says, one request alone."""
    request = sequence.request
    tokens = [*virtual_tokens(request.adapter or "", request.traits.virtual), *request.prompt]
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens[-memory:], VOCABULARY))
        yield tokens[-1]
        if tokens[-1] in (7, 8) and not request.sampling.ignore_eos:
            return


@pytest.mark.sample(4)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_everything_comes_out_as_one_plan_at_a_time(policy: str, ahead: int) -> None:
    for _ in range(12):
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        check(World(Random(seed), ahead, policy))


def check(world: World) -> None:
    draws = world.draws
    for job in ("one", "two", "bad"):
        world.train(job)
    cancelled: set[int] = set()
    for at in range(1500):
        if at < 60 and draws.random() < 0.3:
            world.ask()
        if at < 60 and world.asked and draws.random() < 0.05:
            key = draws.choice(list(world.asked))
            world.it.requests.cancel(key)
            cancelled.add(key)
        if at >= 60 and not world.it.has_work:
            break
        world.step()
    else:
        raise AssertionError("the work does not end")
    for segment in (segment for plan in world.executor.plans for segment in plan.inference):
        assert segment.start + segment.length < world.asked[segment.key].longest, "a row after the last token"
    for key, sequence in world.asked.items():
        expected = list(whole_answer(sequence, world.memory))
        assert world.ended[key] is sequence.finish_reason
        if world.ended[key] is FinishReason.CANCELLED:
            assert key in cancelled | world.lost and world.got[key] == expected[: len(world.got[key])]
        else:
            assert world.got[key] == expected
    assert world.failed == ["bad"] and world.steps == {"one": 4, "two": 4}
    assert world.executor.trained == {job: world.rows_of[job] for job in ("one", "two")}
    done = [segment for result in world.executor.results for segment in result.trained]
    rows = sum(s.length * len(s.span) for s in done if s.direction is Direction.BACKWARD and s.job != "bad")
    assert rows == DEPTH * sum(world.executor.trained.values()), "nothing runs twice"
    assert not world.it.requests.running and not world.it.requests.waiting
    prefixes = len(world.it.caches.first.swapping.copies.evictable)
    assert world.it.caches.first.swapping.copies.used == prefixes == len(world.executor._copies)
    assert world.it.caches.first.offloading.used == 0
