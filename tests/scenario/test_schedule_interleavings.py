"""Whatever happens in whatever order: nothing leaks, nothing is lost, and the answers are the same."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.events import Event, Finished, PassDone, StepDone, TokenEvent
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment
from coserve.core.request import SLO, FinishReason, Request, SamplingParams, VersionTraits
from coserve.core.sequence import MicroBatch, Sequence
from coserve.errors import OutOfPages
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import POLICIES, make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swapping import Swapping
from coserve.wire.plans import decode_plan, decode_result, encode_plan, encode_result
from scripted_executor import ScriptedExecutor, next_token, virtual_tokens

DEPTH, PAGE, VOCABULARY, EOS = 3, 3, 13, 2
OPTIMIZER_STEPS = 2
# Adapter versions and their virtual tokens: none, less than a page, some pages, some pages and a rest.
VIRTUAL: dict[str | None, int] = {None: 0, "plain@1": 0, "short@2": 2, "full@1": 6, "long@1": 7}

# Every policy, with its defaults; and those that hold requests back again, so that they do it often here.
SCHEDULES = [
    *sorted(POLICIES),
    *("deferred:0.05", "deferred:0.2,together=1", "enhanced-temporal:2,0.3", "spatial:0.8"),
    *("temporal:2,batch", "temporal:3,batch,2,0.3", "temporal:2,request,3,0.3"),
]

words = st.integers(0, VOCABULARY - 1)
submits = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.lists(words, min_size=1, max_size=6),
            st.builds(list.__add__, st.just([3, 1, 4, 1, 5, 9, 2]), st.lists(words, max_size=2)),
        ),
        "answer": st.integers(1, 10),
        "minimum": st.integers(0, 6),
        "scored": st.booleans(),
        "scope": st.sampled_from(["", "", "other", None]),
        "adapter": st.sampled_from(list(VIRTUAL)),
        "slo": st.sampled_from(
            [SLO(), SLO(between_tokens=0.0), SLO(first_token=0.1), SLO(deferral=0.01), SLO(end_to_end=1.0)]
        ),
    }
)
batches = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=3)
submit = st.tuples(st.just("submit"), submits)
train = st.tuples(st.just("train"), batches)
# Passes of a session, of which some only go forward; the last adds gradients for the optimizer.
Pass = tuple[list[list[int]], bool]
few = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=2), min_size=1, max_size=2)
passes = st.builds(
    lambda before, last: [*before, (last, False)], st.lists(st.tuples(few, st.booleans()), max_size=2), few
)
drive = st.tuples(st.just("drive"), passes)
Script = list[tuple[str, object]]
# A script begins with enough to do for pages to run out; drawn action by action few would get there.
bursts = st.builds(
    lambda requests, jobs: requests + jobs,
    st.lists(submit, min_size=3, max_size=6),
    st.lists(st.one_of(train, drive), min_size=0, max_size=2),
)
actions = st.one_of(
    submit,
    train,
    drive,
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("stop"), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("skip"), st.floats(0.0, 1.0)),
    st.tuples(st.just("pause"), st.integers(0, 2 * DEPTH)),
    st.tuples(st.just("run_short"), st.integers(0, 6)),
)


def answer_alone(request: Request) -> list[int]:
    """The fake model's answer to a request that is alone."""
    virtual = virtual_tokens(request.adapter or "", request.traits.virtual)
    output: list[int] = []
    while len(output) < request.sampling.max_tokens:
        output.append(next_token([*virtual, *request.prompt, *output], VOCABULARY))
        if output[-1] == EOS and len(output) > request.sampling.min_tokens:
            break
    return output


class AcrossBytes(ScriptedExecutor):
    """As one in another process: it sees of a plan what bytes hold, and the scheduler so of its result."""

    def run(self, plan: BasePlan) -> BaseResult:
        copy = decode_plan(encode_plan(plan))
        assert copy == plan
        result = super().run(copy)
        copied = decode_result(encode_result(result))
        assert copied == result
        return copied


class World:
    """One run: does what it is told, follows every job for a few optimizer steps, and remembers."""

    def __init__(
        self,
        policy: str,
        pages: int,
        max_running: int,
        quantum: float,
        sharing: bool = True,
        swap_pages: int = 0,
        loses: int = 0,
        staged: int = 99,
        seconds: float = 1e-9,
    ) -> None:
        """The second tier has `swap_pages`, for copies and for long sequences; it is thought to cost nothing
        (or its copies would never pay), takes `seconds` a page, and fails each `loses`-th move. There is room
        to stage `staged` pages."""
        config = SchedulerConfig(
            layers=DEPTH,
            max_positions=27,
            eos_token_ids=(EOS,),
            max_running=max_running,
            max_prefill_rows=5,
            min_prefill_rows=2,
            max_training_rows=32,
            min_training_rows=8,
            quantum=quantum,
            prefix_sharing=sharing,
        )
        self.pool = PagePool(pages, PAGE)
        cost, moves = CostModel(), count(1)
        swapping = Swapping(cost, swap_pages)
        swapping.copies.staged = staged
        self.offloading = Offloading(swapping.tier, pages + 1, swap_pages, PAGE)
        self.it = Scheduler(
            BaseCache(config, self.pool, swapping, self.offloading), cost, make_policy(policy)
        )
        self.executor = AcrossBytes(
            PAGE, vocabulary=VOCABULARY, swap_pages=swap_pages, swap_seconds=(seconds, seconds),
            staged=staged,
            loses=lambda move: (
                loses > 0 and not isinstance(move, InferenceSegment) and next(moves) % loses == 0
            ),
        )  # fmt: skip
        self.sequences: list[Sequence] = []
        self.events: dict[int, list[Event]] = {}
        self.jobs: dict[str, list[list[int]]] = {}
        self.sessions: dict[str, list[Pass]] = {}
        self.passed: dict[str, list[set[int]]] = {}  # micro-batches of each pass of a session
        self.steps: dict[str, int] = {}
        self.contents: dict[
            tuple[int, object], list[int | None]
        ] = {}  # of pages that can be found, by page and name

    def submit(self, of: dict[str, object]) -> None:
        sampling = SamplingParams(
            max_tokens=max(of["answer"], of["minimum"]),  # type: ignore[call-overload]
            min_tokens=of["minimum"],  # type: ignore[arg-type]
            prompt_logprobs=0 if of["scored"] else None,
        )
        adapter: str | None = of.get("adapter")  # type: ignore[assignment]
        virtual = VIRTUAL[adapter]
        request = Request(
            id="r",
            prompt=tuple(of["prompt"]),  # type: ignore[arg-type]
            sampling=sampling,
            adapter=adapter,
            slo=of["slo"],  # type: ignore[arg-type]
            arrival=self.executor.now,
            traits=VersionTraits(virtual, virtual if adapter == "full@1" else 0),
            scope=of.get("scope", ""),  # type: ignore[arg-type]
        )
        try:
            self.sequences.append(self.it.requests.submit(request, self.executor.now))
        except OutOfPages:
            longest = virtual + len(request.prompt) + sampling.max_tokens - 1
            template = virtual % PAGE > 0
            assert self.pool.pages_for(longest) + template > self.pool.pages
            assert virtual or self.pool.pages_for(longest) > self.offloading.pages

    def cancel(self, which: int) -> None:
        if which < len(self.sequences):
            self.it.requests.cancel(self.sequences[which].key)

    def stop(self, which: int) -> None:
        if which < len(self.sequences):
            self.it.requests.finish(self.sequences[which].key, FinishReason.STOP)

    def run_short(self, steps: int) -> None:
        """Memory does not last for windows that share a pass in the next so many steps."""
        until = len(self.executor.plans) + steps
        self.executor.is_short = lambda plan: len(self.executor.plans) < until

    def train(self, batches: list[list[int]]) -> None:
        job = f"job{len(self.steps)}"
        self.jobs[job], self.steps[job] = batches, 0
        self._next_step(job)

    def _next_step(self, job: str) -> None:
        self.it.training.add(
            job,
            [
                MicroBatch(self.it.new_key(), job, f"{job}@{self.steps[job]}", tuple(rows), DEPTH)
                for rows in self.jobs[job]
            ],
            weight=len(self.steps),
        )

    def drive(self, script: list[Pass]) -> None:
        job = f"job{len(self.steps)}"
        self.sessions[job], self.steps[job], self.passed[job] = script, 0, []
        self._next_pass(job)

    def _next_pass(self, job: str) -> None:
        """The next pass of a session's step, or the end of the step."""
        script, begun = self.sessions[job], len(self.passed[job])
        if begun == len(script) * (self.steps[job] + 1):
            self.it.training.add(job, ())
            return
        batches, forward_only = script[begun % len(script)]
        made = [MicroBatch(self.it.new_key(), job, f"{job}@0", tuple(rows), DEPTH) for rows in batches]
        for batch in made:
            batch.forward_only, batch.reports, batch.pass_number = forward_only, True, begun + 1
            batch.labels = tuple(range(batch.length))
        self.passed[job].append({batch.key for batch in made})
        self.it.training.add(job, made, weight=len(self.steps), is_pass=True)

    def remove(self, which: int) -> None:
        self.it.training.remove(f"job{which}")
        self.jobs.pop(f"job{which}", None)
        self.sessions.pop(f"job{which}", None)

    def skip(self, seconds: float) -> None:
        self.executor.skip(seconds)

    def pause(self, layers: int) -> None:
        """Steps stop their training after so many layers from now on; 0 lets it go on."""
        self.executor.layers_before_pause = layers
        (self.executor.pause_training if layers else self.executor.resume_training)()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            before = [(len(s.output), s.output.copy()) for s in self.sequences]
            for event in self.executor.step(self.it):
                if isinstance(event, TokenEvent | Finished):
                    self.events.setdefault(event.key, []).append(event)
                elif isinstance(event, PassDone):
                    assert event.outputs.keys() == self.passed[event.job][-1], "one pass after the other"
                    self._next_pass(event.job)
                elif isinstance(event, StepDone):
                    self.steps[event.job] += 1
                    if self.steps[event.job] < OPTIMIZER_STEPS:
                        following = self._next_pass if event.job in self.sessions else self._next_step
                        following(event.job)
            assert all(s.output[:n] == old for s, (n, old) in zip(self.sequences, before, strict=True))
            self.check()

    def check(self) -> None:
        running = [s for s in self.sequences if s.pages]
        assert {s.key for s in self.it.requests.running} == {s.key for s in running}
        elsewhere = {s.key: [page - self.pool.pages - 1 for page in s.pages] for s in running if s.offloaded}
        assert elsewhere == self.offloading.pool.owners and all(s.shared == 0 for s in running if s.offloaded)
        running = [s for s in running if not s.offloaded]
        read = Counter[int]()
        for sequence in running:
            owned = self.pool.owners[sequence.key]
            template = sequence.virtual % PAGE > 0  # of the version, which it keeps as long as it runs
            assert len(owned) == len({*owned}) == len(sequence.pages) + template
            assert {*sequence.pages} <= {*owned}
            read.update(owned)
            mine = sequence.pages[(sequence.virtual + sequence.computed) // PAGE :]
            assert not any(self.pool.is_named(page) or self.pool.readers(page) > 1 for page in mine)
        copies = self.it.caches.first.swapping.copies
        unwritten = {name: copies.owners[name] for name in copies.unwritten}
        for owner, owned in self.pool.owners.items():
            if not isinstance(owner, int):  # beginnings and ends that are held for swapped sequences
                read.update(owned)
                copy = getattr(owner, "copy", None)
                key = owner.key if copy is None else unwritten[copy].key  # type: ignore[attr-defined]
                holder = next(s for s in self.sequences if s.key == key)
                assert holder.swapped is not None and not holder.pages
        assert sum(isinstance(owner, int) for owner in self.pool.owners) == len(running)
        used = [s.swapped.pages for s in self.sequences if s.swapped is not None]
        used += [self.offloading.used, sum(copies._dropped.values())]
        used += [
            copies._sizes[name] for name in {*copies.evictable, *(n for s in running for n in s.loading)}
        ]
        assert self.it.tier.used == sum(used) <= self.it.tier.nbytes
        assert [self.pool.readers(page) for page in range(self.pool.pages)] == [
            read[page] for page in range(self.pool.pages)
        ]
        assert self.pool.free_count == self.pool.pages - len(read)
        names = self.pool._names
        for page, name in names.items():
            content = [self.executor._cache.get((page, slot)) for slot in range(PAGE)]
            if isinstance(name, bytes):
                assert None not in content, "a page with a name is full"
            assert self.contents.setdefault((page, name), content) == content, "it is never written"
        self.contents = {key: it for key, it in self.contents.items() if names.get(key[0]) == key[1]}

    def drain(self) -> None:
        for _ in range(4000):
            if not self.it.has_work:
                return
            self.step()
        raise AssertionError("the work does not end")


anything = given(
    pages=st.integers(4, 9),
    max_running=st.integers(2, 5),
    quantum=st.sampled_from([1e-3, 0.025, 1.0]),
    sharing=st.sampled_from([True, True, False]),
    swap=st.sampled_from(
        [(0, 0, 99), (3, 0, 99), (30, 0, 99), (30, 0, 1), (30, 2, 99), (30, 3, 2, 0.01), (30, 0, 1, 0.05)]
    ),
    burst=bursts,
    script=st.lists(actions, max_size=25),
)
Swap = tuple[int, int, int] | tuple[int, int, int, float]


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", SCHEDULES)
@settings(max_examples=60, deadline=None)
@anything
def test_any_interleaving(
    policy: str,
    pages: int,
    max_running: int,
    quantum: float,
    sharing: bool,
    swap: Swap,
    burst: Script,
    script: Script,
) -> None:
    check(policy, pages, max_running, quantum, sharing, swap, burst, script)


@pytest.mark.slow
@pytest.mark.parametrize("policy", SCHEDULES)
@settings(max_examples=1000, deadline=None)
@anything
def test_a_great_many_interleavings(
    policy: str,
    pages: int,
    max_running: int,
    quantum: float,
    sharing: bool,
    swap: Swap,
    burst: Script,
    script: Script,
) -> None:
    check(policy, pages, max_running, quantum, sharing, swap, burst, script)


def test_a_page_that_virtual_tokens_begin_is_read_whole_from_the_second_tier() -> None:
    """It holds the last virtual token and the prompt; only the prompt's last token is computed again."""
    own = {"prompt": [4, 4], "adapter": "long@1"}
    other = {"prompt": [0], "adapter": None}
    rest = {"answer": 1, "minimum": 0, "scored": False, "scope": "", "slo": SLO()}
    script = [("submit", {**one, **rest}) for one in (other, own, other, own)]
    check("hybrid", 4, 2, 1e-3, True, (3, 0, 99), script, [])


def check(
    policy: str,
    pages: int,
    max_running: int,
    quantum: float,
    sharing: bool,
    swap: Swap,
    burst: Script,
    script: Script,
) -> None:
    """Plays a script to its end; every answer is the one that its request gets alone."""
    world = World(policy, pages, max_running, quantum, sharing, *swap)
    for name, argument in burst + script:
        getattr(world, name)(argument)
    world.drain()

    assert world.pool.free_count == pages
    copies = world.it.caches.first.swapping.copies
    assert copies.used == len(copies.evictable) == len(world.executor._copies)
    assert world.offloading.used == 0 and not any(s.offloaded and s.preemptions for s in world.sequences)
    for sequence in world.sequences:
        events = world.events[sequence.key]
        reasons = [event.finish_reason for event in events]  # type: ignore[union-attr]
        assert reasons[-1] is sequence.finish_reason and reasons[:-1] == [None] * (len(reasons) - 1)
        expected = answer_alone(sequence.request)
        if isinstance(events[-1], Finished):
            expected = expected[: len(sequence.output)]
        told = [e.token for e in events if isinstance(e, TokenEvent) and e.token is not None]
        assert told == sequence.output == expected
        check_scores(sequence, events)
    assert set(world.jobs) == {job for job in world.jobs if world.steps[job] == OPTIMIZER_STEPS}
    for job, batches in world.jobs.items():
        assert world.executor.trained[job] == OPTIMIZER_STEPS * sum(map(sum, batches))
    for job, script in world.sessions.items():
        assert world.steps[job] == OPTIMIZER_STEPS and len(world.passed[job]) == 2 * len(script)
        back = [batches for batches, forward_only in script if not forward_only]
        assert world.executor.trained[job] == OPTIMIZER_STEPS * sum(sum(map(sum, made)) for made in back)


def check_scores(sequence: Sequence, events: list[Event]) -> None:
    """Every prompt position but the first is scored once, in order (the fake's score is its position)."""
    told = [score.chosen for e in events if isinstance(e, TokenEvent) for score in e.prompt_logprobs]
    wanted = [-float(n) for n in range(1, len(sequence.request.prompt))]
    if sequence.request.sampling.prompt_logprobs is None:
        wanted = []
    elif not sequence.output:
        wanted = wanted[: len(told)]
    assert told == wanted


def test_the_tiny_pool_does_preempt() -> None:
    world = World("hybrid", pages=5, max_running=5, quantum=0.025)
    for n in range(4):
        world.submit(
            {"prompt": [n, 1, 1], "answer": 8, "minimum": 8, "scored": True, "slo": SLO(between_tokens=0.1)}
        )
    world.train([[40, 30], [80]])
    world.drain()
    assert world.it.stats.preemptions >= 3
    assert max(sequence.preemptions for sequence in world.sequences) >= 1
    assert [s.output for s in world.sequences] == [answer_alone(s.request) for s in world.sequences]


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", SCHEDULES)
@settings(max_examples=30, deadline=None)
@given(burst=bursts, script=st.lists(actions, max_size=20))
def test_the_same_script_gives_the_same_plans(policy: str, burst: Script, script: Script) -> None:
    runs = []
    for _ in range(2):
        world = World(policy, pages=6, max_running=3, quantum=0.025)
        for name, argument in burst + script:
            getattr(world, name)(argument)
        world.drain()
        runs.append(world.executor.plans)
    assert runs[0] == runs[1]
