"""A grader that measures how close a text is to a reference: OpenAI's `text_similarity`."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import numpy as np

from coserve.errors import ConfigError, JobError, LimitExceeded
from coserve.sandbox.pool import SandboxPool
from coserve.train.grading.asking import AskingGrader, EmbeddingQuestion, Reply
from coserve.train.grading.graders import checked_reward
from coserve.train.grading.template import ANSWER, Template

_LONGEST: Final = 1 << 15  # characters of each text, with its fields filled in: two of them take 20 ms
_LONGEST_WORDS: Final = 1 << 13  # of those whose words are compared
_INSTEAD: Final = "use another metric, the type http, or PythonGrader in the Python API"
_COSINE: Final = "cosine"
_REFUSED: Final[Mapping[str, str]] = {
    "meteor": "it needs the data of WordNet, which no package brings",
}
_ROUGE: Final = "rouge_score"
_LIBRARIES: Final[Mapping[str, str]] = {
    "bleu": "nltk",
    "gleu": "nltk",
    **{f"rouge_{n}": _ROUGE for n in (1, 2, 3, 4, 5, "l")},
}
_SECONDS: Final = 4.0  # of processor time for two texts, with the time to import a library
_MEMORY: Final = 512 * 2**20
_AT_ONCE: Final = 4


@dataclass(frozen=True)
class TextSimilarityGrader(AskingGrader):
    """The similarity of `input` and `reference`, both templates, from 0 to 1; of `cosine` from -1.

    Of OpenAI's metrics there is `fuzzy_match`, by rapidfuzz's `ratio`: twice the length of the longest common
    subsequence of characters, over the length of both texts; `bleu`, `gleu` and `rouge_*`, by the libraries
    that `overlap.py` names; and `cosine`, of the base's embeddings of both, which alone asks a model.
    """

    type: ClassVar[str] = "text_similarity"
    reference: str
    evaluation_metric: str = "fuzzy_match"
    input: str = ANSWER
    name: str = ""
    _templates: tuple[Template, Template] = field(init=False, repr=False, compare=False)
    _measure: Callable[[str, str], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        metric = self.evaluation_metric
        if not isinstance(metric, str) or metric not in ("fuzzy_match", _COSINE, *_LIBRARIES, *_REFUSED):
            known = ", ".join(("fuzzy_match", _COSINE, *_LIBRARIES, *_REFUSED))
            raise ConfigError(f"the grader's evaluation_metric is one of {known}, not {metric!r:.80}")
        if (reason := _REFUSED.get(metric)) is not None:
            raise ConfigError(
                f"the grader's evaluation_metric {metric!r} is not offered: {reason}; {_INSTEAD}"
            )
        longest = _LONGEST if metric == "fuzzy_match" else _LONGEST_WORDS
        templates = (
            Template(self.input, "the grader's input", longest),
            Template(self.reference, "the grader's reference", longest),
        )
        object.__setattr__(self, "_templates", templates)
        if metric != _COSINE:
            measure = _unlocked_ratio() if metric == "fuzzy_match" else _shared_words(metric)
            object.__setattr__(self, "_measure", measure)

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        for template in self._templates:
            template.check(item)

    def questions(self, answer: str, item: Mapping[str, Any]) -> Sequence[EmbeddingQuestion]:
        """See `AskingGrader`. What is equal, or empty, needs no embedding."""
        if self.evaluation_metric != _COSINE:
            return []
        texts = [template.render(answer, item) for template in self._templates]
        return [EmbeddingQuestion(text) for text in texts] if all(texts) and texts[0] != texts[1] else []

    def grade_with(self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]) -> float:
        """See `AskingGrader`."""
        found, wanted = (template.render(answer, item) for template in self._templates)
        if self.evaluation_metric != _COSINE:
            value = self._measure(found, wanted)
        elif found == wanted or not found or not wanted:
            value = float(found == wanted)
        else:
            value = _cosine(next(replies, ""), next(replies, ""))
        return checked_reward(value, "the grader's similarity")


def _cosine(one: Reply, other: Reply) -> float:
    if isinstance(one, str) or isinstance(other, str):
        raise JobError("the grader 'text_similarity' needs embeddings of a model, and got none")
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(a @ b / length, -1.0, 1.0)) if length else 0.0


def _unlocked_ratio() -> Callable[[str, str], float]:
    """rapidfuzz's `ratio`, called by `cpdist`, which releases the interpreter's lock: `ratio`
    itself holds it, and beside texts of 32 Ki characters a step of 200 small operations took 20 s for 15 ms.
    Raises ConfigError where rapidfuzz is not installed."""
    try:
        ratio, compare = import_module("rapidfuzz.fuzz").ratio, import_module("rapidfuzz.process").cpdist
    except ImportError as error:
        raise ConfigError(
            "the grader 'text_similarity' needs rapidfuzz, which coserve[graders] installs"
        ) from error
    return lambda found, wanted: float(compare([found], [wanted], scorer=ratio, dtype=np.float64)[0]) / 100.0


def _shared_words(metric: str) -> Callable[[str, str], float]:
    """The metric, computed in a sandbox. Raises ConfigError where its library is not installed."""
    if find_spec(_LIBRARIES[metric]) is None:
        raise ConfigError(f"the grader's evaluation_metric {metric!r} is one of coserve[graders]")
    return partial(_overlap, metric)


def _overlap(metric: str, found: str, wanted: str) -> float:
    given = (text.encode(errors="replace").decode() for text in (found, wanted))
    try:
        return float(_measurers(os.getpid()).call(metric, *given, seconds=_SECONDS))
    except LimitExceeded as error:
        raise JobError(f"the grader cannot compute {metric!r} of these texts: {error}") from error


@cache
def _measurers(_: int) -> SandboxPool:
    """The sandboxes of this process; of a fork's parent none can be used."""
    return SandboxPool("coserve.train.grading.overlap:overlap", _AT_ONCE, _MEMORY)
