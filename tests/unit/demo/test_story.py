"""The demo as a whole, short, on the embedded model; and its parts that need the tokenizer or the engine."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from coserve import Engine, EngineConfig, tiny
from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json, rounded
from coserve.demo import lessons, score, story, tables
from coserve.demo.figures import StepLoss
from coserve.demo.lessons import TASKS, from_file, new_tasks
from coserve.demo.story import Options, Story
from coserve.demo.view import make_view
from coserve.errors import DataError, ServerError
from coserve.kernels.cpu import choose_dtype
from coserve.train.example import IGNORED, Example
from coserve_benchmarks.demo_page import read_runs


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny.path())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.path(), EngineConfig(dtype="float32", calibrate=False))


class Elsewhere:
    """A trainer in no process, with a step of 100 tokens each half second."""

    def begin(self) -> None: ...

    def end(self, started: float) -> tuple[list[tuple[float, float]], list[StepLoss]]:
        return [(started + 0.5, 100.0), (started + 1.0, 100.0)], [StepLoss(0.5, "pirate", 2.0)]


@contextmanager
def elsewhere(*given: object) -> Iterator[Elsewhere]:
    yield Elsewhere()


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without calibration, which only the process that Ctrl-C ends needs, and with few requests."""
    monkeypatch.setattr(story, "EngineConfig", partial(EngineConfig, calibrate=False))
    monkeypatch.setattr(story, "WARM_UP", 4)
    monkeypatch.setattr(tables, "BACKLOG", 16)


@pytest.mark.usefixtures("unmeasured")
def test_the_whole_story_in_a_few_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lessons, "TRAINED_QUESTIONS", 400)
    monkeypatch.setattr(story, "trainer", elsewhere)
    output = io.StringIO()
    # Requests that bear so much leave training time on any machine.
    options = Options(seconds=2.0, share=0.3, slowdown=20.0)
    told = Story(options, make_view(plain=True, quiet=False, file=output))
    report, text = told.tell(), output.getvalue()
    assert not report.stopped and report.code == measured_code()
    assert [way.name for way in report.ways] == ["alone", "coserve", "taking turns", "two processes"]
    alone, coserve, _, processes = report.ways
    assert report.requests == max(1, round(2.0 * 0.3 * report.capacity))
    assert all(way.answers + way.unanswered == report.requests for way in report.ways)
    assert alone.training_tokens_per_second == 0.0 and alone.slowdown is None
    assert coserve.training_tokens_per_second > 0
    assert (processes.training_tokens_per_second, processes.steps) == (100.0, 1)
    assert told.engine.scheduler.policy.__class__.__name__ == "Hybrid"  # again, after the turns
    assert [learned.adapter for learned in report.adapters] == list(TASKS)
    for learned in report.adapters:
        assert learned.held_out_loss_before is not None and learned.exact_before == 0.0
        assert learned.held_out_loss_after is not None
    for heading in (
        "Held-out questions",
        "exactly as expected",
        "The same load in every way",
        "Longest wait",
    ):
        assert heading in text
    assert "bound of 20 on their slowdown" in text
    written = tmp_path / "demo.json"
    written.write_text(compact_json(report.as_dict()))
    ((name, read),) = read_runs(tmp_path)
    assert name == "demo.json" and rounded(read.as_dict()) == rounded(report.as_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_real_questions_and_real_arrivals(tmp_path: Path) -> None:
    """And a real trainer, in a process of its own."""
    data, trace = tmp_path / "sums.jsonl", tmp_path / "trace.csv"
    lines = [{"question": f"What is {i} and {i}?", "answer": f"Together {i + i}."} for i in range(40)]
    data.write_text("\n".join(map(json.dumps, lines)))
    rows = [f"2023-11-16 18:15:{i:02d}.0000000,{50 + 37 * i},{5 + i % 20}" for i in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    output = io.StringIO()
    report = Story(Options(data, trace, seconds=2.0), make_view(plain=True, quiet=False, file=output)).tell()
    assert "sums.jsonl: 40 examples, 8 held out" in output.getvalue()
    assert "Arrivals, from request" in output.getvalue() and "Prompts x " in output.getvalue()
    assert report.trace is not None and report.trace["rate"] == pytest.approx(report.capacity / 2, rel=0.1)
    assert [learned.exact_after for learned in report.adapters] == [None, None]
    assert all(learned.held_out_loss_after is not None for learned in report.adapters)
    assert report.ways[-1].name == "two processes" and report.ways[-1].training_tokens_per_second > 0


@pytest.mark.slow
def test_ctrl_c_closes_with_what_was_measured(tmp_path: Path) -> None:
    figures, drawn = tmp_path / "figures.json", tmp_path / "demo.svg"
    code = "from coserve.cli.app import main; main()"
    options = ["--seconds", "20", "--share", "0.2", "--json", str(figures), "--picture", str(drawn)]
    command = [sys.executable, "-c", code, "demo", "--plain", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("coserve |"):  # the second way is under way
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == ""
    assert "Stopped" in rest and "between tokens, p50" in rest and "Longest wait" in rest
    report = json.loads(figures.read_text())
    assert report["stopped"] and report["share"] == 0.2
    assert [way["name"] for way in report["ways"]] == ["alone"]  # a part of one compares with nothing
    assert drawn.read_text().startswith("<svg")


def test_the_precision_is_chosen_by_measurement() -> None:
    name, why = choose_dtype()
    assert name in ("float32", "bfloat16") and name in why and "ms" in why


def test_held_out_questions_are_not_in_the_training(tokenizer: Any) -> None:
    for lesson in new_tasks(tokenizer, 20):
        trained = {example.tokens for example in lesson.examples}
        assert len(lesson.held_out) == 20
        assert not trained & {question.example.tokens for question in lesson.held_out}


def test_a_file_is_split_into_two_halves_and_some_to_ask(tokenizer: Any, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        "\n".join(json.dumps({"prompt": f"Say {i}:", "completion": f" {i}" * 30}) for i in range(50))
    )
    (first, second), said = from_file(data, tokenizer, questions=20, longest=32)
    assert len(first.held_out) == 10 and first.held_out == second.held_out
    assert len(first.examples) + len(second.examples) == 40
    assert "40 were cut to 32 tokens" in said
    assert first.held_out[0].text.startswith("Say ")


def test_plain_text_is_asked_to_go_on(tokenizer: Any, tmp_path: Path) -> None:
    data = tmp_path / "tales.txt"
    data.write_text("\n\n".join(f"Tale {i} begins here and ends there." for i in range(10)))
    (first, _), _ = from_file(data, tokenizer, questions=20, longest=64)
    asked = first.held_out[0]
    assert asked.text.startswith("Tale") and f"{asked.text} {asked.answer}".endswith("ends there.")


def test_too_few_examples_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(DataError, match="at least 5"):
        from_file(data, tokenizer, questions=20, longest=64)


@pytest.mark.parametrize(
    ("given", "expected", "right"),
    [("Arr!", "Arr!", True), (" Arr!\n", "Arr!", True), ("arr!", "Arr!", False), ("", "Arr!", False)],
)
def test_answers_match_but_for_space_around_them(given: str, expected: str, right: bool) -> None:
    assert score.matches(given, expected) is right


def test_the_held_out_loss_is_that_of_the_labels(engine: Engine) -> None:
    """Against the model's own forward pass."""

    assert engine.text is not None
    tokens = engine.text.encode("Mira lives in Tolmen. Where does Mira live?")
    labels = (*(IGNORED for _ in tokens[:-4]), *tokens[-3:], IGNORED)
    loss = score.held_out_loss(engine, engine.step, [Example(tokens, labels)] * 2, None)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    own = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert math.isclose(loss, float(own), rel_tol=1e-3, abs_tol=1e-4)


def test_marks_count_exact_matches(engine: Engine, tokenizer: Any) -> None:
    lesson = new_tasks(tokenizer, 4)[0]
    marks = score.score_model(engine, engine.step, lesson.held_out, None)
    assert len(marks.answers) == 4 and marks.right == 0 and marks.share == 0.0
    assert marks.loss > 1.0


def test_a_trainer_that_cannot_be_had_costs_its_own_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(*given: object) -> Iterator[Elsewhere]:
        raise ServerError("the training process failed: no memory")
        yield Elsewhere()

    monkeypatch.setattr(story, "trainer", failing)
    output = io.StringIO()
    told = Story(Options(), make_view(plain=True, quiet=False, file=output))
    told._model, told.lessons, told.report.dtype = tiny.path(), [], "float32"
    told.report.threads = torch.get_num_threads()
    told._use_two_processes()
    assert "no figures of this way: the training process failed: no memory" in output.getvalue()
    assert told.report.ways == []


def test_two_processes_have_no_more_processors_than_one_has_threads() -> None:
    """A process that starts meanwhile inherits them."""
    threads, processors = torch.get_num_threads(), os.sched_getaffinity(0)
    asked = "import os; print(len(os.sched_getaffinity(0)))"
    with story._half_of(1):
        assert torch.get_num_threads() == 1 and len(os.sched_getaffinity(0)) == 1
        assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "1\n"
    assert os.sched_getaffinity(0) == processors
    torch.set_num_threads(threads)
