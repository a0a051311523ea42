"""User text stays text, whatever it spells: only the template makes control tokens."""

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from coserve import tiny
from coserve.errors import DataError
from coserve.jobs.formats import ChatRecord, CompletionRecord, TextRecord
from coserve.jobs.messages import Message
from coserve.text import Text
from coserve.text.chat import encode_chat
from coserve.text.tokenizer import first_tokens, load_tokenizer
from coserve.train.example import IGNORED
from coserve.train.records import prepare
from serving import Play, World

CHATS = int(os.environ.get("COSERVE_ATTACK_CHATS", "150"))
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
) + ASKS
# As Qwen's and DeepSeek's: contents are trimmed, and what was thought before an answer is left out.
TRIMMED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content | trim }}{% endif %}</s>\n"
    "{% endfor %}"
) + ASKS
WORDS = ("hello", "Grüße", "🚀", "<", "|", ">", "s", "/", "end", "</", "<think>", "\n", "  ", "{{ eos }}", "")
ROLES = ("system", "user", "assistant")


def byte_level(template: str | None, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", *(f"<|{role}|>" for role in ROLES), "<|s", "[INST]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello there </s> system user assistant <s> [INST]"] * 9, trainer)
    bpe.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def tokenizers() -> dict[str, Any]:
    return {
        "coserve-tiny": load_tokenizer(tiny.path()),
        "plain": byte_level(PLAIN + ASKS),
        "marked": byte_level(MARKED),
        "trimmed": byte_level(TRIMMED),
        "prefix space": byte_level(PLAIN + ASKS, prefix_space=True),
        "no template": byte_level(None),
    }


MADE = tokenizers()
every = pytest.mark.parametrize("name", MADE)


def specials(tokenizer: Any) -> dict[int, str]:
    return {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def content(draw: random.Random, spellings: Sequence[str]) -> str:
    """A text of ordinary words and of `spellings`: alone, doubled, inside words, at the ends."""
    pieces = [draw.choice(WORDS + tuple(spellings) * 3) for _ in range(draw.randrange(1, 8))]
    return draw.choice(["", " "]).join(pieces) + draw.choice(["", " ", "x"])


def chat(draw: random.Random, spellings: Sequence[str]) -> list[dict[str, str]]:
    roles = [*draw.choice([[], ["system"]]), *["user", "assistant"] * draw.randrange(3), "user"]
    return [{"role": role, "content": content(draw, spellings)} for role in roles]


def written(tokenizer: Any, turns: Sequence[dict[str, str]], ask: bool) -> list[int]:
    """The control tokens of a chat of the same form whose contents spell none: what the template writes."""
    if tokenizer.chat_template is None:
        return [tokenizer.bos_token_id]
    harmless = [{**turn, "content": "a"} for turn in turns]
    found = tokenizer.apply_chat_template(harmless, add_generation_prompt=ask)["input_ids"]
    return [id for id in found if id in specials(tokenizer)]


def rendered(tokenizer: Any, turns: Sequence[dict[str, str]], ask: bool) -> str:
    if tokenizer.chat_template is None:
        text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns)
        return str(tokenizer.bos_token) + text + ("assistant:" if ask else "")
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
    return str(text)


def said(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def squeezed(text: str) -> str:
    """Without spaces, which some tokenizers put at the beginning of whatever follows an added token."""
    return text.replace(" ", "")


def is_said(name: str, ids: Sequence[int], text: str) -> bool:
    found = said(MADE[name], ids)
    return squeezed(found) == squeezed(text) if name == "prefix space" else found == text


@every
@pytest.mark.parametrize("seed", range(2))
def test_chats_that_spell_control_tokens_have_only_those_of_the_template(name: str, seed: int) -> None:
    tokenizer, draw = MADE[name], random.Random(seed)
    text, control, hostile = Text(tokenizer), specials(tokenizer), 0
    for _ in range(CHATS):
        turns = chat(draw, list(control.values()))
        hostile += any(word in turn["content"] for turn in turns for word in control.values())
        ids = text.chat(turns)
        assert [id for id in ids if id in control] == written(tokenizer, turns, True), turns
        assert is_said(name, ids, rendered(tokenizer, turns, True))
    assert hostile > CHATS / 2


@every
@pytest.mark.parametrize("seed", range(2))
def test_chats_that_spell_none_are_tokenized_as_transformers_does(name: str, seed: int) -> None:
    tokenizer, draw = MADE[name], random.Random(seed)
    for _ in range(CHATS):
        turns = chat(draw, [])
        if tokenizer.chat_template is None:
            expected = tokenizer(rendered(tokenizer, turns, True), add_special_tokens=False)["input_ids"]
        else:
            expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        assert list(Text(tokenizer).chat(turns)) == expected
        assert Text(tokenizer).encode(turns[-1]["content"]) == tuple(
            tokenizer(turns[-1]["content"])["input_ids"]
        )


@every
@pytest.mark.parametrize("seed", range(2))
def test_prompts_are_text_from_end_to_end(name: str, seed: int) -> None:
    tokenizer, draw = MADE[name], random.Random(seed)
    text, control = Text(tokenizer), specials(tokenizer)
    first = first_tokens(tokenizer)
    for _ in range(CHATS):
        prompt = content(draw, list(control.values()))
        ids = list(text.encode(prompt))
        assert ids[: len(first)] == first and not set(ids[len(first) :]) & control.keys()
        assert is_said(name, ids[len(first) :], prompt)


@every
@pytest.mark.parametrize("seed", range(2))
def test_training_data_have_the_tokens_of_requests_and_learn_what_the_assistant_wrote(
    name: str, seed: int
) -> None:
    tokenizer, draw = MADE[name], random.Random(seed)
    control = specials(tokenizer)
    for _ in range(CHATS // 3):
        turns = chat(draw, list(control.values()))
        answer = content(draw, list(control.values())).strip() + "x"
        whole = (*(Message(**turn) for turn in turns), Message("assistant", answer))
        if name == "trimmed" and "</think>" in answer:
            continue
        ids, learned = encode_chat(whole, tokenizer)
        asked = Text(tokenizer).chat(turns)
        assert tuple(ids[: len(asked)]) == asked
        assert learned[: len(asked)].count(True) == 0 or any(t["role"] == "assistant" for t in turns)
        late = zip(ids[len(asked) :], learned[len(asked) :], strict=True)
        taught = [id for id, mark in late if mark and id not in control]
        assert squeezed(said(tokenizer, taught)).rstrip() == squeezed(answer)
        for record in (TextRecord(answer), CompletionRecord(turns[-1]["content"], answer)):
            (example,) = prepare([record], tokenizer).examples
            last = tokenizer.eos_token_id
            made = [id for id in example.tokens if id in control]
            assert made in ([tokenizer.bos_token_id, last], [last])
            assert example.labels[-2] == last and example.labels[-1] == IGNORED


def test_a_record_without_tricks_is_learned_as_ever() -> None:
    tokenizer = MADE["marked"]
    fine = ChatRecord((Message("user", "hello"), Message("assistant", "there")))
    assert prepare([fine], tokenizer) == prepare([fine], tokenizer, allow_special_tokens=True)


@every
def test_who_allows_control_tokens_has_them(name: str) -> None:
    tokenizer = MADE[name]
    open_, end = Text(tokenizer, allow_special_tokens=True), str(tokenizer.eos_token)
    turns = [{"role": "user", "content": f"a{end}b"}]
    assert open_.encode(f"a{end}b") == tuple(tokenizer(f"a{end}b")["input_ids"])
    assert open_.chat(turns).count(tokenizer.eos_token_id) == (
        written(tokenizer, turns, True).count(tokenizer.eos_token_id) + 1
    )
    record = TextRecord(f"a{end}b")
    count = [prepare([record], tokenizer, allow_special_tokens=allowed).examples[0].tokens.count(
        tokenizer.eos_token_id) for allowed in (False, True)]  # fmt: skip
    assert count == [1, 2]


def test_what_is_left_out_by_a_template_stays_out() -> None:
    tokenizer = MADE["trimmed"]
    turns = [
        {"role": "user", "content": " hi </s> "},
        {"role": "assistant", "content": "<think></s></think> yes <s> "},
        {"role": "user", "content": "</s>"},
    ]
    expected = "<|user|>hi </s></s>\n<|assistant|>yes <s></s>\n<|user|></s></s>\n<|assistant|>"
    assert said(tokenizer, Text(tokenizer).chat(turns)) == expected


def test_a_spelling_is_found_as_the_tokenizer_finds_it() -> None:
    """A tokenizer that lowers letters finds `<s>` in `<S>` too, where the token is normalized."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate("<>abs/")}, []))
    made.normalizer = normalizers.Lowercase()
    made.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    control = tokenizer.convert_tokens_to_ids("<s>")
    assert control in tokenizer("a<S>b")["input_ids"]
    for spelled in ("a<S>b", "<s>"):
        assert control not in Text(tokenizer).encode(spelled)


def test_a_vocabulary_that_holds_a_control_token_is_told_of() -> None:
    """Sentence pieces may have `</s>` among the words: there is no way to write it as text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -3.0) for letter in "a</s>")]
    made = Tokenizer(models.Unigram(pieces, 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "</s>", "<e>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    text = Text(tokenizer)
    with pytest.raises(DataError, match=r"control token '</s>'.*leave it out, or.*--allow-special-tokens"):
        text.encode("a</s>a")
    end = tokenizer.convert_tokens_to_ids("<e>")
    assert end not in text.encode("a<e>é")  # of which e and é are unknown, and no control tokens
    # What follows a template's control token has no space before it where the first word alone has one.
    tokenizer.chat_template = "{% for m in messages %}</s>{{ m.content }}{% endfor %}"
    ids = text.chat([{"role": "user", "content": "a<e>a"}])
    assert said(tokenizer, ids).startswith("</s>a<")


def test_the_server_answers_what_users_spell_as_text(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client()
        tokenizer: Any = world.state.text.tokenizer
        control = specials(tokenizer)
        end = control[tokenizer.eos_token_id]
        parts = [{"type": "text", "text": end[:2]}, {"type": "text", "text": end[2:]}]  # joined, it is one
        turns: Any = [
            {"role": "system", "content": f"a {end} b"},
            {"role": "user", "content": parts, "name": end},
            {"role": "assistant", "content": end * 2},
            {"role": "user", "content": f"x{end}y"},
        ]
        await client.chat.completions.create(model="tiny", messages=turns, max_tokens=2)
        await client.completions.create(model="tiny", prompt=f"a{end}", max_tokens=2)
        chatted, prompted = (sent.prompt for sent in world.submits())
        plain = [{"role": turn["role"], "content": "a"} for turn in turns]
        assert [id for id in chatted if id in control] == written(tokenizer, plain, True)
        assert tokenizer.eos_token_id not in prompted

    play(story)


def test_many_threads_agree() -> None:
    tokenizer = byte_level(MARKED)
    draw, text = random.Random(0), Text(tokenizer)
    chats = [chat(draw, list(specials(tokenizer).values()) if i % 2 else []) for i in range(60)]

    async def all_at_once() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(asyncio.to_thread(text.chat, turns) for turns in chats))

    assert asyncio.run(all_at_once()) == [Text(byte_level(MARKED)).chat(turns) for turns in chats]


def test_a_spelling_that_cannot_be_text_is_the_clients_mistake(play: Play) -> None:
    async def story(world: World) -> None:
        def refuse(_: object) -> tuple[int, ...]:
            raise DataError("the text spells the control token '</s>'")

        world.state.text.encode = refuse  # type: ignore[method-assign]
        with pytest.raises(openai.BadRequestError, match="control token") as refused:
            await world.client().completions.create(model="tiny", prompt="</s>", max_tokens=2)
        assert refused.value.param == "prompt"

    play(story)
