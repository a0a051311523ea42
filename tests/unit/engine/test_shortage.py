"""Memory that runs out inside a job is that job's alone: others and answers go on, and it tries once more.
Another error in a pass is that of one of those who share it, too."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.core.plan import Prefix
from coserve.engine.finetuning import FineTuning
from coserve.errors import CoserveError, InternalError, JobError, OutOfMemory
from coserve.train.activations import HiddenStates
from coserve.train.backward import Backward, BackwardWindow
from coserve.train.example import Example
from coserve.train.master_weights import MasterWeights
from coserve.train.micro_batch import MicroBatchState
from coserve.train.save_policy import SavePolicy
from coserve.train.session import TrainingSession
from coserve.train.tail import Tail
from coserve.train.window_group import ForwardWindow
from coserve.worker.fused_pass import FusedPass, Traveller
from coserve.worker.inference import InferenceBatch, PassedRows
from coserve.worker.sampler import Drawn, Sampler
from models import tiny
from virtual import with_virtual

pytestmark = pytest.mark.local

LENGTHS = (30, 24, 18, 27)
DATA = [Example(tuple(range(3, 3 + n)), (*range(4, 3 + n), -100)) for n in LENGTHS] * 3
SETTINGS = TrainingConfig(batch_size=4, rows=64, keep=SavePolicy.EVERYTHING, learning_rate=1e-3)
WORDS = (
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)
# What a pass fails with, and the class and the words of the error of whoever is the cause.
FAULTS: list[tuple[Exception, type[CoserveError], str]] = [
    (RuntimeError(WORDS), OutOfMemory, "ran out of memory: .*can't allocate"),
    (ValueError("shapes do not match"), InternalError, "failed: ValueError: shapes do not match"),
]
faults = pytest.mark.parametrize(("fault", "kind", "words"), FAULTS, ids=["memory", "another"])


def make_engine() -> Engine:
    config = EngineConfig(dtype="float64", calibrate=False, cache_tokens=512)
    return Engine(tiny("llama", torch.float64), config)


def start(engine: Engine, name: str) -> FineTuning:
    return engine.finetune(DATA, name, LoRAConfig(rank=4), SETTINGS, job=name)


def ask(engine: Engine) -> Any:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    return engine.generate([1, 2, 3], sampling=params)


class Allocator:
    """Fails for one job's rows, in the step numbered `at` of its optimizer, `times` times."""

    def __init__(self, job: str, times: int, at: int = 1) -> None:
        self.job, self.times, self.at = job, times, at
        self.failed = 0

    def use(self, run: TrainingSession) -> None:
        if run.job == self.job and run.step >= self.at and self.failed < self.times:
            self.failed += 1
            raise RuntimeError(WORDS)


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, where: str, allocator: Allocator
) -> Iterator[None]:
    """The allocator is asked where a job takes memory: for its activations, its loss, its way back, its
    update."""
    owner, name = {
        "store": (MicroBatchState, "store"),
        "kept": (HiddenStates, "save"),
        "loss": (Tail, "loss"),
        "back": (BackwardWindow, "accumulate"),
        "update": (MasterWeights, "make_room"),
    }[where]
    attribute = vars(owner)[name]
    real = attribute.func if isinstance(attribute, cached_property) else attribute

    def run_of(found: Any) -> TrainingSession | None:
        part = found.backward if isinstance(found, BackwardWindow) else found
        for run in engine.executor.worker.sessions.values():
            parts: list[object] = [run.weights]
            for micro_batch in run.micro_batches.values():
                made = vars(micro_batch)
                parts += [micro_batch, made.get("tail"), made.get("backward")]
                parts += [made["store"].hidden] if "store" in made else []
            if any(one is part for one in parts):
                return run
        return None

    def wrapped(self: Any, *args: Any, **rest: Any) -> Any:
        run = run_of(self)
        result = real(self, *args, **rest) if name == "accumulate" else None
        if run is not None:
            allocator.use(run)
        return real(self, *args, **rest) if name != "accumulate" else result

    patch: Any = wrapped
    if isinstance(attribute, cached_property):
        patch = cached_property(wrapped)
        patch.__set_name__(owner, name)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, patch)
        yield


def weights(engine: Engine, name: str) -> torch.Tensor:
    return torch.cat([p.flatten() for p in engine.adapters.weights(name).parameters().values()])


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The answer and both jobs' weights where nothing fails."""
    engine = make_engine()
    answer, jobs = ask(engine), [start(engine, name) for name in ("one", "two")]
    engine.run()
    assert all(job.status == "succeeded" for job in jobs)
    return answer.tokens, weights(engine, "one"), weights(engine, "two")


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["store", "kept", "loss", "back", "update"])
def test_a_job_that_runs_out_tries_again_with_less(
    where: str, undisturbed: tuple[list[int], torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job learns the same: gradients are only added up in other pieces."""
    engine = make_engine()
    allocator = Allocator("two", times=2 if where == "kept" else 1)
    with failing(monkeypatch, engine, where, allocator):
        answer, jobs = ask(engine), [start(engine, name) for name in ("one", "two")]
        reserved = engine.memory.ledger.of("job two")
        while not jobs[1].notes and engine.step():
            pass
        assert engine.memory.ledger.of("job two") < reserved
        assert engine.executor.worker.arena.nbytes == 0, "what waited was given back"
        engine.run()
    assert allocator.failed == allocator.times
    assert [job.status for job in jobs] == ["succeeded", "succeeded"]
    (note,) = jobs[1].notes
    assert "can't allocate memory" in note and "rows=32, keep=inputs" in note and "step 2" in note
    assert not jobs[0].notes and len(jobs[1].history) == 3
    tokens, one, two = undisturbed
    assert answer.tokens == tokens
    torch.testing.assert_close(weights(engine, "one"), one, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights(engine, "two"), two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", ["kept", "back", "update"])
def test_a_second_time_the_job_fails_and_nobody_else(
    where: str, undisturbed: tuple[list[int], torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with failing(monkeypatch, engine, where, Allocator("two", times=1000)):
        answer, jobs = ask(engine), [start(engine, name) for name in ("one", "two")]
        engine.run()
    assert [job.status for job in jobs] == ["succeeded", "failed"] and answer.tokens == undisturbed[0]
    with pytest.raises(OutOfMemory, match=r"job two ran out of memory: .*can't allocate"):
        jobs[1].result()
    assert "two" not in engine.executor.worker.sessions and engine.memory.ledger.of("job two") == 0
    assert engine.adapters.weights("two").version == 1, "its last good version stays"


def test_another_error_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[list[int], torch.Tensor, torch.Tensor]
) -> None:
    engine = make_engine()
    answer, job = ask(engine), start(engine, "one")
    calls = []

    def broken(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Backward, "start", broken)
    engine.run()
    with pytest.raises(JobError, match="job one failed: RuntimeError: shapes do not match"):
        job.result()
    assert len(calls) == 1 and not job.notes and answer.tokens == undisturbed[0]


@faults
def test_a_request_that_fails_alone_fails_no_other(
    fault: Exception, kind: type[CoserveError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that pass together, and a job's window, memory lasts for each but one, or one is broken."""
    engine, wanted = make_engine(), make_engine()
    real = engine.executor.worker.fused.forward

    def forward(travellers: Sequence[Traveller], layers: range | None = None) -> None:
        keys = [s.key for one in travellers if isinstance(one, InferenceBatch) for s in one.segments]
        if len(keys) > 1 or large.sequence.key in keys:
            raise fault
        real(travellers, layers)

    answers, large = [ask(engine), ask(engine)], ask(engine)
    job = start(engine, "one")
    monkeypatch.setattr(engine.executor.worker.fused, "forward", forward)
    engine.run()
    with pytest.raises(kind, match=f"the request {words}"):
        large.result()
    assert [one.result().tokens for one in answers] == [ask(wanted).result().tokens] * 2
    monkeypatch.undo()
    assert job.status == "succeeded" and len(ask(engine).result().tokens) == 40, "the engine lives on"


@faults
def test_draws_that_fail_together_are_repeated_one_by_one(
    fault: Exception, kind: type[CoserveError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory lasts for the head and the draw of one sequence, but for one request's; nothing that was drawn
    before it ran out counts."""
    engine, wanted = make_engine(), ask(make_engine()).result().tokens
    answers, large, real, short = [ask(engine), ask(engine)], ask(engine), Sampler.draw, list[int]()

    def draw(self: Sampler, batch: PassedRows) -> Drawn:
        drawn, keys = real(self, batch), [segment.key for segment in batch.segments]
        if len(keys) > 1 or (large.sequence.key in keys and len(large.tokens) == 5):
            short.append(len(keys))
            raise fault
        return drawn

    monkeypatch.setattr(Sampler, "draw", draw)
    engine.run()
    with pytest.raises(kind, match=f"the request {words}"):
        large.result()
    assert large.tokens == wanted[:5] and {*short} == {1, 2, 3}
    assert [answer.tokens for answer in answers] == [wanted] * 2


@faults
def test_virtual_tokens_that_fail_fail_their_readers(
    fault: Exception,
    kind: type[CoserveError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All answers of that adapter that wait for them, and no others; the next one fills them again."""
    for name in ("prefix", "prompt"):
        with torch.no_grad():
            with_virtual(tiny("llama"), name).save_pretrained(str(tmp_path / name))

    def opened() -> Engine:
        engine = make_engine()
        for name in ("prefix", "prompt"):
            engine.adapters.load(name, tmp_path / name)
        return engine

    def asked(engine: Engine, name: str | None) -> Any:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        return engine.generate([1, 2, 3], adapter=name, sampling=sampling)

    names = ("prompt", "prefix", None, "prompt")
    wanted = {name: asked(opened(), name).result().tokens for name in names}
    engine, real = opened(), FusedPass.fill

    def fill(self: FusedPass, prefix: Prefix) -> None:
        real(self, prefix)
        if prefix.rows:
            self.attention.clean(prefix.pages)
            raise fault

    with monkeypatch.context() as patched:
        patched.setattr(FusedPass, "fill", fill)
        answers = [asked(engine, name) for name in names]
        engine.run()
    for name, answer in zip(names, answers, strict=True):
        if name == "prompt":
            with pytest.raises(kind, match=f"virtual tokens of adapter prompt.* {words}"):
                answer.result()
        else:
            assert answer.result().tokens == wanted[name]
    for name in names:
        assert asked(engine, name).result().tokens == wanted[name]


@faults
def test_windows_that_set_out_together_are_told_apart(
    fault: Exception, kind: type[CoserveError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs' rows and an answer's in one pass: only the job that fails alone as well has failed."""
    engine = make_engine()
    together: list[int] = []
    real = engine.executor.worker.fused.forward

    def forward(travellers: Sequence[Traveller], layers: range | None = None) -> None:
        windows = [one for one in travellers if isinstance(one, ForwardWindow)]
        together.append(len(travellers))
        for session in engine.executor.worker.sessions.values():
            stores = [batch.store for batch in session.micro_batches.values()]
            if session.job == "two" and any(window.store in stores for window in windows):
                raise fault
        real(travellers, layers)

    ask(engine)
    jobs = [start(engine, name) for name in ("one", "two")]
    monkeypatch.setattr(engine.executor.worker.fused, "forward", forward)
    engine.run()
    assert max(together) > 1 and [job.status for job in jobs] == ["succeeded", "failed"]
    with pytest.raises(kind if kind is OutOfMemory else JobError, match=f"job two {words}"):
        jobs[1].result()


def test_rows_that_pass_again_alone_find_their_pages_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of answers and windows together runs out of memory; prompts and answers of many pages."""
    prompts = [list(range(1, 12)), list(range(20, 27)), [3, 4, 5]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    wanted = [make_engine().generate(prompt, sampling=params).result().tokens for prompt in prompts]
    engine = make_engine()
    again: list[int] = []
    real = engine.executor.worker.fused.forward

    def forward(travellers: Sequence[Traveller], layers: range | None = None) -> None:
        batches = [one for one in travellers if isinstance(one, InferenceBatch)]
        if batches and len(travellers) > len(batches):
            again.append(sum(len(segment.new_pages) for batch in batches for segment in batch.segments))
            raise RuntimeError(WORDS)
        real(travellers, layers)

    answers = [engine.generate(prompt, sampling=params) for prompt in prompts]
    start(engine, "one")
    monkeypatch.setattr(engine.executor.worker.fused, "forward", forward)
    engine.run()
    assert any(again), "steps that passed again brought new pages"
    assert [answer.tokens for answer in answers] == wanted


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are enforced on Linux")
def test_a_real_limit(tmp_path: Path) -> None:
    """A process that may map little more than it has, and a job that needs more than that."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    folders = [str(Path(__file__).parents[3] / name) for name in ("src", "tests")]
    code = f"import sys; sys.path[:0] = {folders!r}; exec(open({str(script)!r}).read())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.split() == ["failed", "succeeded", "8"]


LIMITED = """
import resource
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.errors import OutOfMemory
from coserve.train.example import Example
from models import tiny

engine = Engine(tiny("llama", max_position_embeddings=40000),
                EngineConfig(calibrate=False, cache_tokens=256, memory="64GiB"))
engine.generate([1, 2], sampling=SamplingParams(max_tokens=2)).result()
small = [Example((5, 6, 7), (6, 7, -100))] * 4
engine.finetune(small, "warm", LoRAConfig(rank=2), TrainingConfig(batch_size=2)).result()
long = Example(tuple(range(5, 95)) * 400, (*range(6, 95), -100) * 400)  # some hundred megabytes stored
mapped = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (mapped + (60 << 20),) * 2)
answer = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=8, ignore_eos=True))
large = engine.finetune([long] * 2, "large", LoRAConfig(rank=2), TrainingConfig(batch_size=1))
other = engine.finetune(small, "other", LoRAConfig(rank=2), TrainingConfig(batch_size=2))
engine.run()
assert isinstance(large.error, OutOfMemory) and large.notes, large.error
print(large.status, other.status, len(answer.tokens))
"""
