"""Similarity of a text to a reference, by rapidfuzz, and metrics that are refused by name."""

import sys
import threading
import time
from array import array
from typing import Any

import pytest

from coserve.errors import ConfigError, DataError, JobError
from coserve.train.grading.graders import grader_from
from coserve.train.grading.similarity import TextSimilarityGrader
from coserve.train.objectives import ALL_GRADERS


def similarity(**fields: Any) -> dict[str, Any]:
    return {"type": "text_similarity", "reference": "{{item.answer}}", **fields}


def longest_common(one: str, other: str) -> int:
    """Length of the longest common subsequence, by its definition."""
    row = [0] * (len(other) + 1)
    for letter in one:
        above = row.copy()
        for n, second in enumerate(other):
            row[n + 1] = above[n] + 1 if letter == second else max(above[n + 1], row[n])
    return row[-1]


def test_a_text_is_as_close_as_its_longest_common_subsequence() -> None:
    pytest.importorskip("rapidfuzz")
    grader = grader_from(similarity(evaluation_metric="fuzzy_match", name="close"), ALL_GRADERS)
    for found, wanted in (
        ("kitten", "sitting"),
        ("", "a"),
        ("abc", "abc"),
        ("Größe", "grosse"),
        ("ab", "ba"),
    ):
        common = 2 * longest_common(found, wanted) / (len(found) + len(wanted))
        assert grader.grade(found, {"answer": wanted}) == pytest.approx(common, abs=1e-12)


def test_lengths_are_bounded() -> None:
    pytest.importorskip("rapidfuzz")
    grader = TextSimilarityGrader("{{item.answer}}")
    with pytest.raises(DataError, match="the grader's reference has more than 32768 characters"):
        grader.check({"answer": "a" * 40_000})
    with pytest.raises(DataError, match="the grader's input has more than 32768 characters"):
        grader.grade("a" * 40_000, {"answer": "a"})


def test_others_go_on_while_long_texts_are_compared() -> None:
    """A comparison of 20 ms that held the interpreter's lock would let another thread have it once."""
    pytest.importorskip("rapidfuzz")
    grader = TextSimilarityGrader("{{item.answer}}")
    long, item, rewards = "abcdefgh" * 4000, {"answer": "hgfedcba" * 4000}, list[float]()
    comparing = threading.Thread(target=lambda: rewards.extend(grader.grade(long, item) for _ in range(20)))
    comparing.start()
    turns = 0
    while comparing.is_alive():
        time.sleep(0)  # gives the lock up, and waits for it
        turns += 1
    assert turns > 1000 and len(rewards) == 20


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("meteor", "'meteor' is not offered: it needs the data of WordNet.*PythonGrader"),
        ("levenshtein", "one of fuzzy_match, cosine, bleu, .* not 'levenshtein'"),
        (4, "not 4"),
        (["bleu"], "not \\['bleu'\\]"),
    ],
)
def test_metrics_that_are_not_there(metric: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grader_from(similarity(evaluation_metric=metric), ALL_GRADERS)


@pytest.mark.parametrize(
    ("metric", "found", "wanted", "value"),
    [
        ("rouge_1", "the cat sat", "The cat ran off", 2 * 2 / 7),  # F of 2 words of 3 and of 4
        ("rouge_2", "the cat sat", "the cat ran", 0.5),
        ("rouge_l", "a b c d", "a c b d", 0.75),
        ("gleu", "a b c", "a b c", 1.0),
        ("gleu", "a b", "a c", 1 / 3),  # of the words and pairs of words, of which each has three
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("bleu", "", "the cat", 0.0),
    ],
)
def test_words_are_compared_by_the_library_of_the_metric(
    metric: str, found: str, wanted: str, value: float
) -> None:
    pytest.importorskip("rouge_score" if metric.startswith("rouge") else "nltk")
    grader = grader_from(similarity(evaluation_metric=metric), ALL_GRADERS)
    assert grader.grade(found, {"answer": wanted}) == pytest.approx(value, abs=1e-9)
    with pytest.raises(DataError, match="more than 8192 characters"):
        grader.grade("a " * 5000, {"answer": "a"})


def test_cosine_is_that_of_embeddings() -> None:
    grader = grader_from(similarity(evaluation_metric="cosine"), ALL_GRADERS)
    assert isinstance(grader, TextSimilarityGrader)
    assert [one.text for one in grader.questions("a cat", {"answer": "a dog"})] == ["a cat", "a dog"]
    replies = iter([array("f", [3.0, 4.0]), array("f", [4.0, -3.0]), array("f", [1.0]), array("f", [-2.0])])
    for wanted in (0.0, -1.0):
        assert grader.grade_with("a cat", {"answer": "a dog"}, replies) == pytest.approx(wanted, abs=1e-9)
    for found, answer, wanted in (("a", "a", 1.0), ("", "a", 0.0), ("a", "", 0.0)):
        assert not grader.questions(found, {"answer": answer})
        assert grader.grade(found, {"answer": answer}) == wanted
    nothing = iter([array("f", [0.0]), array("f", [1.0])])
    assert grader.grade_with("b", {"answer": "a"}, nothing) == 0.0
    broken = iter([array("f", [float("nan")]), array("f", [1.0])])
    for replies, words in ((iter(()), "needs embeddings"), (broken, "finite number")):
        with pytest.raises(JobError, match=words):
            grader.grade_with("b", {"answer": "a"}, replies)
    plain = grader_from(similarity(evaluation_metric="gleu"), ALL_GRADERS)
    assert isinstance(plain, TextSimilarityGrader) and not plain.questions("a", {"answer": "b"})


def test_rapidfuzz_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    with pytest.raises(ConfigError, match=r"needs rapidfuzz, which coserve\[graders\] installs"):
        grader_from(similarity(), ALL_GRADERS)
