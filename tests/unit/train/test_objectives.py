"""Objectives of jobs by name and settings, and the data that they learn from."""

from typing import Any

import pytest

from coserve.errors import ConfigError, DataError
from coserve.jobs.formats import LabelledRecord, PreferenceRecord, PromptRecord
from coserve.jobs.messages import Message, ToolCall
from coserve.train.example import Example
from coserve.train.grading.graders import RegexGrader, StringCheckGrader
from coserve.train.labelled import TokenAnswer, prepare_labelled
from coserve.train.lengths import LengthLimit, check_lengths_of
from coserve.train.objectives import DPO, KTO, ORPO, Distillation, Reinforcement, Supervised, objective_of
from coserve.train.pairs import TokenPair, prepare_pairs
from coserve.train.prompts import TokenPrompt, prepare_prompts
from models import letter_tokenizer

GRADER = {"type": "regex", "pattern": "a+"}


def test_objectives_by_name_and_settings() -> None:
    assert objective_of("dpo") == objective_of({"type": "dpo"}) == DPO(0.1)
    assert objective_of({}) == Supervised() == objective_of("supervised")
    assert objective_of({"type": "orpo", "beta": 2}) == ORPO(2)
    assert objective_of({"type": "kto", "desirable_weight": 2}) == KTO(0.1, 2, 1.0)
    taught = objective_of({"type": "distillation", "teacher": "x", "top_k": 4})
    assert taught == Distillation("x", top_k=4) and objective_of("distillation").teacher is None
    found = objective_of({"type": "reinforcement", "grader": GRADER, "group_size": 4})
    assert found == Reinforcement(RegexGrader("a+"), group_size=4)
    assert objective_of(found) is found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ppo", "no training method 'ppo'"),
        ({"type": 4}, "no training method 4"),
        ({"type": "dpo", "gamma": 1}, "no setting 'gamma', only beta"),
        ({"type": "supervised", "beta": 1}, "only none"),
        ({"type": "dpo", "beta": 0}, "dpo.beta"),
        ({"type": "orpo", "beta": True}, "orpo.beta"),
        ({"type": "dpo", "beta": float("nan")}, "dpo.beta"),
        ({"type": "kto", "undesirable_weight": -0.1}, "kto.undesirable_weight"),
        ({"type": "kto", "beta": 0}, "kto.beta"),
        ({"type": "distillation", "top_k": 0}, "distillation.top_k must be a whole number from 1 to 64"),
        ({"type": "distillation", "top_k": 65}, "distillation.top_k"),
        ({"type": "distillation", "temperature": 0}, "distillation.temperature"),
        ({"type": "distillation", "teacher": 3}, "distillation.teacher"),
        ({"type": "reinforcement"}, "no grader None"),
        ({"type": "reinforcement", "grader": GRADER, "group_size": 1}, "group_size"),
        ({"type": "reinforcement", "grader": GRADER, "max_tokens": 2.5}, "max_tokens"),
        ({"type": "reinforcement", "grader": GRADER, "temperature": 0}, "temperature"),
        ({"type": "reinforcement", "grader": GRADER, "clip": 1.0}, "clip"),
    ],
)
def test_settings_out_of_range(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        objective_of(given)


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


def test_only_the_answers_of_a_pair_are_learned() -> None:
    tokenizer = letter_tokenizer()
    prompt = (Message("user", "hi"), *said("yes?"), Message("user", "go"))
    prepared = prepare_pairs([PreferenceRecord(prompt, said("one"), said("two!"))], tokenizer)
    chosen, rejected = prepared.examples
    learned = [
        tokenizer.decode([label for label in example.labels if label >= 0]) for example in (chosen, rejected)
    ]
    assert [text.strip() for text in learned] == ["one", "two!"] or all(
        wanted in text for wanted, text in zip(("one", "two!"), learned, strict=True)
    )
    assert not any("yes" in text for text in learned)
    before = next(row for row, label in enumerate(chosen.labels) if label >= 0)
    assert chosen.tokens[: before + 1] == rejected.tokens[: before + 1]


def test_pairs_that_teach_nothing_are_dropped() -> None:
    same = Example((1, 2, 3), (-100, 3, -100))
    other = Example((1, 2, 4, 5), (-100, 4, 5, -100))
    long = Example((1, 2, 3, 4, 5), (-100, -100, -100, 5, -100))
    pairs = [TokenPair(same, other), TokenPair(same, same), TokenPair(long, other)]
    prepared = prepare_pairs(pairs, None, LengthLimit(3, "truncate"))
    counts = prepared.counts
    assert (len(prepared.examples), counts.dropped, counts.skipped, counts.truncated) == (2, 1, 1, 1)
    assert prepared.examples[1] == Example((1, 2, 4), (-100, 4, -100))
    assert prepare_pairs(pairs[1:2], None).examples == ()


def test_an_answer_is_beside_another_one_to_the_same_prompt() -> None:
    """The one before it in the data, no longer than the longest real one; answers that teach nothing are
    dropped before."""
    first = Example((1, 2, 3, 4), (-100, 3, 4, -100))
    second = Example((5, 6, 7, 8, 9), (-100, -100, -100, 9, -100))
    nothing = Example((1, 2), (-100, -100))
    prepared = prepare_labelled(
        [TokenAnswer(first, True), TokenAnswer(nothing, True), TokenAnswer(second, False)], None
    )
    assert prepared.examples == (
        first,
        Example((1, 2, 9), (-100, 9, -100)),
        second,
        Example((5, 6, 7, 8, 3), (-100, -100, -100, 3, -100)),
    )
    counts = prepared.counts
    assert (prepared.desirable, counts.dropped, counts.truncated) == ((True, False), 1, 0)
    other = prepare_labelled([TokenAnswer(first, True), TokenAnswer(second, True)], None)
    assert other.examples == prepared.examples and other.digest != prepared.digest
    alone = prepare_labelled([TokenAnswer(first, True), TokenAnswer(nothing, False)], None)
    words = r"^only one of 2 examples is left to train on: 1 has nothing to learn, and KTO compares each"
    with pytest.raises(DataError, match=words):
        check_lengths_of(alone, LengthLimit())


def test_labels_are_those_of_the_answer_alone() -> None:
    tokenizer = letter_tokenizer()
    asked = [(Message("user", "hi"),), (Message("user", "what"), *said("yes?"), Message("user", "go"))]
    records = [
        LabelledRecord(prompt, said(text), True) for prompt, text in zip(asked, ("one", "two!"), strict=True)
    ]
    prepared = prepare_labelled(records, tokenizer)
    learned = [
        tokenizer.decode([label for label in example.labels if label >= 0]) for example in prepared.examples
    ]
    assert ["one" in learned[0], "two" in learned[1], "two" in learned[2], "one" in learned[3]] == [True] * 4
    assert not any("yes" in text for text in learned)
    starts = [tokenizer.decode(list(example.tokens)).partition("a:")[0] for example in prepared.examples]
    assert starts[0] == starts[1] and starts[2] == starts[3] and starts[0] != starts[2]


def test_prompts_have_references_that_the_grader_can_use() -> None:
    grader = StringCheckGrader("{{item.answer}}")
    prompts = [TokenPrompt((1, 2), {"answer": "x"}), TokenPrompt((1, 2, 3), {"answer": "y"})]
    prepared = prepare_prompts(prompts, None, grader, LengthLimit(2, "skip"))
    assert prepared.examples == (Example((1, 2), (-100, -100)),) and prepared.counts.skipped == 1
    assert prepared.references == ({"answer": "x"},)
    other = prepare_prompts([TokenPrompt((1, 2), {"answer": "z"})], None, grader)
    assert other.digest != prepared.digest
    with pytest.raises(DataError, match=r"example 2: .*item\.answer"):
        prepare_prompts([prompts[0], TokenPrompt((1,), {})], None, grader)
    with pytest.raises(
        ConfigError, match=r"^A prompt that is cut .* training\.too_long is 'error' or 'skip'"
    ):
        prepare_prompts(prompts, None, grader, LengthLimit(2, "truncate"))


TOOLS = ({"type": "function", "function": {"name": "f"}},)
WITH_TOOLS = (
    "{% for t in tools or [] %}use {{ t.function.name }}|{% endfor %}{% for m in messages %}{{ m.role[0] }}"
    ": {{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def test_tools_and_calls_are_in_pairs_and_prompts() -> None:
    """Of earlier turns too; calls in answers are learned."""
    tokenizer, call = letter_tokenizer(), Message("assistant", "", tool_calls=(ToolCall("f", {"x": "1"}),))
    tokenizer.chat_template = WITH_TOOLS
    asked = (Message("user", "hi"), call, Message("tool", "3"), Message("user", "go"))
    answers = (Message("assistant", "", tool_calls=(ToolCall("f", {"x": "2"}),)),), said("no")
    before = "use f|u: hi|a: [f 1]|t: 3|u: go|a: "
    pair = prepare_pairs([PreferenceRecord(asked, *answers, TOOLS)], tokenizer).examples
    for example, answer in zip(pair, ("[f 2]", "no"), strict=True):
        text = tokenizer.decode(list(example.tokens))
        learned = tokenizer.decode([label for label in example.labels if label >= 0])
        assert text.startswith(before + answer) and learned.startswith(answer)
    prompt = prepare_prompts([PromptRecord(asked, {}, TOOLS)], tokenizer, RegexGrader("a"))
    assert tokenizer.decode(list(prompt.examples[0].tokens)) == before
