"""Graders that ask a model: OpenAI's `score_model` and `label_model`, and what all such graders have in
common.

Such a grader waits for no model. It says what is to be asked (`questions`); its user has that answered, and
gets the reward for the replies (`grade_with`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Any, ClassVar, Final

from coserve.core.ranges import check_range
from coserve.core.request import SamplingParams
from coserve.errors import ConfigError, JobError
from coserve.train.grading.graders import checked_reward
from coserve.train.grading.template import Template

_ROLES: Final = ("system", "developer", "user", "assistant")
_TEXTS: Final = ("text", "input_text", "output_text")  # types of parts
_MOST_MESSAGES: Final = 32
_MOST_PARTS: Final = 32  # of a message
_MOST_LABELS: Final = 64
_LONGEST_LABEL: Final = 256  # characters
_LONGEST: Final = 1 << 15  # characters of a message, with its fields filled in
_TOKENS: Final = 128  # of a reply, unless `sampling_params` say otherwise
_WIDEST: Final = 1e6
_NARROWEST: Final = 1e-3
# As OpenAI's names them.
_SAMPLING: Final = ("max_completions_tokens", "temperature", "top_p", "seed", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A chat for the model of this name. The reply is JSON of `schema`, of at most `max_tokens` tokens."""

    model: str
    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class EmbeddingQuestion:
    """A text whose embedding is asked of the base: the mean of its tokens' states after the last norm."""

    text: str


EMBEDDED: Final = SamplingParams(max_tokens=0, pooling="mean")  # how such a text is read
Question = ModelQuestion | EmbeddingQuestion
Reply = str | Sequence[float]  # to a chat; to a text whose embedding is asked


class AskingGrader(ABC):
    """Base of graders that ask models, or may have others that do. As a `Grader` it has no reward where a
    model is needed."""

    @abstractmethod
    def questions(self, answer: str, item: Mapping[str, Any]) -> Sequence[Question]:
        """The questions about an answer. Raises DataError for a record that cannot be graded."""

    @abstractmethod
    def grade_with(self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]) -> float:
        """The reward of an answer, given the replies to its questions in order. Raises CoserveError where
        there is none."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        return self.grade_with(answer, item, iter(()))


class ModelGrader(AskingGrader):
    """Base of graders that ask one question: a chat of templates."""

    type: ClassVar[str]
    model: str
    input: Sequence[Mapping[str, Any]]
    sampling_params: Mapping[str, Any]
    _chat: tuple[tuple[str, Template], ...]

    def _check(self) -> None:
        """Reads the settings. Raises ConfigError."""
        what = f"the grader's ({self.type})"
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"{what} model must be the name of a model")
        if not isinstance(self.input, list | tuple) or not 1 <= len(self.input) <= _MOST_MESSAGES:
            raise ConfigError(f"{what} input must be a list of 1 to {_MOST_MESSAGES} messages")
        object.__setattr__(self, "_chat", tuple(message_template(one, f"{what} input") for one in self.input))
        given = self.sampling_params
        if not isinstance(given, Mapping) or (unknown := set(given) - {*_SAMPLING}):
            told = f", not {min(map(str, unknown))!r:.80}" if isinstance(given, Mapping) else ""
            raise ConfigError(f"{what} sampling_params has {', '.join(_SAMPLING)}{told}")
        if given.get("reasoning_effort") not in (None, "none", "minimal"):
            raise ConfigError(f"{what} sampling_params.reasoning_effort is not offered: replies are JSON")
        for name, low, high, kind in (
            ("max_completions_tokens", 1, 4096, int),
            ("temperature", 0.0, 2.0, float),
            ("top_p", 1e-6, 1.0, float),
            ("seed", 0, 2**53, int),
        ):
            if given.get(name) is not None:
                check_range(f"{what} sampling_params.{name}", given[name], low, high, kind)

    @property
    def _schema(self) -> Mapping[str, Any]:
        """The schema of replies."""
        raise NotImplementedError

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        for _, template in self._chat:
            template.check(item)

    def questions(self, answer: str, item: Mapping[str, Any]) -> list[ModelQuestion]:
        """See `AskingGrader`."""
        messages = tuple({"role": role, "content": text.render(answer, item)} for role, text in self._chat)
        set_by = {name: value for name, value in self.sampling_params.items() if value is not None}
        return [
            ModelQuestion(
                self.model,
                messages,
                self._schema,
                set_by.get("max_completions_tokens", _TOKENS),
                float(set_by.get("temperature", 0.0)),
                float(set_by.get("top_p", 1.0)),
                set_by.get("seed", 0),
            )
        ]

    def _reply(self, replies: Iterator[Reply], key: str) -> Any:
        """The value of a reply. Raises JobError where it is none, as when it was cut off."""
        if not isinstance(text := next(replies, None), str):
            raise JobError(f"the grader {self.type!r} needs the reply of a model, and got none")
        try:
            return json.loads(text)[key]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise JobError(f"the grader {self.type!r} cannot read the model's reply {text[:80]!r}") from error


@dataclass(frozen=True)
class ScoreModelGrader(ModelGrader):
    """The number from `range[0]` to `range[1]` that a model gives the answer: OpenAI's `score_model`. It has
    two decimals, in a range narrower than 10 more."""

    type: ClassVar[str] = "score_model"
    model: str
    input: Sequence[Mapping[str, Any]]
    range: Sequence[float] | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    _chat: tuple[tuple[str, Template], ...] = field(init=False, repr=False, compare=False)
    _bounds: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        bounds = (0.0, 1.0) if self.range is None else self.range
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise ConfigError("the grader's range must be two numbers")
        for bound in bounds:
            check_range("the grader's range", bound, -_WIDEST, _WIDEST)
        if not bounds[0] + _NARROWEST <= bounds[1]:
            raise ConfigError(
                f"the grader's range must go up by {_NARROWEST:g}, not from {bounds[0]:g} to {bounds[1]:g}"
            )
        object.__setattr__(self, "_bounds", (float(bounds[0]), float(bounds[1])))

    @property
    def _schema(self) -> Mapping[str, Any]:
        low, high = self._bounds
        # A number without a last decimal would go on until the reply is cut off.
        step = min(0.01, 10.0 ** (floor(log10(high - low)) - 3))
        return _one_field("result", {"type": "number", "minimum": low, "maximum": high, "multipleOf": step})

    def grade_with(self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]) -> float:
        """See `AskingGrader`."""
        score = checked_reward(self._reply(replies, "result"), "the grader's model")
        low, high = self._bounds
        if not low <= score <= high:
            raise JobError(f"the grader's model must give a number from {low:g} to {high:g}, not {score:g}")
        return score


@dataclass(frozen=True)
class LabelModelGrader(ModelGrader):
    """1 if the label that a model gives the answer is one of `passing_labels`, else 0: OpenAI's
    `label_model`."""

    type: ClassVar[str] = "label_model"
    model: str
    input: Sequence[Mapping[str, Any]]
    labels: Sequence[str]
    passing_labels: Sequence[str]
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    _chat: tuple[tuple[str, Template], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        for what, labels in (("labels", self.labels), ("passing_labels", self.passing_labels)):
            if not isinstance(labels, list | tuple) or not 1 <= len(labels) <= _MOST_LABELS:
                raise ConfigError(f"the grader's {what} must be a list of 1 to {_MOST_LABELS} texts")
            if any(not isinstance(one, str) or not 0 < len(one) <= _LONGEST_LABEL for one in labels):
                raise ConfigError(f"the grader's {what} must be texts of 1 to {_LONGEST_LABEL} characters")
        if strange := set(self.passing_labels) - set(self.labels):
            raise ConfigError(
                f"the grader's passing_labels has {min(strange)!r}, which is none of the labels"
            )

    @property
    def _schema(self) -> Mapping[str, Any]:
        return _one_field("label", {"enum": list(self.labels)})

    def grade_with(self, answer: str, item: Mapping[str, Any], replies: Iterator[Reply]) -> float:
        """See `AskingGrader`."""
        label = self._reply(replies, "label")
        if label not in self.labels:
            raise JobError(f"the grader's model must give one of its labels, not {str(label)[:80]!r}")
        return float(label in self.passing_labels)


def models_asked(grader: object) -> set[str]:
    """Names of the models that a grader, or one within it, asks."""
    if isinstance(grader, ModelGrader):
        return {grader.model}
    inner = getattr(grader, "graders", {})
    return set[str]().union(*(models_asked(one) for one in inner.values()))


def _one_field(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


def message_template(given: object, what: str) -> tuple[str, Template]:
    """The role and the template of a message. Raises ConfigError."""
    if not isinstance(given, Mapping) or given.get("role") not in _ROLES or "content" not in given:
        raise ConfigError(
            f"{what} has a message without a content, or of another role than {', '.join(_ROLES)}"
        )
    if (strange := set(given) - {"role", "content", "type"}) or given.get("type", "message") != "message":
        raise ConfigError(f"{what} has a message with {min(map(str, strange), default='another type')!r:.80}")
    return given["role"], Template(text_of_content(given["content"], what), what, _LONGEST)


def text_of_content(given: object, what: str) -> str:
    """The text of a content. Raises ConfigError for one that is no text."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        if given.get("type") in _TEXTS and isinstance(given.get("text"), str):
            return str(given["text"])
        raise ConfigError(f"{what} has content of the type {str(given.get('type'))!r:.80}: only text is read")
    if isinstance(given, list | tuple) and 1 <= len(given) <= _MOST_PARTS:
        if any(isinstance(part, list | tuple) for part in given):
            raise ConfigError(f"{what} has a list within a content")
        return "".join(text_of_content(part, what) for part in given)
    raise ConfigError(f"{what} has a content that is neither a text nor a list of 1 to {_MOST_PARTS} parts")
