"""The worker between a process's socket and its engine: without a process, a socket or a clock."""

import json
import math
from pathlib import Path

import pytest

from coserve.adapters.files import read_adapter
from coserve.core import disk
from coserve.core.request import SLO, FinishReason
from coserve.engine import jobs as jobs_module
from coserve.engine import served_engine as served_module
from coserve.engine.remembered import CostFile
from coserve.engine.scoring import LossScoring
from coserve.schedule import training_queue
from coserve.train import checkpoint
from coserve.train.example import Example
from coserve.wire.messages import (
    Acknowledge,
    AddAdapter,
    Cancel,
    Drain,
    JobCheckpoint,
    JobEnded,
    JobSpec,
    JobStarted,
    JobStarved,
    JobStep,
    Reply,
    StopJob,
    WeighJob,
)
from desk import Desk, ask, job, write_data
from models import logits_of, tiny, with_lora


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "train.jsonl")


def test_what_steps_cost_is_written_down_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostFile(tmp_path / "calibration.json", {})
    desk = Desk(costs)
    desk.send(ask("soon"))
    desk.until(lambda: len(desk.tokens) == 3)
    assert not costs.path.exists()
    monkeypatch.setattr(served_module, "_REMEMBER_EVERY", 0.0)
    desk.send(ask("later"))
    desk.until(lambda: len(desk.tokens) == 6)
    monkeypatch.undo()
    written: list[object] = []
    desk.worker._background.do("nothing", lambda: None, written.append)  # its one thread takes things in turn
    while not written:
        desk.inbox.get(timeout=10).then()
    found = costs.read()
    assert found is not None and found.weights != found.measured
    desk.send(ask("not again"))
    desk.until(lambda: len(desk.tokens) == 9)
    assert costs.read() == found


def test_one_report_a_step_and_none_without_news(desk: Desk) -> None:
    desk.send(ask("a"), ask("b"))
    desk.until(lambda: len(desk.tokens) == 6)
    assert [[t.id for t in report.tokens] for report in desk.reports] == [[], *[["a", "b"]] * 3]
    assert [t.finish for t in desk.tokens][-2:] == [FinishReason.LENGTH] * 2
    assert desk.reports[0].stats is not None and all(r.stats is None for r in desk.reports[1:])
    assert desk.worker.report() is None


def test_statistics_know_that_a_cancelled_answer_is_gone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coserve.engine.served_engine._STATS_EVERY", 0.0)
    desk.send(ask("a", 50))
    desk.step()
    told = [report.stats for report in desk.reports if report.stats]
    assert told[-1].running == 1 and told[-1].free_pages < 64
    desk.send(Cancel("a"))  # no step counts any more
    desk.until(lambda: not desk.worker.has_work)
    told = [report.stats for report in desk.reports if report.stats]
    assert told[-1].running == 0 and told[-1].free_pages == 64


def test_statistics_say_once_that_no_more_was_done(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are differences between them: without it those of the last work would stay."""
    monkeypatch.setattr("coserve.engine.served_engine._STATS_EVERY", 0.0)
    desk.send(ask("a"))
    desk.until(lambda: not desk.worker.has_work)
    last = [report.stats for report in desk.reports if report.stats][-1]
    more = [report and report.stats for report in (desk.worker.report() for _ in range(3))]
    assert [one and one.steps for one in more] == [last.steps, None, None] and last.steps > 0


def test_a_late_cancel_and_a_name_used_twice(desk: Desk) -> None:
    desk.send(ask("a", 50), ask("a"), Cancel("nobody"))
    desk.step()
    (fault,) = [token.fault for token in desk.tokens if token.fault]
    assert fault.kind == "ConflictError"
    desk.send(Cancel("a"))
    desk.until(lambda: not desk.worker.has_work)
    assert not any(token.finish for token in desk.tokens) and desk.engine.stats().free_pages == 64
    desk.send(ask("a"))  # the name is free again
    desk.until(lambda: desk.tokens[-1].finish)


def test_the_end_of_a_cancelled_answer_is_not_that_of_the_next_by_its_name(desk: Desk) -> None:
    desk.send(ask("a", 50))
    desk.step()
    desk.reports.clear()
    desk.send(Cancel("a"), ask("a", 3))
    desk.until(lambda: not desk.worker.has_work)
    assert [token.token is not None for token in desk.tokens] == [True] * 3
    assert [token.finish for token in desk.tokens] == [None, None, FinishReason.LENGTH]


def test_the_age_of_a_request_counts(desk: Desk) -> None:
    desk.send(ask("a", arrival=-5.0))
    (answer,) = desk.engine.completions.values()
    assert 4.9 < desk.engine.clock() - answer.sequence.request.arrival < 15


def test_a_reply_never_reaches_the_next_server(desk: Desk, tmp_path: Path) -> None:
    with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path))
    desk.send(AddAdapter(1, "x", str(tmp_path)), ask("a", 20))
    desk.worker.connected()
    desk.until(lambda: "x" in desk.engine.adapters.bank.names)
    desk.send(AddAdapter(2, "x", str(tmp_path)))
    desk.until(lambda: desk.replies)
    assert desk.replies == [Reply(2)]
    assert not desk.tokens


def test_news_is_repeated_until_it_is_acknowledged(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(job(data, tmp_path / "j", every=3))
    assert desk.ended().status == "succeeded"
    first = desk.news()
    kinds = [type(news).__name__ for news in first]
    assert kinds[0] == "JobStarted" and kinds[-1] == "JobEnded" and kinds.count("JobStep") == 6
    assert desk.worker.connected().jobs == ()
    desk.reports.clear()
    desk.report()
    assert desk.news() == first
    desk.send(Acknowledge(4))
    desk.worker.connected()
    desk.reports.clear()
    desk.report()
    assert desk.news() == first[4:]
    # Its end waits to be heard of: the server only does not know yet.
    desk.send(job(data, tmp_path / "j"))
    assert desk.worker.connected().jobs == ()
    desk.send(Acknowledge(len(first)))
    desk.send(job(data, tmp_path / "j"))
    desk.worker.connected()
    desk.reports.clear()
    desk.asked = 0
    assert desk.ended().step == 6  # nothing was left to do but to say so
    assert [type(news) for news in desk.news()] == [JobStarted, *[JobStep] * 6, JobCheckpoint, JobEnded]


def test_steps_that_no_server_has_stored_are_told_by_the_engine_that_resumes(
    desk: Desk, data: Path, tmp_path: Path
) -> None:
    """The first engine ends some time after its second checkpoint, and with it all that it told after the
    third step."""
    started = job(data, tmp_path / "j", every=2, options={"epochs": 1000})
    desk.send(started)
    desk.until(lambda: len(desk.news(JobStep)) == 3)
    stored = next(i for i, news in enumerate(desk.news()) if isinstance(news, JobStep) and news.step == 3)
    desk.send(Acknowledge(stored + 1))
    desk.until(lambda: len(desk.news(JobCheckpoint)) == 2)
    desk.send(StopJob("j", keep=False))
    desk.ended()
    newest = checkpoint.newest_checkpoint(tmp_path / "j")
    assert newest is not None and newest.step >= 4
    other = Desk()
    other.send(started)
    other.until(lambda: len(other.news(JobStep)) > newest.step - 3)
    begun, *again = other.news()
    assert isinstance(begun, JobStarted) and begun.step == newest.step
    assert again[: newest.step - 3] == desk.news(JobStep)[3 : newest.step]
    assert [news.step for news in other.news(JobStep)] == [*range(4, newest.step + 2)]


def test_a_job_without_time_to_train_is_told_of_once(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_queue, "STARVED", 0.02)
    desk.send(job(data, tmp_path / "j", options={"epochs": 100_000}))
    desk.until(lambda: desk.news(JobStarted))
    desk.send(ask("a", 200, slo=SLO(between_tokens=0.0)))
    desk.until(lambda: desk.news(JobStarved))
    (begun,) = desk.news(JobStarved)
    assert isinstance(begun, JobStarved) and begun.job == "j" and begun.seconds and begun.seconds > 0.02
    desk.send(Acknowledge(1000))  # so that nothing is repeated
    assert desk.worker.connected().starved[0].seconds >= begun.seconds
    desk.send(Cancel("a"))
    desk.until(lambda: len(desk.news(JobStarved)) == 2)
    assert desk.news(JobStarved)[1] == JobStarved("j", None)
    desk.send(Acknowledge(1000))
    assert desk.worker.connected().starved == ()
    desk.send(StopJob("j", keep=False))
    desk.until(lambda: desk.news(JobEnded))
    assert len(desk.news(JobStarved)) == 2


def test_paused_before_its_data_is_read_and_started_again(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(job(data, tmp_path / "j"), StopJob("j", keep=True), job(data, tmp_path / "j", weight=2.0))
    assert desk.ended().status == "paused"
    assert desk.ended().status == "succeeded"
    desk.send(job(data, tmp_path / "k", "k"), StopJob("k", keep=False))
    assert desk.ended().status == "cancelled" and not (tmp_path / "k").exists()
    assert desk.engine.adapters.bank.names == []


@pytest.mark.parametrize("written", [False, True])
def test_stopped_just_after_a_checkpoint_was_due(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """It is written once: two threads would have torn each other's folder away."""
    steps: list[int] = []
    write = jobs_module.write_checkpoint
    monkeypatch.setattr(
        jobs_module, "write_checkpoint", lambda *given: (steps.append(given[1].step), write(*given))[1]
    )
    # So long that it cannot end while a busy machine still writes the first one.
    desk.send(job(data, tmp_path / "j", every=2, options={"epochs": 1000}))
    desk.until(lambda: len(desk.news(JobCheckpoint if written else JobStep)) == (1 if written else 2))
    stopped_at = len(desk.news(JobStep))
    desk.send(StopJob("j", keep=True))
    assert desk.ended().status == "paused"
    assert steps == sorted({*range(2, stopped_at, 2), stopped_at})
    assert [told.step for told in desk.news(JobCheckpoint)] == steps


def test_cancelled_in_the_midst(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(job(data, tmp_path / "j", every=2, validation=str(data)))
    desk.until(lambda: len(desk.news(JobStep)) == 3)
    desk.send(StopJob("j", keep=False))
    assert desk.ended().status == "cancelled"
    assert [c.step for c in desk.news(JobCheckpoint)] == [2]
    desk.until(lambda: not desk.worker.has_work)
    assert desk.engine.stats().free_pages == 64 and sum(desk.engine.adapters.cache.nbytes()) == 0


def test_a_drain_does_not_wait_for_validation(desk: Desk, data: Path, tmp_path: Path) -> None:
    """Not even where the training itself is over; then the last checkpoint is told of without its loss."""
    desk.send(job(data, tmp_path / "j", every=100, validation=str(data)))
    desk.until(lambda: len(desk.news(JobStep)) == 6)
    desk.send(Drain())
    desk.until(lambda: desk.worker.is_drained)
    (told,) = desk.news(JobCheckpoint)
    assert (told.step, told.validation_loss) == (6, None) and desk.ended().status == "succeeded"


def test_a_checkpoint_that_cannot_be_written_fails_the_job(
    desk: Desk, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "sync_path", full)
    desk.send(job(data, tmp_path / "j", every=2, validation=str(data)))
    ended = desk.ended()
    assert (ended.status, ended.fault.kind) == ("failed", "JobError") and "No space" in ended.fault.text
    assert not desk.news(JobCheckpoint)
    desk.until(lambda: not desk.worker.has_work)
    assert sum(desk.engine.adapters.cache.nbytes()) == 0 and desk.engine.stats().running == 0


def test_what_a_job_may_not_be(desk: Desk, data: Path, tmp_path: Path) -> None:
    cases = {
        "options: ": JobSpec("j", str(data), str(tmp_path), {"batch_size": "many"}),
        "batch_size": JobSpec("j", str(data), str(tmp_path), {"batch_size": 0}),
        "schedule": JobSpec("j", str(data), str(tmp_path), {"schedule": "sideways"}),
        "no_such": JobSpec("j", str(data), str(tmp_path), {}, {"targets": ["no_such"]}),
        "keeping.every": JobSpec("j", str(data), str(tmp_path), every=0),
        "nothing": JobSpec("j", str(data), str(tmp_path), start_from=str(tmp_path / "nothing")),
    }
    for said, spec in cases.items():
        desk.send(spec)
        ended = desk.ended()
        assert ended.status == "failed" and said in ended.fault.text, said
        desk.send(Acknowledge(10**9))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x", "completion": "x" * 300}))
    desk.send(job(data, tmp_path / "j", validation=str(long)))
    assert "validation 1 of 1 example is longer than the model's" in desk.ended().fault.text


def test_going_on_from_an_adapter(desk: Desk, data: Path, tmp_path: Path) -> None:
    with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path / "peft"))
    desk.send(job(data, tmp_path / "j", start_from=str(tmp_path / "peft")))
    assert desk.ended().status == "succeeded"
    base = desk.engine.base
    before = read_adapter(tmp_path / "peft", "before", base, base.dtype, base.device)
    after = read_adapter(tmp_path / "j" / "step-000006", "after", base, base.dtype, base.device)
    assert before.bypasses.outputs.keys() == after.bypasses.outputs.keys()
    moved = [
        float((b.a - a.a).abs().max())
        for b, a in zip(before.bypasses.outputs.values(), after.bypasses.outputs.values(), strict=True)
    ]
    assert 0 < max(moved) < 0.1


def test_weights_share_the_machine(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(WeighJob("nobody", 2.0), job(data, tmp_path / "j"), WeighJob("j", 3.0))
    desk.until(lambda: desk.news(JobStarted))
    assert desk.engine.jobs["j"].weight == 3.0
    desk.send(WeighJob("j", 0.5))
    assert desk.engine.jobs["j"].weight == 0.5
    assert desk.ended().status == "succeeded"


def test_a_drain_waits_for_answers_and_checkpoints(desk: Desk, data: Path, tmp_path: Path) -> None:
    desk.send(job(data, tmp_path / "j"), job(data, tmp_path / "unread", "late"))
    desk.until(lambda: len([step for step in desk.news(JobStep) if step.job == "j"]) == 2)
    desk.send(ask("a", 40))
    desk.until(lambda: desk.tokens)
    desk.send(Drain(), ask("b"), job(data, tmp_path / "new", "new"))
    desk.until(lambda: desk.worker.is_drained)
    assert desk.reports[-1].drained and not any(report.drained for report in desk.reports[:-1])
    assert [t.id for t in desk.tokens if t.finish] == ["a"]
    (refused,) = [t for t in desk.tokens if t.fault]
    assert (refused.id, refused.fault.kind) == ("b", "EngineLost")
    ends = {end.job: end for end in desk.news(JobEnded)}
    assert set(ends) == {"j", "late"} and {end.status for end in ends.values()} == {"paused"}
    assert checkpoint.newest_checkpoint(tmp_path / "j").step == ends["j"].step >= 2


def test_the_validation_loss_is_that_of_its_version(desk: Desk, tmp_path: Path) -> None:
    """Against transformers: the mean over the labels of all examples, on an adapter replaced meanwhile; and
    the share of labels that are the likeliest token, as two of these are."""
    likely = logits_of(with_lora(tiny("llama"), 1), (5, 6, 7, 8)).argmax(-1).tolist()
    right = Example((5, 6, likely[1], 8, 2), (-100, likely[1], 8, 2, -100))
    examples = [Example((5, 6, 7, 8), (-100, 7, 8, -100)), Example((9, 3), (3, -100)), right] * 2
    losses, hits = list[float](), list[bool]()
    for example in examples:
        logprobs = logits_of(with_lora(tiny("llama"), 1), example.tokens).log_softmax(-1)
        labelled = [(row, label) for row, label in zip(logprobs, example.labels, strict=True) if label >= 0]
        losses += [-float(row[label]) for row, label in labelled]
        hits += [int(row.argmax()) == label for row, label in labelled]
    assert 0 < sum(hits) < len(hits)
    for seed in (1, 2):
        with_lora(tiny("llama"), seed).save_pretrained(str(tmp_path / str(seed)))
    engine = desk.engine
    scoring = LossScoring(engine, engine.adapters.load("x", tmp_path / "1").key, examples)
    engine.adapters.load("x", tmp_path / "2")
    most = 0
    while not scoring.advance():
        most = max(most, engine.stats().waiting)
        engine.step()
    assert scoring.result is not None and scoring.result.loss == pytest.approx(
        sum(losses) / len(losses), rel=1e-4
    )
    assert scoring.result.metrics == {"mean_token_accuracy": sum(hits) / len(hits)}
    assert most == 2 and len(engine.adapters.cache) == 1


def test_a_job_whose_answers_are_sampled_first_trains_and_keeps_its_weight(
    desk: Desk, tmp_path: Path
) -> None:
    """It has no work for the scheduler when it begins."""
    data = tmp_path / "prompts.jsonl"
    asked = {"messages": [{"role": "user", "content": "hi"}], "answer": "x"}
    data.write_text(f"{json.dumps(asked)}\n" * 2)
    objective = {
        "type": "reinforcement",
        "grader": {"type": "regex", "pattern": "[a-m].*"},
        "group_size": 2,
        "max_tokens": 3,
    }
    desk.send(job(data, tmp_path / "j", weight=2.0, objective=objective, options={"epochs": 2}))
    desk.until(lambda: desk.news(JobStarted))
    desk.send(WeighJob("j", 3.0))
    assert desk.ended().status == "succeeded"
    steps = desk.news(JobStep)
    assert len(steps) == 2
    assert all(isinstance(step, JobStep) and "reward" in step.metrics for step in steps)


def test_a_job_learns_from_a_teacher_in_a_folder(desk: Desk, data: Path, tmp_path: Path) -> None:
    """From the base its loss is what the base has beyond its likeliest tokens."""
    with_lora(tiny("llama"), 1).save_pretrained(str(tmp_path / "peft"))
    objective, losses = {"type": "distillation", "top_k": 60, "temperature": 1.0}, {}
    for name, teacher in (("taught", str(tmp_path / "peft")), ("alone", None)):
        more = {"objective": objective, "teacher": teacher, "validation": str(data), "every": 3}
        desk.send(job(data, tmp_path / name, name, **more))
        assert desk.ended().status == "succeeded"
        first, *_, last = [one for one in desk.news(JobStep) if isinstance(one, JobStep) and one.job == name]
        losses[name] = first.loss
        assert last.loss != first.loss and 0.5 < first.metrics["teacher/top_k_mass"] < 1.0
        (_, kept) = [one for one in desk.news(JobCheckpoint) if one.job == name]
        assert isinstance(kept, JobCheckpoint) and kept.validation_loss is not None
        mass = first.metrics["teacher/top_k_mass"]
    assert losses["alone"] == pytest.approx(-math.log(mass), rel=0.1) and losses["taught"] > losses["alone"]
    desk.send(job(data, tmp_path / "none", objective=objective, teacher=str(tmp_path / "nobody")))
    ended = desk.ended()
    assert ended.status == "failed" and ended.fault is not None
    assert ended.fault.text == "the adapter 'nobody', which it begins with or learns from, was deleted"
