"""Streaming text: whole characters, no glimpse of a stop string, and the same text as decoding at once."""

import random
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coserve.errors import ConfigError
from coserve.text import Text
from coserve.text.detokenize import StopMatcher

SENTENCES = [
    "Grüße aus Köln, schöne Straße! 🎉🎊",
    "Familie 👩‍👩‍👧 und Flagge 🇩🇪, naïve café.",
    "The quick brown fox jumps over the lazy dog. 中文字符",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def draws() -> Iterator[random.Random]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    yield random.Random(seed)


def random_bytes_tokens(text: str, tokenizer: PreTrainedTokenizerFast, draws: random.Random) -> list[int]:
    """`text` as tokens cut anywhere, also inside characters: bytes or merged pieces, by chance."""
    as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    letters = "".join(piece for piece, _ in as_bytes.pre_tokenize_str(text))
    vocab, ids, at = tokenizer.get_vocab(), [], 0
    while at < len(letters):
        pieces = [letters[at : at + n] for n in range(1, 9) if letters[at : at + n] in vocab]
        piece = draws.choice(pieces)
        ids.append(vocab[piece])
        at += len(piece)
    return ids


def test_any_split_of_a_text_gives_the_text_and_only_whole_characters(
    tokenizer: PreTrainedTokenizerFast, draws: random.Random
) -> None:
    for _ in range(40):
        text = " ".join(draws.choices(SENTENCES, k=3))
        stream = Text(tokenizer).stream()
        pieces = [stream.push(token) for token in random_bytes_tokens(text, tokenizer, draws)]
        assert "".join(pieces) == text
        assert stream.finish() == ""
        assert all("\ufffd" not in piece for piece in pieces)


def test_random_tokens_give_what_decoding_all_of_them_gives(
    tokenizer: PreTrainedTokenizerFast, draws: random.Random
) -> None:
    for _ in range(400):
        ids = [draws.randrange(len(tokenizer)) for _ in range(draws.randrange(40))]
        stream = Text(tokenizer).stream()
        text = "".join([stream.push(token) for token in ids]) + stream.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_comes_at_the_end_as_its_replacement(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = random_bytes_tokens("ok 🚀", tokenizer, random.Random(0))
    stream = Text(tokenizer).stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == "ok "
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_skipped(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Text(tokenizer).stream()
    ids = [tokenizer.bos_token_id, *tokenizer.encode("fox"), tokenizer.eos_token_id]
    assert "".join(stream.push(token) for token in ids) + stream.finish() == "fox"


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow definition: read character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_cut_any_split_of_any_text_at_the_same_place(draws: random.Random) -> None:
    matched = 0
    for _ in range(3000):
        text = "".join(draws.choices("abc", k=draws.randrange(12)))
        stops = ["".join(draws.choices("abc", k=draws.randrange(1, 5))) for _ in range(draws.randrange(4))]
        want, stopped = cut(text, stops)
        if has_stop := draws.random() < 0.3:
            want += stopped or ""
        matcher, got, rest = StopMatcher(stops, has_stop), "", text
        while rest:
            length = draws.randrange(1, len(rest) + 1)
            got += matcher.push(rest[:length])
            rest = rest[length:]
            assert want.startswith(got), (text, stops)
        got += matcher.finish()
        assert (got, matcher.matched) == (want, stopped), (text, stops)
        assert matcher.stopped is (stopped is not None)
        matched += matcher.stopped
    assert 300 < matched < 2700


def test_text_is_held_back_no_longer_than_it_could_begin_a_stop_string() -> None:
    matcher = StopMatcher(["\nUser:", "END"])
    pushed = [matcher.push(piece) for piece in ("Hi\n", "U", "ser", "name", " E", "N", "!", "\nUser: more")]
    assert pushed == ["Hi", "", "", "\nUsername", " ", "", "EN!", ""]
    assert matcher.stopped and matcher.finish() == "" and matcher.push("x") == ""


def test_a_stream_stops_across_token_borders_and_says_nothing_more(
    tokenizer: PreTrainedTokenizerFast, draws: random.Random
) -> None:
    text, stop = "schöne Straße! 🎉🎊 fox", "ße! 🎉"
    for _ in range(40):
        stream = Text(tokenizer).stream([stop])
        ids = random_bytes_tokens(text, tokenizer, draws)
        assert "".join(stream.push(token) for token in ids) + stream.finish() == "schöne Stra"
        assert stream.stopped
        assert stream.push(ids[0]) == ""


def test_a_stop_string_that_ends_in_the_last_broken_character_still_stops(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stream = Text(tokenizer).stream(["x\ufffd"])
    for token in random_bytes_tokens("ax🚀", tokenizer, random.Random(0))[:-1]:
        assert stream.push(token) in ("a", "")
    assert not stream.stopped
    assert stream.finish() == "" and stream.stopped


def test_empty_stop_strings_and_slow_tokenizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty string"):
        StopMatcher(["a", ""])

    class Slow:
        backend_tokenizer = None

        def decode(self, token_ids: list[int], /, **kwargs: object) -> str:
            return "".join(map(chr, token_ids))

    with pytest.raises(ConfigError, match="Slow cannot stream"):
        Text(Slow())  # type: ignore[arg-type]
