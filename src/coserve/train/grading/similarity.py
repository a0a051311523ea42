"""A grader that measures how close a text is to a reference: OpenAI's `text_similarity`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np

from coserve.errors import ConfigError
from coserve.train.grading.graders import checked_reward
from coserve.train.grading.template import ANSWER, Template

_LONGEST: Final = 1 << 15  # characters of each text, with its fields filled in: two of them take 20 ms
_INSTEAD: Final = "use fuzzy_match, the type http, or PythonGrader in the Python API"
_REFUSED: Final[Mapping[str, str]] = {
    "cosine": "it compares embeddings, and no model here makes any",
    **dict.fromkeys(
        ("bleu", "gleu", "meteor", *(f"rouge_{n}" for n in (1, 2, 3, 4, 5, "l"))),
        "its value depends on how words are cut, so it is computed only where the same library can be",
    ),
}


@dataclass(frozen=True)
class TextSimilarityGrader:
    """The similarity of `input` and `reference`, both templates, from 0 to 1.

    Of OpenAI's metrics there is `fuzzy_match`, by rapidfuzz's `ratio`: twice the length of the longest common
    subsequence of characters, over the length of both texts.
    """

    type: ClassVar[str] = "text_similarity"
    reference: str
    evaluation_metric: str = "fuzzy_match"
    input: str = ANSWER
    name: str = ""
    _templates: tuple[Template, Template] = field(init=False, repr=False, compare=False)
    _ratio: Callable[[str, str], float] = field(init=False, repr=False, compare=False)  # percent

    def __post_init__(self) -> None:
        metric = self.evaluation_metric
        if not isinstance(metric, str) or metric not in (*_REFUSED, "fuzzy_match"):
            known = ", ".join(("fuzzy_match", *_REFUSED))
            raise ConfigError(f"the grader's evaluation_metric is one of {known}, not {metric!r:.80}")
        if (reason := _REFUSED.get(metric)) is not None:
            raise ConfigError(
                f"the grader's evaluation_metric {metric!r} is not offered: {reason}; {_INSTEAD}"
            )
        templates = (
            Template(self.input, "the grader's input", _LONGEST),
            Template(self.reference, "the grader's reference", _LONGEST),
        )
        object.__setattr__(self, "_templates", templates)
        object.__setattr__(self, "_ratio", _unlocked_ratio())

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        for template in self._templates:
            template.check(item)

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        found, wanted = (template.render(answer, item) for template in self._templates)
        return checked_reward(self._ratio(found, wanted) / 100.0, "the grader's similarity")


def _unlocked_ratio() -> Callable[[str, str], float]:
    """rapidfuzz's `ratio`, in percent, called by `cpdist`, which releases the interpreter's lock: `ratio`
    itself holds it, and beside texts of 32 Ki characters a step of 200 small operations took 20 s for 15 ms.
    Raises ConfigError where rapidfuzz is not installed."""
    try:
        ratio, compare = import_module("rapidfuzz.fuzz").ratio, import_module("rapidfuzz.process").cpdist
    except ImportError as error:
        raise ConfigError(
            "the grader 'text_similarity' needs rapidfuzz, which coserve[graders] installs"
        ) from error
    return lambda found, wanted: float(compare([found], [wanted], scorer=ratio, dtype=np.float64)[0])
