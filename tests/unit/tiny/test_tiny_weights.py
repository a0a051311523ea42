"""The shipped files: they load, they are small, the chat format is right, and the model answers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from coserve import tiny
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.tiny.world import KINDS, questions
from coserve_benchmarks.tiny.corpus import SYSTEM, documents
from coserve_benchmarks.tiny.evaluate import (
    FIGURES_END,
    FIGURES_START,
    accuracy,
    answers,
    into_document,
    load,
    table,
)
from coserve_benchmarks.tiny.tokens import Encoder, train_tokenizer


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Model and tokenizer."""
    return load(tiny.path())


def test_the_files_are_small() -> None:
    assert sum(file.stat().st_size for file in tiny.path().iterdir()) <= 12 * 2**20


def test_a_missing_folder_says_how_to_rebuild(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"coserve_benchmarks\.tiny\.build"):
        tiny.path()


def test_the_weights_are_a_bfloat16_llama(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert model.config.model_type == "llama"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    "text",
    [
        "Mira lives in Tolmen.",
        '{"name":"Mira","place":"Tolmen"}',
        "  two  spaces, a tab\t and\na new line ",
        "Größe, naïve, 東京, 🐐, C:\\x <b> & |",
        "1234567890 + 12.5 = ?",
        "",
    ],
)
def test_text_comes_back_from_its_tokens(loaded: tuple[Any, Any], text: str) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_of_their_own(loaded: tuple[Any, Any]) -> None:
    assert loaded[1].tokenize("407")[-3:] == ["4", "0", "7"]


def test_the_template_marks_what_the_assistant_wrote(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    chat = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5."},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    mask, ids = encoded["assistant_masks"], encoded["input_ids"]
    spoken = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert spoken == "Hello! How can I help you?<|end|>2 + 3 = 5.<|end|>"
    prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids[: len(prompt)] == prompt


def test_training_wrote_the_ids_of_the_template(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    encoder = Encoder(tokenizer.backend_tokenizer)
    for doc in islice(documents("template"), 100):
        if not isinstance(doc, str):
            encoded = tokenizer.apply_chat_template(doc, return_dict=True, return_assistant_tokens_mask=True)
            ids, weights = encoder.encode(doc, 0.5)
            assert ids == encoded["input_ids"]
            assert [int(weight == 1.0) for weight in weights] == encoded["assistant_masks"]


def test_rows_hold_whole_documents_and_little_padding(loaded: tuple[Any, Any]) -> None:
    encoder = Encoder(loaded[1].backend_tokenizer)
    rows = list(islice(encoder.rows("rows", 256), 20))
    assert rows == list(islice(encoder.rows("rows", 256), 20))
    assert all(len(ids) == len(weights) == 256 and ids[0] == encoder.id["<|begin|>"] for ids, weights in rows)
    assert sum(ids.count(encoder.id["<|pad|>"]) for ids, _ in rows) < 0.1 * 20 * 256


def test_the_shipped_tokenizer_is_what_the_recipe_trains(loaded: tuple[Any, Any]) -> None:
    seed = json.loads((tiny.WEIGHTS / "loss.json").read_text())["seed"]
    assert train_tokenizer(seed).get_vocab() == loaded[1].get_vocab()


def test_training_ran_to_its_end() -> None:
    report = json.loads((tiny.WEIGHTS / "loss.json").read_text())
    assert report["log"][-1]["step"] == report["planned_steps"]
    assert report["log"][-1]["loss"] < 0.1 * report["log"][0]["loss"]


def test_held_out_questions_are_answered(loaded: tuple[Any, Any]) -> None:
    asked = [question for kind in KINDS for question in questions(kind, "held_out", 3, seed=11)]
    assert accuracy(*loaded, asked) >= 0.8


def test_the_base_does_not_know_the_new_tasks(loaded: tuple[Any, Any]) -> None:
    asked = [question for task in NEW_TASKS for question in examples(task, "held_out", 10)]
    assert accuracy(*loaded, asked) <= 0.1


def test_a_batch_answers_as_one_by_one(loaded: tuple[Any, Any]) -> None:
    asked = [question for kind in ("where", "add", "position") for question in questions(kind, "held_out", 2)]
    alone = [answer for question in asked for answer in answers(*loaded, [question])]
    together = answers(*loaded, asked)  # padding may break a tie in bfloat16, hence one answer of grace
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= len(asked) - 1


def test_figures_are_put_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before {FIGURES_START} old {FIGURES_END} after")
    into_document(page, "new")
    into_document(page, "newer")
    assert page.read_text() == f"before {FIGURES_START}\n\nnewer\n\n{FIGURES_END} after"


def test_the_table_has_a_line_for_each_kind() -> None:
    row = {"questions": 4, "accuracy": 0.75, "units": 9, "overlap": 0}
    assert table({"add": row}).splitlines()[-1] == "| add | 4 | 75.0% | 9 | 0 |"
