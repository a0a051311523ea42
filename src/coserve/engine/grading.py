"""Answers of a job graded beside the steps: on its `Aside`, and where the grader asks a model, by requests of
the same engine to the base."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from llguidance import LLMatcher

from coserve.core.request import SLO, SamplingParams
from coserve.engine.aside import Aside
from coserve.engine.completion import Completion
from coserve.errors import CoserveError, JobError
from coserve.text import Text
from coserve.text.tools.lark import COMPACT
from coserve.train.grading.asking import EMBEDDED, AskingGrader, EmbeddingQuestion, Question, Reply
from coserve.train.grading.graders import Grader

FLEX: Final = SLO(deferral=60.0)  # seconds, as a server's tier has by default
_UNDER_WAY: Final = 4  # questions of one job
Answers = Sequence[Sequence[int]]  # tokens of each
Graded = Callable[[list[float] | CoserveError], None]
_Asked = tuple[tuple[int, ...], SamplingParams]  # a prompt, and how it is answered


class Generate(Protocol):
    """`Engine.generate`, as far as jobs need it."""

    def __call__(
        self,
        prompt: Sequence[int],
        adapter: str | None = None,
        sampling: SamplingParams = ...,
        slo: SLO = ...,
        *,
        text: bool = ...,
        scope: str | None = ...,
    ) -> Completion: ...


@dataclass(slots=True, eq=False)
class _Interview:
    """The questions about some answers: those that wait, are under way, and the replies, by number."""

    waiting: deque[tuple[int, _Asked]]
    finish: Callable[[list[Reply] | CoserveError], None]
    under_way: dict[int, Completion] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)


class AnswerGrading:
    """Grades the answers of one job, or of one validation. All methods run between two steps."""

    def __init__(
        self, grader: Grader, generate: Generate, text: Text | None, aside: Aside, scope: str
    ) -> None:
        """`text` decodes answers. The questions of a grader share the prompts' cache under `scope`."""
        self._grader, self._generate, self._text = grader, generate, text
        self._aside, self._scope = aside, scope
        self._asked: list[_Interview] = []

    def grade(self, what: str, answers: Answers, reference: Mapping[str, Any], then: Graded) -> None:
        """Grades answers to one prompt, and then calls `then` with their rewards, between two steps. Errors
        name the work as `what`."""
        grader = self._grader
        if not isinstance(grader, AskingGrader):
            self._aside.do(what, partial(_rewards, grader, self._text, answers, reference), then)
            return

        def replied(replies: list[Reply] | CoserveError) -> None:
            if isinstance(replies, CoserveError):
                then(replies)
                return
            work = partial(_rewards_with, grader, self._text, answers, reference, replies)
            self._aside.do(what, work, then)

        def asked(questions: list[_Asked] | CoserveError) -> None:
            if isinstance(questions, CoserveError):
                then(questions)
                return
            self._asked.append(_Interview(deque(enumerate(questions)), replied))
            self.advance()

        self._aside.do(what, partial(_questions, grader, self._text, answers, reference), asked)

    def advance(self) -> None:
        """Collects replies, and asks the next questions."""
        for one in [*self._asked]:
            try:
                self._collect(one)
            except CoserveError as error:
                self._end(one)
                one.finish(error)
                continue
            if not one.waiting and not one.under_way:
                self._asked.remove(one)
                one.finish([one.replies[number] for number in range(len(one.replies))])
        room = _UNDER_WAY - sum(len(one.under_way) for one in self._asked)
        for one in [*self._asked]:
            try:
                while one in self._asked and one.waiting and room > 0:
                    self._ask(one)
                    room -= 1
            except CoserveError as error:  # a question that is too long for the base, or empty
                self._end(one)
                one.finish(error)

    def close(self) -> None:
        """Ends what is under way."""
        for one in [*self._asked]:
            self._end(one)
        self._aside.close()

    def _ask(self, one: _Interview) -> None:
        """Asks the next question. Raises CoserveError for one that the engine does not take."""
        number, (prompt, sampling) = one.waiting.popleft()
        # All rows of a text that is read are needed: none are shared with others.
        scope = self._scope if sampling.pooling is None else None
        one.under_way[number] = self._generate(prompt, None, sampling, FLEX, text=True, scope=scope)

    def _collect(self, one: _Interview) -> None:
        """Takes the replies that have ended. Raises the error of one that failed."""
        ended = {n: each for n, each in one.under_way.items() if each.finish_reason is not None}
        for number, completion in ended.items():
            del one.under_way[number]
            if completion.error is not None:
                raise completion.error
            is_read = completion.sequence.request.sampling.pooling is not None
            one.replies[number] = completion.embedding if is_read else completion.text

    def _end(self, one: _Interview) -> None:
        self._asked.remove(one)
        for completion in one.under_way.values():
            completion.cancel()


def _decoded(text: Text | None, answers: Answers) -> list[str]:
    return ["" if text is None else text.decode(tokens) for tokens in answers]


def _rewards(
    grader: Grader, text: Text | None, answers: Answers, reference: Mapping[str, Any]
) -> list[float]:
    return [grader.grade(one, reference) for one in _decoded(text, answers)]


def _rewards_with(
    grader: AskingGrader,
    text: Text | None,
    answers: Answers,
    reference: Mapping[str, Any],
    replies: Sequence[Reply],
) -> list[float]:
    left = iter(replies)
    return [grader.grade_with(one, reference, left) for one in _decoded(text, answers)]


def _questions(
    grader: AskingGrader, text: Text | None, answers: Answers, reference: Mapping[str, Any]
) -> list[_Asked]:
    """The questions about some answers, as prompts. Raises JobError where there is no tokenizer."""
    asked = [one for answer in _decoded(text, answers) for one in grader.questions(answer, reference)]
    if asked and text is None:
        raise JobError("a grader that asks a model needs a base with a tokenizer")
    return [_asked(text, one) for one in asked] if text is not None else []


def _asked(text: Text, question: Question) -> _Asked:
    if isinstance(question, EmbeddingQuestion):
        return text.encode(question.text), EMBEDDED
    return text.chat(list(question.messages)), SamplingParams(
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        top_p=question.top_p,
        seed=question.seed,
        grammar=LLMatcher.grammar_from_json_schema(json.dumps(question.schema), overrides=COMPACT),
    )
