"""The small world: the same seed gives the same text, and held-out units never reach the training side."""

from itertools import islice
from random import Random

import pytest

from coserve.tiny.names import held_out, people, person, place, places, word
from coserve.tiny.newtasks import NEW_TASKS, examples
from coserve.tiny.world import HARD_KINDS, KINDS, questions
from coserve_benchmarks.tiny.corpus import EARLY, FINAL, LATE, documents
from coserve_benchmarks.tiny.evaluate import trained_units, units


def test_documents_depend_only_on_the_seed() -> None:
    first, again, other = (list(islice(documents(seed), 200)) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other


@pytest.mark.parametrize("kind", KINDS | HARD_KINDS)
def test_questions_depend_only_on_their_arguments(kind: str) -> None:
    assert questions(kind, "held_out", 20, 3) == questions(kind, "held_out", 20, 3)
    assert questions(kind, "held_out", 20, 3) != questions(kind, "held_out", 20, 4)


@pytest.mark.parametrize("kind", KINDS | HARD_KINDS)
def test_every_unit_is_on_the_side_of_its_question(kind: str) -> None:
    assert not any(held_out(unit) for unit in units(questions(kind, "train", 300)))
    assert all(held_out(unit) for unit in units(questions(kind, "held_out", 300)))


def test_no_held_out_unit_of_any_kind_is_drawn_in_training() -> None:
    trained = trained_units(draws=500)
    for kind in KINDS:
        assert not units(questions(kind, "held_out", 200)) & trained


def test_no_held_out_name_is_written_in_the_training_documents() -> None:
    texts: list[str] = []
    for doc in (doc for course in (EARLY, LATE, FINAL) for doc in islice(documents("names", course), 1500)):
        texts += [doc] if isinstance(doc, str) else [message["content"] for message in doc]
    spoken = {piece.strip('.,!?:"') for text in texts for piece in text.split()}
    rng = Random(0)
    names = {make(rng, "held_out") for make in (person, place) for _ in range(2000)}
    assert not names & spoken


def test_each_make_of_name_obeys_the_split() -> None:
    rng = Random(1)
    assert all(held_out(word(rng, "held_out")) for _ in range(100))
    assert not any(held_out(name) for name in people(rng, "train", 20) + places(rng, "train", 20))


@pytest.mark.parametrize("kind", KINDS | HARD_KINDS)
def test_questions_end_with_their_answer(kind: str) -> None:
    for question in questions(kind, "held_out", 50):
        assert question.kind == kind
        assert [m["role"] for m in question.messages] == ["user", "assistant"] * (len(question.messages) // 2)
        assert question.prompt[-1]["role"] == "user"
        assert question.answer


def test_sums_are_right() -> None:
    for question in questions("add", "held_out", 100) + questions("subtract", "held_out", 100):
        left, right = question.answer.rstrip(".").split(" = ")
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


@pytest.mark.parametrize("task", NEW_TASKS)
def test_new_tasks_have_disjoint_sides(task: str) -> None:
    train, test = examples(task, "train", 300), examples(task, "held_out", 100)
    assert not units(train) & units(test)
    assert len({q.prompt[-1]["content"] for q in train}) == 300


def test_new_forms_are_in_no_training_document() -> None:
    marks = ("{", "}", "Arr", "matey", "Ticket", "Turn it around")
    for doc in (doc for course in (EARLY, LATE, FINAL) for doc in islice(documents("marks", course), 1500)):
        text = doc if isinstance(doc, str) else " ".join(message["content"] for message in doc)
        assert not any(mark in text for mark in marks)
