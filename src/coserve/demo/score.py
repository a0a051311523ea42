"""Scores a model on held-out questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coserve.core.request import SamplingParams
from coserve.demo.lessons import HeldOut
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine, Prompt
from coserve.train.example import IGNORED, Example

LONGEST_ANSWER: Final = 64
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one model on a set of questions. `loss` is per token of the expected answers, in nats."""

    answers: tuple[str, ...]
    right: int
    loss: float

    @property
    def share(self) -> float:
        """Share of exact matches."""
        return self.right / len(self.answers)


def score_model(engine: Engine, step: Step, questions: Sequence[HeldOut], adapter: str | None) -> Score:
    """Greedy answers of the base or an adapter to all questions at once, and the loss of the right ones."""
    answers = ask_all(engine, step, [question.prompt for question in questions], adapter)
    right = sum(matches(answer, question.answer) for answer, question in zip(answers, questions, strict=True))
    loss = held_out_loss(engine, step, [question.example for question in questions], adapter)
    return Score(tuple(answers), right, loss)


def matches(answer: str, expected: str) -> bool:
    """Tells whether an answer is the expected one, ignoring surrounding space."""
    return answer.strip() == expected.strip()


def ask_all(engine: Engine, step: Step, prompts: Sequence[Prompt], adapter: str | None) -> list[str]:
    """Greedy answers to all prompts at once."""
    sampling = SamplingParams(max_tokens=LONGEST_ANSWER)
    return [h.text for h in _finish([engine.generate(p, adapter, sampling) for p in prompts], step)]


def held_out_loss(engine: Engine, step: Step, examples: Sequence[Example], adapter: str | None) -> float:
    """Mean negative log-likelihood of the examples' labels, in nats, scored as prompts."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    handles = [engine.generate(example.tokens, adapter, sampling) for example in examples]
    losses = [
        -scored.chosen
        for example, handle in zip(examples, _finish(handles, step), strict=True)
        for label, scored in zip(
            example.labels, handle.prompt_logprobs, strict=False
        )  # the last predicts none
        if label != IGNORED
    ]
    return sum(losses) / len(losses)


def _finish(handles: list[Completion], step: Step) -> list[Completion]:
    while any(handle.finish_reason is None for handle in handles):
        step()
    return handles
