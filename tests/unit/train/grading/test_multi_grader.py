"""Graders of several, whose rewards a formula makes one of, and the formulas that are none."""

import math
from typing import Any

import pytest

from coserve.errors import ConfigError, DataError, JobError
from coserve.train.grading.formula import Formula
from coserve.train.grading.graders import PythonGrader, RegexGrader, grader_from
from coserve.train.grading.multi import MultiGrader
from coserve.train.objectives import ALL_GRADERS, objective_of

NUMBERS = {"a": 0.25, "b": 3.0}
EXACT = {"type": "string_check", "reference": "{{item.answer}}"}
WORDS = {"type": "regex", "pattern": "(?s).*x.*"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5*a + 0.5 * b", 1.625),
        (" (a+b)/2\n", 1.625),
        ("2^b^2 - 1", 511.0),  # from the right, before all else
        ("-2^2", -4.0),
        ("2 ** b", 8.0),
        ("min(a, b, 1) + max(a, b)", 3.25),
        ("floor(b / 2) + ceil(a) + abs(-b)", 5.0),
        ("sqrt(a) + log(exp(1))", 1.5),
        ("+a - -b", 3.25),
        ("7", 7.0),
        ("1e-3 * b", 0.003),
    ],
)
def test_a_formula_has_the_value_that_it_says(text: str, value: float) -> None:
    found = Formula(text, NUMBERS, "x").value(NUMBERS)
    assert isinstance(found, float) and found == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["a / (a - 0.25)", "log(-b)", "(-b)^0.5", "exp(b^9)", "floor(exp(b^6) * b)"])
def test_a_formula_without_a_value_says_for_what(text: str) -> None:
    with pytest.raises(JobError, match=r"^x has no value for a=0\.25, b=3: "):
        Formula(text, NUMBERS, "x").value(NUMBERS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a + c", "'c': there are numbers, a, b, "),
        ("a +", "no formula: invalid syntax"),
        ("", "at most 1000 characters"),
        (4, "at most 1000 characters"),
        ("a if b else 1", "functions abs, ceil, exp, floor, log, max, min, sqrt"),
        ("a.real", "'a.real'"),
        ("pow(a, b)", "'pow"),
        ("abs(a, b)", "'abs"),
        ("max()", "'max"),
        ("max(*a)", "max"),
        ("a % 2", "'a % 2'"),
        ("True", "'True'"),
        ("'a'", "a"),
        ("1e999", "beyond 1e308"),
        ("9" * 500, "beyond 1e308"),
        ("+" * 60 + "a", "50 levels"),
    ],
)
def test_what_is_no_formula(text: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Formula(text, NUMBERS, "x")
    assert words in str(refused.value) and len(str(refused.value)) < 300


def multi(formula: str = "a", **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "all", "graders": graders, "calculate_output": formula}


def test_rewards_of_several_graders_become_one() -> None:
    grader = grader_from(multi("0.75 * exact + 0.25 * words", exact=EXACT, words=WORDS), ALL_GRADERS)
    assert [grader.grade(text, {"answer": "x"}) for text in ("x", "xy", "y")] == [1.0, 0.25, 0.0]
    found: Any = objective_of({"type": "reinforcement", "grader": multi("words", words=WORDS)})
    assert found.grader == MultiGrader({"words": RegexGrader("(?s).*x.*")}, "words", "all")
    own = MultiGrader({"own": PythonGrader(lambda answer, item: len(answer))}, "own / 2")
    assert own.grade("abc", {}) == 1.5


def test_whose_fault_it_is_is_told() -> None:
    grader = grader_from(multi("exact", exact=EXACT), ALL_GRADERS)
    with pytest.raises(DataError, match=r"^exact: the grader needs item\.answer"):
        grader.check({"x": 1})
    fails = MultiGrader({"a": PythonGrader(lambda answer, item: math.nan)}, "a")
    with pytest.raises(JobError, match=r"^a: the grader must give a finite number"):
        fails.grade("", {})
    infinite = MultiGrader({"a": PythonGrader(lambda answer, item: 1e6)}, "a * 1e308")
    with pytest.raises(JobError, match="calculate_output must give a finite number"):
        infinite.grade("", {})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (multi(), "1 to 16 by name"),
        ({**multi(), "graders": [EXACT]}, "1 to 16 by name"),
        ({"type": "multi", "graders": {"a": WORDS}}, "calculate_output"),
        (multi(**{f"g{n}": WORDS for n in range(17)}), "may have 16 graders, not 17"),
        (multi(a={"type": "regex"}), "'a': the grader 'regex'"),
        (multi(a=multi("b", b=WORDS)), "'a': there is no grader 'multi'"),
        (
            multi(a={"type": "python", "source": "x"}),
            "'a': there is no grader 'python': it would run a tenant",
        ),
        (multi(**{"a-b": WORDS}), "a word of letters, digits and _, not 'a-b'"),
        (multi(**{"max": WORDS}), "not 'max'"),
        (multi(**{"if": WORDS}), "not 'if'"),
        (multi("b", a=WORDS), "'b': there are numbers, a, "),
    ],
)
def test_several_graders_that_cannot_be_used(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grader_from(settings, ALL_GRADERS)
    assert words in str(refused.value)


def test_a_multi_in_a_multi_is_refused_in_python_too() -> None:
    inner = MultiGrader({"a": RegexGrader("a")}, "a")
    with pytest.raises(ConfigError, match="a 'multi' in a 'multi'"):
        MultiGrader({"b": inner}, "b")
