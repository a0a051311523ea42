"""A grader of several: a formula over their rewards."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, ClassVar, Final

from coserve.errors import ConfigError, CoserveError, DataError
from coserve.train.grading.asking import AskingGrader, Question, Reply
from coserve.train.grading.formula import FUNCTIONS, Formula
from coserve.train.grading.graders import MOST_NESTED, Grader, checked_reward

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class MultiGrader(AskingGrader):
    """The value of the formula `calculate_output` of the rewards of `graders`, by their names: OpenAI's
    `multi`. None of them is a `multi` itself."""

    type: ClassVar[str] = "multi"
    nested: ClassVar[str] = "graders"
    graders: Mapping[str, Grader]
    calculate_output: str
    name: str = ""
    _formula: Formula = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.graders, Mapping) or not 1 <= len(self.graders) <= MOST_NESTED:
            raise ConfigError(f"the graders of a 'multi' must be an object of 1 to {MOST_NESTED} by name")
        for name, grader in self.graders.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or iskeyword(name) or name in FUNCTIONS:
                raise ConfigError(
                    f"a grader's name in a 'multi' must be a word of letters, digits and _, not {name!r:.80}"
                )
            if isinstance(grader, MultiGrader):
                raise ConfigError(
                    f"the grader {name!r} is a 'multi' in a 'multi': one formula can say it all"
                )
        formula = Formula(self.calculate_output, self.graders, "the grader's calculate_output")
        object.__setattr__(self, "_formula", formula)

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        for name, grader in self.graders.items():
            try:
                grader.check(item)
            except DataError as error:
                raise DataError(f"{name}: {error}") from error

    def questions(self, answer: str, item: Mapping[str, Any]) -> list[Question]:
        """See `AskingGrader`."""
        asking = (one for one in self.graders.values() if isinstance(one, AskingGrader))
        return [question for one in asking for question in one.questions(answer, item)]

    def grade_with(self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]) -> float:
        """See `AskingGrader`."""
        return self.combined(self.rewards_with(answer, item, replies))

    def rewards_with(
        self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]
    ) -> dict[str, float]:
        """The rewards of its graders, by name. Raises what `grade_with` does."""
        rewards = {}
        for name, one in self.graders.items():
            try:
                if isinstance(one, AskingGrader):
                    rewards[name] = one.grade_with(answer, item, replies)
                else:
                    rewards[name] = one.grade(answer, item)
            except CoserveError as error:
                raise type(error)(f"{name}: {error}") from error
        return rewards

    def combined(self, rewards: Mapping[str, float]) -> float:
        """The formula's value for these rewards. Raises JobError where it has none."""
        return checked_reward(self._formula.value(rewards), "the grader's calculate_output")
