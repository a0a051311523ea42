"""Examples: which tokens are learned, in which order examples come, how they are packed."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from coserve.errors import ConfigError, DataError
from coserve.jobs.formats import ChatRecord, CompletionRecord, TextRecord
from coserve.jobs.messages import Message
from coserve.jobs.packing import pack
from coserve.text import chat
from coserve.text.chat import plain_chat
from coserve.train.example import IGNORED, Example, epochs, steps_per_epoch
from coserve.train.pairs import encode_answers
from coserve.train.records import prepare, tokenize

HEADER = "{% for m in messages %}<|{{ m.role }}|>"
MARKED = (
    HEADER + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = HEADER + "{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SHRINKING = (
    HEADER + "{% if loop.last %}(think) {% endif %}{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPPING = (  # reasoning of all but the last turn, as Qwen3's
    HEADER + "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('chats begin with the user') }}{% endif %}"
    + UNMARKED
)
CHAT = ChatRecord((
    Message("system", "Be brief."),
    Message("user", "Grüße?"),
    Message("assistant", "Hallo 🚀"),
    Message("user", "Ende"),
    Message("assistant", "ok 🎉"),
))  # fmt: skip


def tokenizer_with(
    template: str | None = None, bos: bool = False, eos: bool = True
) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world, hello there", "assistant user system"], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ends = {"eos_token": "</s>"} if eos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", **ends)
    made.chat_template = template
    return made


def learned(example: Example, tokenizer: Any) -> list[str]:
    """The stretches of text that have labels; checks that labels are the tokens that follow."""
    stretches: list[list[int]] = [[]]
    for i, label in enumerate(example.labels):
        if label == IGNORED:
            stretches.append([])
        else:
            assert label == example.tokens[i + 1]
            stretches[-1].append(label)
    return [tokenizer.decode(ids) for ids in stretches if ids]


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_chats_are_learned_where_the_assistant_speaks(template: str) -> None:
    tokenizer = tokenizer_with(template)
    example = tokenize(CHAT, tokenizer)
    assert learned(example, tokenizer) == ["Hallo 🚀</s>", "ok 🎉</s>"]
    turns = [{"role": message.role, "content": message.content} for message in CHAT.messages]
    assert list(example.tokens) == tokenizer.apply_chat_template(turns)["input_ids"]


def test_a_last_character_of_several_tokens_is_learned_as_a_whole() -> None:
    tokenizer = tokenizer_with(MARKED.replace("{{ m.content }}</s>{% endg", "{{ m.content }}{% endg"))
    assert learned(tokenize(CHAT, tokenizer), tokenizer) == ["Hallo 🚀", "ok 🎉"]


def test_offsets_without_their_spaces_lose_no_answer() -> None:
    tokenizer = tokenizer_with(MARKED.replace("{% generation %}", "{% generation %} "))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    record = ChatRecord((Message("user", "a"), Message("assistant", " hello")))
    assert learned(tokenize(record, tokenizer), tokenizer) == ["  hello</s>"]


def test_loss_on_all_learns_everything_but_the_first_token() -> None:
    tokenizer = tokenizer_with(MARKED)
    for record in (CHAT, CompletionRecord("hello", " world"), TextRecord("hello")):
        example = tokenize(record, tokenizer, loss_on="all")
        assert example.labels == (*example.tokens[1:], IGNORED)
        assert example.label_count == len(example) - 1


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(DataError, match=r"^example 2: the chat template renders message 3 .*generation"):
        prepare([TextRecord("fine"), CHAT], tokenizer_with(SHRINKING))


def reasoned(weight: int = 1) -> tuple[Message, ...]:
    first, last = (
        Message("assistant", "Hallo", weight, reasoning="r1"),
        Message("assistant", "ok", reasoning="r2"),
    )
    return Message("user", "Grüße?"), first, Message("user", "Ende"), last


def as_turns(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [
        {"role": one.role, "content": one.content, "reasoning_content": one.reasoning} for one in messages
    ]


def test_turns_that_a_template_rewrites_are_learned_one_by_one_as_they_are_served() -> None:
    tokenizer, messages = tokenizer_with(DROPPING), reasoned()
    prepared = prepare([TextRecord("fine"), ChatRecord(messages), TextRecord("too")], tokenizer)
    _, first, last, _ = prepared.examples
    for example, end, said in (
        (first, 2, "<think>r1</think>Hallo</s>"),
        (last, 4, "<think>r2</think>ok</s>"),
    ):
        turns = as_turns(messages[:end])
        asked = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True)["input_ids"]
        assert list(example.tokens) == tokenizer.apply_chat_template(turns)["input_ids"]
        assert list(example.tokens[: len(asked)]) == asked and learned(example, tokenizer) == [said]
    (only,) = prepare([ChatRecord(reasoned(weight=0))], tokenizer).examples
    assert only == last
    (whole,) = prepare([ChatRecord(messages)], tokenizer, loss_on="all").examples
    assert list(whole.tokens) == tokenizer.apply_chat_template(as_turns(messages))["input_ids"]
    assert whole.label_count == len(whole) - 1
    chosen, rejected = encode_answers(
        messages[:-1], (messages[-1:], (Message("assistant", "no"),)), tokenizer, False, ()
    )
    assert chosen == last and learned(rejected, tokenizer) == ["no</s>"]


def test_a_chat_whose_turns_have_too_much_before_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MOST_AGAIN", 100)
    with pytest.raises(DataError, match=r"^example 1: .* 40 turns are learned one by one.* split this chat"):
        prepare([ChatRecord(reasoned() * 20)], tokenizer_with(DROPPING))


def test_what_a_template_objects_to_is_passed_on() -> None:
    with pytest.raises(DataError, match="refuses this chat: chats begin with the user"):
        tokenize(CHAT, tokenizer_with(STRICT))


@pytest.mark.parametrize("bos", [True, False])
def test_without_a_template_chats_are_plain_lines(bos: bool) -> None:
    tokenizer = tokenizer_with(None, bos)
    example = tokenize(CHAT, tokenizer)
    text = "system: Be brief.\nuser: Grüße?\nassistant: Hallo 🚀\nuser: Ende\nassistant: ok 🎉\n</s>"
    assert tokenizer.decode(example.tokens) == ("<s>" if bos else "") + text
    assert learned(example, tokenizer) == [" Hallo 🚀\n", " ok 🎉\n</s>"]
    asked = plain_chat([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert asked == "user: a\nassistant:"
    open_end = tokenize(ChatRecord((*CHAT.messages, Message("user", "So?"))), tokenizer)
    assert tokenizer.decode(open_end.tokens).endswith("user: So?\n")


@pytest.mark.parametrize("bos", [True, False])
def test_completions_are_learned_with_the_end_and_prompts_are_tokens_as_requested(bos: bool) -> None:
    tokenizer = tokenizer_with(bos=bos)
    assert tokenizer.encode("hel") != tokenizer.encode("hello")[: len(tokenizer.encode("hel"))]  # they merge
    for prompt, completion in (("hel", "lo"), ("hello", " world")):
        example = tokenize(CompletionRecord(prompt, completion), tokenizer)
        asked = tokenizer.encode(prompt)
        assert list(example.tokens[: len(asked)]) == asked
        assert learned(example, tokenizer) == [completion + "</s>"]


def test_texts_are_learned_between_the_ends_the_tokenizer_has() -> None:
    full = tokenizer_with(bos=True)
    assert full.decode(tokenize(TextRecord("hello"), full).tokens) == "<s>hello</s>"
    bare = tokenizer_with(eos=False)
    assert bare.decode(tokenize(TextRecord("hello there"), bare).tokens) == "hello there"


def test_each_epoch_sees_every_example_once_in_an_order_of_its_own() -> None:
    steps = list(epochs(10, 4, 3, seed=7))
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    orders = [sum(steps[i : i + 3], ()) for i in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(orders)) == 3
    assert list(epochs(10, 4, 3, seed=7)) == steps != list(epochs(10, 4, 3, seed=8))
    assert steps_per_epoch(10, 4) == 3 and steps_per_epoch(8, 4) == 2


def test_a_resumed_schedule_goes_on_as_it_would_have() -> None:
    steps = list(epochs(7, 3, 4, seed=1))
    for start in range(len(steps) + 2):
        assert list(epochs(7, 3, 4, seed=1, start=start)) == steps[start:]
    assert list(epochs(7, 3, 9, seed=1))[: len(steps)] == steps


@pytest.mark.parametrize("bad", [(0, 1, 1, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 0, 0), (1, 1, 1, 0, -1)])
def test_impossible_schedules_are_refused(bad: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        next(epochs(*bad))


def test_packing_keeps_examples_whole_in_order_and_within_bounds() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        lengths = [draw.randrange(1, 40) for _ in range(draw.randrange(20))]
        packs = pack(lengths, 32)
        assert sorted(i for indices in packs for i in indices) == list(range(len(lengths)))
        assert all(indices == sorted(indices) for indices in packs) and packs == sorted(packs)
        rows = [sum(lengths[i] for i in indices) for indices in packs]
        assert all(total <= 32 or len(indices) == 1 for total, indices in zip(rows, packs, strict=True))
        assert sum(total <= 16 for total in rows) <= 1  # two that are half empty would have been one
    assert pack([5, 9, 3, 40, 4], 10) == [[0, 4], [1], [2], [3]]
    assert pack([], 10) == []
