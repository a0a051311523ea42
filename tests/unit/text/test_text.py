"""Prompts, chats and single tokens: the same ids as in training, the bytes of every token, and no torch."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from coserve.errors import ConfigError, DataError
from coserve.jobs.formats import ChatRecord
from coserve.jobs.messages import Message
from coserve.text import Text
from coserve.text.chat import encode_chat
from coserve.text.text import byte_letters
from spelling import sentence_pieces

TEMPLATE = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('chats begin with the user') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SLOWLY = "{% for j in range(6) %}{% for i in range(50000) %}{% endfor %}{% endfor %}"
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}" + SLOWLY + "{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
USER, ANSWER = Message("user", "Grüße 🚀?"), Message("assistant", "Hallo")


def byte_level(template: str | None = None, bos: bool = True) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world, hello there"], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_request_asks_with_the_tokens_that_training_has_before_the_answer(
    template: str | None, bos: bool
) -> None:
    tokenizer = byte_level(template, bos)
    asked = Text(tokenizer).chat([{"role": "user", "content": USER.content}])
    trained, learned = encode_chat(ChatRecord((USER, ANSWER)).messages, tokenizer)
    assert list(asked) == trained[: learned.index(True)]
    if template is not None:
        turns = [{"role": "user", "content": USER.content}]
        assert list(asked) == tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


def test_jobs_that_are_read_at_once_do_not_mix_their_chats() -> None:
    tokenizer = byte_level(MARKED)
    chats = [(USER, Message("assistant", "hello " * i)) for i in range(1, 7)]
    alone = [encode_chat(chat, tokenizer) for chat in chats]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda chat: encode_chat(chat, tokenizer), chats)) == alone


def test_prompts_are_encoded_as_the_tokenizer_does() -> None:
    tokenizer = byte_level()
    assert list(Text(tokenizer).encode("hello")) == tokenizer("hello")["input_ids"]
    assert Text(tokenizer).encode("")[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "assistant", "content": "a"}], "refuses this chat: chats begin with the user"),
        ([], "the chat template refuses"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 2 to have a role and a content"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said(messages: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Text(byte_level(TEMPLATE)).chat(messages)


def test_the_bytes_of_all_tokens_joined_are_the_text() -> None:
    tokenizer, said = byte_level(bos=False), "hello Köln, 🎉 there\n\t"
    text = Text(tokenizer)
    tokens = text.encode(said)
    assert b"".join(map(text.tokens.bytes_of, tokens)).decode() == said == text.decode(tokens)
    rocket = text.encode("🚀")
    assert len(rocket) == 4 and [text.tokens.bytes_of(token) for token in rocket] == [
        bytes([byte]) for byte in "🚀".encode()
    ]
    assert text.tokens.text_of(rocket[0]) == "\\xf0"
    assert text.tokens.text_of(text.encode(" hello")[0])[0] == " "


def test_the_letters_of_bytes_are_those_of_byte_level_vocabularies() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_letters().values()) == list(range(256))
    assert byte_letters()["Ġ"] == ord(" ") and byte_letters()["Ċ"] == ord("\n")


def test_special_and_unknown_tokens_have_pieces_too() -> None:
    text = Text(byte_level())
    assert text.tokens.text_of(0) == "<s>" and text.decode([0, *text.encode("hi")]) == "hi"
    assert text.tokens.text_of(10**6) == "" and text.tokens.bytes_of(10**6) == b""


def test_sentence_pieces_have_their_spaces_and_bytes() -> None:
    tokenizer = sentence_pieces()
    text, id_of = Text(tokenizer), tokenizer.get_vocab()
    assert text.tokens.text_of(id_of["▁hi"]) == " hi" and text.tokens.text_of(id_of["h"]) == "h"
    assert text.tokens.bytes_of(id_of["<0xF0>"]) == b"\xf0"
    assert text.tokens.text_of(id_of["<s>"]) == "<s>"


@pytest.mark.parametrize(
    ("before", "names", "said"),
    [
        ([], ["▁hi", "▁hi"], "hi hi"),
        (["▁hi"], ["▁hi", "▁hi"], " hi hi"),  # where the text goes on, the space stays
        (["▁hi", "h"], ["i", "▁hi"], "i hi"),
        (["<s>"], ["▁hi"], "hi"),
        (["▁hi"], ["<0xF0>", "<0x9F>", "<0x90>", "<0xB6>", "▁hi", "<0xF0>"], "🐶 hi\ufffd"),
        (["▁hi", "<0xF0>", "<0x9F>", "<0x90>", "<0xB6>"], ["▁hi"], " hi"),
        (["▁hi", "<s>", "<s>"], ["▁hi"], " hi"),
        (["▁hi", "<0xF0>"], ["<0x9F>", "▁hi"], "\ufffd hi"),  # half a character before is left as it was
    ],
)
def test_a_text_goes_on_as_if_it_had_been_decoded_at_once(
    before: list[str], names: list[str], said: str
) -> None:
    tokenizer = sentence_pieces()
    id_of = tokenizer.get_vocab()
    stream = Text(tokenizer).stream(after=[id_of[name] for name in before])
    assert "".join(stream.push(id_of[name]) for name in names) + stream.finish() == said


@pytest.mark.parametrize("seed", range(5))
def test_whatever_stands_before_an_answer_it_goes_on_as_if_decoded_at_once(seed: int) -> None:
    draw, tokenizer = random.Random(seed), sentence_pieces()
    text, names = Text(tokenizer), tokenizer.get_vocab()
    dog = [names[name] for name in ("<0xF0>", "<0x9F>", "<0x90>", "<0xB6>")]
    units = [dog, [names["▁hi"]], [names["h"]], [names["i"]], [names["<s>"]]]
    for _ in range(200):
        before, answer = (
            [t for unit in draw.choices(units, k=draw.randrange(1, 9)) for t in unit] for _ in "ab"
        )
        stream = text.stream(after=before)
        said = "".join(map(stream.push, answer)) + stream.finish()
        assert text.decode(before) + said == text.decode(before + answer)


def test_places_of_tokens_are_those_of_their_characters() -> None:
    text = Text(byte_level())
    tokens = (0, *text.encode("aé🚀 b"))
    found = text.starts(tokens)
    for token, start in zip(tokens, found, strict=True):
        piece = text.tokens.bytes_of(token)
        assert token < 2 or piece in "aé🚀 b"[start:].encode()[: len(piece) + 3]
    assert found == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4]


def test_without_a_decoder_a_token_is_its_name() -> None:
    plain = Tokenizer(models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    assert Text(PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")).tokens.text_of(1) == "word"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json that can be read"):
        Text.load(tmp_path)


def test_a_tokenizer_is_loaded_and_used_without_torch(tmp_path: Path) -> None:
    made = byte_level(TEMPLATE)
    made.save_pretrained(tmp_path)
    # What a model's folder has besides, and what makes transformers look for the model's own class.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    code = f"""
import sys
from coserve.text import Text
text = Text.load({str(tmp_path)!r})
stream = text.stream(["x"])
tokens = text.chat([{{"role": "user", "content": "hi"}}])
said = "".join(map(stream.push, tokens)) + stream.finish()
print(*tokens, *text.encode("hello"), text.tokens.text_of(5), said.strip(), "torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text = Text(made)
    tokens = text.chat([{"role": "user", "content": "hi"}])
    said = text.decode(tokens).strip()
    expected = [*tokens, *text.encode("hello"), text.tokens.text_of(5), said, False]
    assert out.stdout.split() == " ".join(map(str, expected)).split()
