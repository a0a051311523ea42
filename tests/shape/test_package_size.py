"""The package's size: no count grows."""

import ast

import counts
import pytest


def test_it_does_not_grow() -> None:
    """Counted here, and not where tests are collected, which every worker of every run does."""
    grown = [one for one in counts.counted() if one.found > one.most]
    assert not grown, [f"{one.name}: {one.found:,}, at most {one.most:,} so far" for one in grown]


@pytest.mark.slow  # 19 s: a server and an engine in one process, profiled
def test_a_prompt_and_an_example_pass_no_more_modules() -> None:
    prompt, example = counts.passed()
    assert 20 < prompt.found <= prompt.most and 20 < example.found <= example.most


def test_collaborators_are_objects_that_act() -> None:
    """Records, numbers and texts are data; functions and instances of other classes are collaborators."""
    source = "def f(a: Scheduler, b: 'Scheduler | None', c: Callable[[], int], d: StepPlan, e: int): ..."
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    actors = counts.actors()
    assert "Scheduler" in actors and not {"StepPlan", "EngineConfig", "Request"} & actors
    names = [counts.names_in(one.annotation) for one in function.args.args]
    assert [bool(actors & one) for one in names] == [True, False, True, False, False]
    assert "Scheduler" in counts.names_in(ast.parse("'Scheduler'", mode="eval"))


def test_methods_that_share_nothing_are_told_apart() -> None:
    """Directly or through others."""
    source = """class Both:
        def __init__(self): self.a = self.b = self.c = 0
        def one(self): return self.a
        def two(self): return self.three()
        def three(self): return self.a
        def four(self): return self.b
        def five(self): return self.b + self.c
        def alone(self): return self.d"""
    made = ast.parse(source).body[0]
    assert isinstance(made, ast.ClassDef)
    assert counts.unrelated(made) == [{"one", "two", "three"}, {"four", "five"}]
