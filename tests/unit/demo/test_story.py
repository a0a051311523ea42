"""The demo as a whole, short, on the embedded model; and its parts that need the tokenizer or the engine."""

import io
import json
import math
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coserve import Engine, EngineConfig, tiny
from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json, rounded
from coserve.demo import acts, lessons, score
from coserve.demo.figures import Bounds
from coserve.demo.lessons import TASKS, from_file, new_tasks
from coserve.demo.page import read_runs
from coserve.demo.request_sources import OFFERED
from coserve.demo.story import Options, Story
from coserve.demo.view import make_view
from coserve.errors import DataError
from coserve.kernels.cpu import choose_dtype
from coserve.train.example import IGNORED, Example


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny.path())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.path(), EngineConfig(dtype="float32", calibrate=False))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without calibration, which only the process that Ctrl-C ends needs."""
    monkeypatch.setattr(acts, "EngineConfig", partial(EngineConfig, calibrate=False))


@pytest.mark.usefixtures("unmeasured")
def test_the_whole_story_in_a_few_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lessons, "TRAINED_QUESTIONS", 400)
    output = io.StringIO()
    # Bounds as wide as these leave training time on any machine: within 50 ms a slow one takes no step.
    options = Options(seconds=2.0, first_token=30.0, between_tokens=2.0)
    report = Story(options, make_view(plain=True, quiet=False, file=output)).tell()
    text = output.getvalue()
    assert not report.stopped and report.code == measured_code()
    assert report.alone is not None and report.training is not None
    assert report.alone.output_tokens_per_second > 0 and report.training.output_tokens_per_second > 0
    assert report.alone.training_tokens_per_second == 0 < report.training.training_tokens_per_second
    assert report.asked == report.bounds == Bounds(first_token=30.0, between_tokens=2.0)
    assert report.alone_again is not None
    for act in (
        report.alone,
        report.training,
        report.alone_again,
    ):  # all state the bounds that the report names
        assert act.first_token.bound == report.bounds.first_token
        assert act.between_tokens.bound == report.bounds.between_tokens
    assert [learned.adapter for learned in report.adapters] == list(TASKS)
    for learned in report.adapters:
        assert learned.steps >= 1 and learned.held_out_loss_after is not None
        assert learned.held_out_loss_before is not None and learned.exact_before == 0.0
    for heading in ("Held-out questions", "exactly as expected", "without training", "What was learned"):
        assert heading in text
    assert "Each request states bounds: the first token within 30 s, each further one within 2 s" in text
    written = tmp_path / "demo.json"
    written.write_text(compact_json(report.as_dict()))
    ((name, read),) = read_runs(tmp_path)
    assert name == "demo.json" and rounded(read.as_dict()) == rounded(report.as_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_real_questions_and_real_arrivals(tmp_path: Path) -> None:
    data, trace = tmp_path / "sums.jsonl", tmp_path / "trace.csv"
    lines = [{"question": f"What is {i} and {i}?", "answer": f"Together {i + i}."} for i in range(40)]
    data.write_text("\n".join(map(json.dumps, lines)))
    rows = [f"2023-11-16 18:15:{i:02d}.0000000,{50 + 37 * i},{5 + i % 20}" for i in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    output = io.StringIO()
    options = Options(data=data, trace=trace, seconds=2.0, conversations=2)
    report = Story(options, make_view(plain=True, quiet=False, file=output)).tell()
    assert "sums.jsonl: 40 examples, 4 held out" in output.getvalue()
    assert "Arrivals, from request" in output.getvalue() and "Prompts x " in output.getvalue()
    assert report.trace is not None and report.trace["rate"] == pytest.approx(
        report.trace["capacity"] * OFFERED, rel=0.1
    )
    assert [learned.exact_after for learned in report.adapters] == [None, None]
    assert all(learned.held_out_loss_after is not None for learned in report.adapters)


@pytest.mark.slow
def test_ctrl_c_closes_with_what_was_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    code = "from coserve.cli.app import main; main()"
    options = ["--seconds", "80", "--first-token", "2", "--between-tokens", "0.07", "--json", str(figures)]
    command = [sys.executable, "-c", code, "demo", "--plain", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "answers" in line and "left" in line:  # the act without training is under way
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == ""
    assert "Stopped" in rest and "between tokens, p50" in rest
    report = json.loads(figures.read_text())
    assert report["asked"] == {"first_token": 2, "between_tokens": 0.07}
    assert report["stopped"] and report["alone"]["output_tokens_per_second"] > 0
    assert report["training"] is None


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
    import torch

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
