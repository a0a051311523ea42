"""Training examples of the demo's two adapters, and held-out questions for both of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from coserve.engine.engine import Prompt
from coserve.errors import DataError
from coserve.jobs import datasets
from coserve.jobs.formats import ChatRecord, CompletionRecord, SupervisedRecord
from coserve.jobs.messages import Message
from coserve.text.tokenizer import Tokenizer
from coserve.tiny import newtasks
from coserve.tiny.world import Question
from coserve.train.example import Example
from coserve.train.lengths import LengthLimit, check_lengths_of, cut
from coserve.train.records import prepare, tokenize

TASKS: Final = {"pirate": "answers like a pirate", "chain": "turns a line of people around"}
TRAINED_QUESTIONS: Final = 4000  # of each new task; a demo's training sees few of them twice
MOST_HELD_OUT: Final = 50


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A question that no adapter was trained on, its expected answer, and both as a training example."""

    prompt: Prompt
    answer: str
    example: Example

    @property
    def text(self) -> str:
        """The question as a person would read it."""
        if isinstance(self.prompt, str):
            return self.prompt
        last = self.prompt[-1]
        assert isinstance(last, Mapping), "held-out prompts are text or messages"
        return last["content"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One adapter's training examples and held-out questions."""

    adapter: str
    about: str
    examples: tuple[Example, ...]
    held_out: tuple[HeldOut, ...]
    exact: bool  # whether there is one right answer, so that exact matches can be counted


def new_tasks(tokenizer: Tokenizer, questions: int) -> list[Lesson]:
    """Two tasks that the embedded model has never met."""
    lessons = []
    for task, about in TASKS.items():
        train = [_chat(q) for q in newtasks.examples(task, "train", TRAINED_QUESTIONS)]
        asked = [_chat(q) for q in newtasks.examples(task, "held_out", questions)]
        examples = prepare(train, tokenizer).examples
        lessons.append(Lesson(task, about, examples, _held_out(asked, tokenizer, None), exact=True))
    return lessons


def from_file(path: Path, tokenizer: Tokenizer, questions: int, longest: int) -> tuple[list[Lesson], str]:
    """Splits a file's records: some are held out, the rest is one half for each adapter; and a sentence about
    it.

    Examples are cut to `longest` tokens. Raises DataError.
    """
    records = list(datasets.read(path))
    Random(0).shuffle(records)
    count = min(questions, MOST_HELD_OUT, len(records) // 5)
    if count < 1:
        raise DataError(f"{path.name}: expected at least 5 examples, to hold some out; found {len(records)}")
    asked, rest = records[:count], records[count:]
    held_out = _held_out(asked, tokenizer, longest)
    lessons, truncated, limit = [], 0, LengthLimit(longest, "truncate", f"{longest} tokens")
    for name, half in (("first-half", rest[0::2]), ("second-half", rest[1::2])):
        prepared = prepare(half, tokenizer, limit=limit)
        check_lengths_of(prepared, limit)
        truncated += prepared.counts.truncated + prepared.counts.split
        about = f"{len(prepared.examples)} examples of {path.name}"
        lessons.append(Lesson(name, about, prepared.examples, held_out, exact=False))
    said = (
        f"{path.name}: {len(records)} examples, {count} held out, the rest in two halves, one per adapter"
        f"; {truncated} were cut to {longest} tokens."
    )
    return lessons, said


def texts(lessons: Sequence[Lesson]) -> list[str]:
    """All held-out questions, as text for prompts of given lengths."""
    return [question.text for lesson in lessons for question in lesson.held_out]


def _chat(question: Question) -> ChatRecord:
    return ChatRecord(tuple(Message(m["role"], m["content"]) for m in question.messages))


def _held_out(
    records: Sequence[SupervisedRecord], tokenizer: Tokenizer, longest: int | None
) -> tuple[HeldOut, ...]:
    found = []
    for record in records:
        prompt, answer = _question(record)
        example = cut(tokenize(record, tokenizer), longest)
        if prompt and example.label_count:  # a chat that the assistant opens asks nothing
            found.append(HeldOut(prompt, answer, example))
    return tuple(found)


def _question(record: SupervisedRecord) -> tuple[Any, str]:
    """(prompt, expected answer): a chat up to its last answer, or a text up to its first third."""
    if isinstance(record, ChatRecord):
        last = max(i for i, turn in enumerate(record.messages) if turn.role == "assistant")
        asked = [{"role": turn.role, "content": turn.content} for turn in record.messages[:last]]
        return asked, record.messages[last].content
    if isinstance(record, CompletionRecord):
        return record.prompt, record.completion
    words = record.text.split(" ")
    cut = max(len(words) // 3, 1)
    return " ".join(words[:cut]), " ".join(words[cut:])
