"""Ask the shipped model held-out questions: ``python -m coserve_benchmarks.tiny.evaluate``.

Answers are greedy and compared exactly. Beside each accuracy stands the overlap: how many of the units of the
held-out questions (names, operand pairs, lists) also occur in freshly drawn training questions of any kind.
"""

import argparse
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json
from coserve.tiny import WEIGHTS
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.tiny.world import HARD_KINDS, KINDS, Question, questions

FIGURES_START: Final = "<!-- figures: start -->"
FIGURES_END: Final = "<!-- figures: end -->"
BATCH: Final = 50
QUESTION_SEED: Final = 1  # not the questions that were looked at while the model was built
LONGEST_ANSWER: Final = 48
TRAINED_DRAWS: Final = 20_000  # questions of each kind drawn from the training side for the overlap


def load(folder: Path = WEIGHTS) -> tuple[Any, Any]:
    """Model (bfloat16) and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def answers(model: Any, tokenizer: Any, asked: Sequence[Question]) -> list[str]:
    """Greedy answers, in batches of prompts padded on the left."""
    found: list[str] = []
    for at in range(0, len(asked), BATCH):
        batch = tokenizer.apply_chat_template(
            [question.prompt for question in asked[at : at + BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**batch, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        found += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def accuracy(model: Any, tokenizer: Any, asked: Sequence[Question]) -> float:
    """Share of questions answered exactly right."""
    given = answers(model, tokenizer, asked)
    return sum(a == q.answer for a, q in zip(given, asked, strict=True)) / len(asked)


def units(asked: Iterable[Question]) -> set[str]:
    """All the names, operand pairs and lists of some questions."""
    return {unit for question in asked for unit in question.units}


def trained_units(draws: int = TRAINED_DRAWS) -> set[str]:
    """Units of many questions as training draws them, all kinds together."""
    rng = Random("overlap")
    return units(make(rng, "train") for make in (KINDS | HARD_KINDS).values() for _ in range(draws))


def evaluate(folder: Path, count: int, draws: int = TRAINED_DRAWS) -> dict[str, Any]:
    """Accuracy and overlap of every counted kind, and the accuracy of the base on the new tasks."""
    model, tokenizer = load(folder)
    trained = trained_units(draws)

    def row(held: Sequence[Question], seen: set[str]) -> dict[str, Any]:
        return {
            "questions": len(held),
            "accuracy": accuracy(model, tokenizer, held),
            "units": len(units(held)),
            "overlap": len(units(held) & seen),
        }

    kinds, hard = (
        {kind: row(questions(kind, "held_out", count, QUESTION_SEED), trained) for kind in group}
        for group in (KINDS, HARD_KINDS)
    )
    new = {}
    for task in NEW_TASKS:
        fresh = examples(task, "held_out", count, QUESTION_SEED)
        taught = units(examples(task, "train", 10 * count))
        new[task] = row(fresh, trained | taught)
    overall = sum(figures["accuracy"] for figures in kinds.values()) / len(kinds)
    return {
        "overall": overall,
        "trained_units": len(trained),
        "kinds": kinds,
        "hard_kinds": hard,
        "new_tasks_before": new,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| kind | questions | accuracy | units | overlap with training |", "|---|---:|---:|---:|---:|"]
    for name, row in rows.items():
        figures = (row["questions"], f"{row['accuracy']:.1%}", row["units"], row["overlap"])
        lines.append(f"| {name} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines)


def into_document(document: Path, text: str) -> None:
    """Replace what stands between the two marks of a Markdown file by freshly computed text."""
    before, rest = document.read_text().split(FIGURES_START)
    after = rest.split(FIGURES_END)[1]
    document.write_text(f"{before}{FIGURES_START}\n\n{text}\n\n{FIGURES_END}{after}")


def main() -> None:
    """Print the tables, and write the figures to files when asked."""
    parser = argparse.ArgumentParser(description="Measure coserve-tiny on held-out questions.")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder to measure")
    parser.add_argument("--questions", type=int, default=200, help="questions of each kind")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--document", type=Path, help="Markdown file whose figures are replaced")
    options = parser.parse_args()
    report = evaluate(options.weights, options.questions)
    text = (
        f"{table(report['kinds'])}\n\n"
        f"Overall: {report['overall']:.1%} (each kind counts the same).\n\n"
        f"Hard, and not counted:\n\n{table(report['hard_kinds'])}\n\n"
        f"New tasks, before any fine-tuning:\n\n{table(report['new_tasks_before'])}"
    )
    print(text)
    if options.document:
        into_document(options.document, text)
    if options.json:
        run = {"code": measured_code(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options.json.write_text(compact_json(report | run), encoding="utf-8")


if __name__ == "__main__":
    main()
