"""A real engine's process over its socket: streams, kills, resumed jobs, drains."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bases import draw_stitch, wide_model, write_stitch
from coserve import tiny as embedded
from coserve.config import StitchedChain
from coserve.core.request import BASE, FinishReason, Request, SamplingParams
from coserve.train.checkpoint import newest_checkpoint
from coserve.wire.child import ORPHANED
from coserve.wire.messages import (
    AddAdapter,
    Cancel,
    Drain,
    JobCheckpoint,
    JobEnded,
    JobSpec,
    JobStarted,
    JobStep,
    RemoveAdapter,
    StopJob,
)
from engine_process import EngineProcess, Server
from models import greedy, save, tiny

EXACT = {"deterministic": True}
PROMPTS = {"a": [5, 6, 7], "b": list(range(1, 40)), "c": [9]}
DRAWN = {"max_tokens": 40, "temperature": 1.0, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = [{"prompt": f"number {i}?", "completion": f" it is {i * i}"} for i in range(24)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One for the tests that kill nothing; the last of them drains it."""
    with EngineProcess(tmp_path_factory.mktemp("engine")) as process:
        process.launch(model).close()
        yield process


def test_bases_and_chains_of_two_in_one_process(model: Path, tmp_path: Path) -> None:
    """A chain that cannot be opened is left out, and all else is served."""
    wide = save(wide_model(), tmp_path / "wide")
    good = write_stitch(tmp_path / "good", 2, 1, *draw_stitch(64, 96))
    broken = write_stitch(tmp_path / "broken", 2, 1, *draw_stitch(64, 64))
    stitched = {
        name: StitchedChain(path, BASE, "wide") for name, path in (("good@2", good), ("bad@2", broken))
    }
    with EngineProcess(tmp_path) as process:
        server = process.launch(model, bases={"wide": str(wide)}, stitched=stitched)
        assert server.hello.stitched == ("good@2",) and [*server.hello.bases] == ["wide"]
        sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        asked: dict[str, dict[str, str]] = {
            "first": {},
            "wide": {"base": "wide"},
            "chain": {"adapter": "good@2"},
        }
        server.send(*(Request(name, (5, 6, 7), sampling, **where) for name, where in asked.items()))
        server.send(Request("bad", (5, 6, 7), sampling, adapter="bad@2"))
        server.finished(*asked, "bad")
        assert len({tuple(server.tokens[name]) for name in asked}) == 3
        fault = server.last["bad"].fault
        assert fault is not None and fault.kind == "AdapterNotFound"
        server.close()


def job(name: str, data: Path, folder: Path, **fields: object) -> JobSpec:
    options = {"batch_size": 2, "epochs": 2, "learning_rate": 1e-2, "rows": 64, "seed": 3}
    return JobSpec(name, str(data), str(folder), options, {"rank": 2, "dropout": 0.1}, **fields)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_streams_and_jobs_go_on_after_a_kill(model: Path, data: Path, tmp_path: Path) -> None:
    """Tokens by position, losses by step and the weights at the end are those of an uninterrupted run."""
    with EngineProcess(tmp_path, **EXACT) as engine:
        first = engine.launch(model)
        assert first.hello.positions == 256 and first.hello.vocabulary == 96 and first.hello.parameters > 1e4
        for name, prompt in PROMPTS.items():
            first.submit(name, prompt, **DRAWN)
        first.submit("greedy", [5, 6, 7], max_tokens=40)
        whole = dict(first.finished(*PROMPTS, "greedy").tokens)
        assert whole["greedy"] == greedy(tiny("llama"), [5, 6, 7], 40)
        first.send(job("j1", data, tmp_path / "whole", every=5))
        assert first.ended("j1").status == "succeeded"
        (started,) = first.of(JobStarted)
        assert (started.steps, started.examples, started.step) == (24, 24, 0)
        losses = [step.loss for step in first.of(JobStep)]
        assert [step.step for step in first.of(JobStep)] == list(range(1, 25))
        assert [c.step for c in first.of(JobCheckpoint)] == [5, 10, 15, 20, 24]
        assert first.numbers == list(range(1, len(first.numbers) + 1))
        first.acknowledge()
        first.send(job("j1", data, tmp_path / "cut", every=5))
        first.until(lambda s: len(s.of(JobCheckpoint)) >= 7)
        for name, prompt in PROMPTS.items():
            first.submit(f"{name}2", prompt, **DRAWN)
        first.until(lambda s: all(len(s.tokens.get(f"{name}2", ())) >= 8 for name in PROMPTS))
        engine.kill()
    kept = newest_checkpoint(tmp_path / "cut")
    assert kept is not None and 10 <= kept.step < 24
    with EngineProcess(tmp_path, **EXACT) as engine:
        second = engine.launch(model)
        assert second.hello.generation != first.hello.generation
        second.send(job("j1", data, tmp_path / "cut", every=5))
        second.send(job("j1", data, tmp_path / "cut", every=5))  # a second time changes nothing
        for name, prompt in PROMPTS.items():
            said = tuple(first.tokens[f"{name}2"])
            assert 8 <= len(said) < 40
            second.submit(name, prompt, said, **DRAWN)
        second.submit("over", [5], tuple(whole["a"]), max_tokens=40)
        second.finished(*PROMPTS, "over")
        for name in PROMPTS:
            assert first.tokens[f"{name}2"] + second.tokens[name] == whole[name]
            assert second.last[name].finish is FinishReason.LENGTH
        assert "over" not in second.tokens and second.last["over"].finish is FinishReason.LENGTH
        assert second.ended("j1").step == 24
        (started,) = second.of(JobStarted)
        assert started.step == kept.step
        # Nobody acknowledged the first ones, so the checkpoint has them.
        assert [s.loss for s in second.of(JobStep)] == losses
        # The one it went on from is told again: its engine may have died before that was written down.
        assert second.of(JobCheckpoint)[0].digest == kept.digest
        engine.process.stdin.close()  # as if the supervisor were killed
        assert engine.process.wait(60) == ORPHANED
    one, other = weights(tmp_path / "whole/step-000024"), weights(tmp_path / "cut/step-000024")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_job_beside_answers_survives_its_server(engine: EngineProcess, data: Path, tmp_path: Path) -> None:
    """The server dies; answers go with it, the job goes on, and its news waits for the next server."""
    first = Server(engine.socket)
    first.submit("long", [1, 2, 3], max_tokens=200)
    first.send(job("j1", data, tmp_path / "job", every=8, validation=str(data)))
    first.until(lambda s: len(s.of(JobStep)) >= 2)
    heard = len(first.news)
    first.close()
    second = Server(engine.socket)
    assert second.ended("j1").status == "succeeded"
    assert "long" not in second.last
    assert second.numbers[0] == 1 and second.news[:heard] == first.news[:heard]
    checkpoints = second.of(JobCheckpoint)
    assert [c.step for c in checkpoints] == [8, 16, 24]
    assert checkpoints[0].validation_loss > checkpoints[-1].validation_loss > 0
    second.acknowledge()
    second.send(AddAdapter(1, "done", checkpoints[-1].path), AddAdapter(2, "none", str(tmp_path / "no")))
    second.until(lambda s: len(s.replies) == 2)
    assert second.replies[1].fault is None and second.replies[2].fault.kind == "AdapterError"
    third = Server(engine.socket)  # takes the place of the second
    params = SamplingParams(max_tokens=3, seed=1)
    third.send(
        Request("tuned", (5, 6, 7), params, adapter="done"),
        Request("lost", (5,), params, adapter="none"),
    )
    third.finished("tuned", "lost")
    assert third.last["lost"].fault.kind == "AdapterNotFound"
    third.send(RemoveAdapter(3, "done"), RemoveAdapter(4, "done"))
    third.until(lambda s: len(s.replies) == 2)
    assert third.news == []
    assert third.replies[3].fault is None and third.replies[4].fault.kind == "AdapterNotFound"


def test_cancelling_frees_at_once_and_faults_come_back(
    engine: EngineProcess, data: Path, tmp_path: Path
) -> None:
    server = Server(engine.socket)
    server.submit("gone", [1] * 50, max_tokens=200)
    server.until(lambda s: s.tokens.get("gone"))
    server.send(Cancel("gone"))
    server.submit("scored", list(range(1, 30)), max_tokens=0, prompt_logprobs=0)
    server.submit("empty", [], max_tokens=1)
    server.send(job("f1", tmp_path / "none.jsonl", tmp_path / "job"))
    server.send(JobSpec("f2", str(data), str(tmp_path / "j2"), {"bach_size": 2}))
    assert server.ended("f1").fault.kind == "DataError"
    assert "bach_size" in server.ended("f2").fault.text
    server.finished("scored", "empty")
    assert len(server.prompt_logprobs["scored"]) == 28 and "scored" not in server.tokens
    assert server.last["empty"].fault.kind == "EmptyPrompt"
    server.until(lambda s: s.stats is not None and s.stats.running == 0)
    assert server.stats.free_pages == server.stats.pages
    assert not server.is_over("gone")


def test_without_work_it_sleeps(engine: EngineProcess) -> None:
    server = Server(engine.socket)
    server.submit("a", [1, 2], max_tokens=3)
    server.finished("a").until(lambda s: s.stats is not None and s.stats.running == 0)
    stat = Path(f"/proc/{engine.process.pid}/stat")
    before = sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
    time.sleep(0.5)
    after = sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
    assert after - before <= 5  # hundredths of a second; one that spins takes 50


def test_pause_resume_and_drain(engine: EngineProcess, data: Path, tmp_path: Path) -> None:
    server = Server(engine.socket)
    server.send(job("p1", data, tmp_path / "job", every=100))
    server.until(lambda s: s.of(JobStep, "p1"))
    server.send(StopJob("p1", keep=True))
    ended = server.ended("p1")
    assert ended.status == "paused" and 1 <= ended.step < 24
    assert [c.step for c in server.of(JobCheckpoint, "p1")] == [ended.step]
    server.send(job("p1", data, tmp_path / "job", every=100))
    server.until(lambda s: len(s.of(JobStarted, "p1")) == 2 and s.of(JobStep, "p1")[-1].step > ended.step)
    server.submit("answer", [1, 2, 3], max_tokens=60)
    server.until(lambda s: s.tokens.get("answer"))
    engine.process.send_signal(signal.SIGTERM)  # its server knows when to end, and says so
    server.submit("late", [4, 5, 6], max_tokens=5)
    server.finished("late")
    server.send(Drain())
    server.until(lambda s: s.drained)
    assert server.ended("p1").status == "paused"
    assert server.tokens["answer"] == greedy(tiny("llama"), [1, 2, 3], 60)
    assert engine.phase().state == "drained"
    assert engine.process.wait(60) == 0
    kept = newest_checkpoint(tmp_path / "job")
    assert kept is not None and kept.step == server.of(JobCheckpoint, "p1")[-1].step > ended.step


def test_sigterm_ends_an_engine_that_is_loading_at_once(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, calibrate=True) as engine:
        engine.feed(embedded.path())
        while engine.phase().state != "measuring":
            pass
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(60) == -signal.SIGTERM


def test_one_that_comes_after_another_does_not_measure_and_ends_on_sigterm_once_its_server_has_gone(
    model: Path, data: Path, tmp_path: Path
) -> None:
    remembered = tmp_path / "calibration.json"
    for _ in range(5):  # on a busy machine what was measured is not certain, and not kept
        with EngineProcess(tmp_path, calibrate=True) as engine:
            engine.feed(model, calibration=str(remembered))
            assert [engine.phase().state for _ in range(4)] == ["standby", "loading", "measuring", "ready"]
            engine.kill()
        if remembered.exists():
            break
    else:
        pytest.skip("the machine was too busy to measure in all of five starts")
    first = remembered.read_bytes()
    with EngineProcess(tmp_path, calibrate=True) as engine:
        server = engine.launch(model, calibration=str(remembered))  # and does not measure
        assert remembered.read_bytes() == first  # no step has corrected anything
        server.send(job("p1", data, tmp_path / "job", every=100))
        server.until(lambda s: s.of(JobStep, "p1"))
        engine.process.send_signal(signal.SIGTERM)
        server.submit("answer", [1, 2, 3], max_tokens=5)
        server.finished("answer")
        assert not server.of(JobEnded, "p1")
        server.close()
        assert engine.phase().state == "drained"
        assert engine.process.wait(60) == 0
    kept = newest_checkpoint(tmp_path / "job")
    assert kept is not None and kept.step >= server.of(JobStep, "p1")[-1].step


def test_a_model_that_is_none_says_so(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as broken:
        broken.feed(tmp_path / "nothing")
        assert [broken.phase().state for _ in range(2)] == ["standby", "loading"]
        failed = broken.phase()
        assert (failed.state, failed.kind) == ("failed", "ModelNotFound") and "nothing" in failed.text
        assert broken.process.wait(60) == 1
