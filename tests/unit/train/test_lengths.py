"""Examples that are too long: every shape of records with every setting, against the rules spelled out."""

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from coserve import tiny
from coserve.errors import ConfigError, DataError
from coserve.jobs.datasets import read, read_labelled, read_preferences, read_prompts
from coserve.jobs.limits import ReadLimits
from coserve.text.tokenizer import load_tokenizer
from coserve.train.example import IGNORED, Example, Prepared
from coserve.train.grading.graders import RegexGrader
from coserve.train.labelled import prepare_labelled
from coserve.train.lengths import LengthLimit, Names, TooLong, check_lengths_of, limit_of
from coserve.train.pairs import prepare_pairs
from coserve.train.prompts import prepare_prompts
from coserve.train.records import prepare, prepare_examples
from models import letter_tokenizer

SETTINGS: tuple[TooLong, ...] = ("error", "skip", "truncate")
SHAPES = "chat", "completion", "text", "pair", "labelled", "prompt"
Unit = tuple[Example, ...]


@cache
def tokenizers() -> dict[str, Any]:
    return {"letters": letter_tokenizer(), "words": load_tokenizer(tiny.path())}


def sentences(draw: random.Random, most: int) -> str:
    """Text with borders of every kind, also with none for long."""
    parts = [
        "a",
        "word",
        "é🚀",
        "don't",
        "x" * 12,
        ". ",
        "! ",
        "? ",
        '." ',
        "\n",
        "\n\n",
        " ",
        "  ",
        "。次",
        "<|end|>",
    ]
    weights = [8, 8, 2, 2, 1, 2, 1, 1, 1, 1, 1, 12, 1, 1, 1]
    return "z" + "".join(draw.choices(parts, weights, k=draw.randrange(most)))


def records(draw: random.Random, shape: str, count: int) -> list[dict[str, Any]]:
    def words(most: int = 12) -> str:
        return "a" + "".join(draw.choices("abc de", k=draw.randrange(most)))

    def turn(role: str) -> dict[str, Any]:
        weight = {"weight": draw.randrange(2)} if role == "assistant" and draw.random() < 0.3 else {}
        return {"role": role, "content": words(), **weight}

    def chat() -> list[dict[str, Any]]:
        return [turn(role) for _ in range(draw.randrange(1, 4)) for role in ("user", "assistant")]

    made: dict[str, Any] = {
        "chat": lambda: {"messages": chat()},
        "completion": lambda: {"prompt": words(30), "completion": words(30)},
        "text": lambda: {"text": sentences(draw, 60)},
        "pair": lambda: {"prompt": words(20), "chosen": words(20), "rejected": draw.choice(["a", words(20)])},
        "labelled": lambda: {"prompt": words(30), "completion": words(20), "label": draw.random() < 0.5},
        "prompt": lambda: {"prompt": words(40), "answer": "a"},
    }
    return [made[shape]() for _ in range(count)]


def read_as(shape: str, given: list[dict[str, Any]], tokenizer: Any, limit: LengthLimit) -> Prepared:
    match shape:
        case "pair":
            return prepare_pairs(read_preferences(given), tokenizer, limit)
        case "labelled":
            return prepare_labelled(read_labelled(given), tokenizer, limit)
        case "prompt":
            return prepare_prompts(read_prompts(given), tokenizer, RegexGrader("a"), limit)
        case _:
            return prepare(read(given), tokenizer, limit=limit)


def units_of(shape: str, given: list[dict[str, Any]], tokenizer: Any) -> list[Unit]:
    """Each record alone and whole, whether there is something to learn in it or not."""
    if shape == "labelled":  # as pairs, whose labels are the same; KTO pairs them itself
        given = [{**one, "chosen": one["completion"], "rejected": one["completion"] + "?"} for one in given]
    found = []
    for one in given:
        if shape in ("pair", "labelled"):
            seen: list[Any] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coserve.train.pairs.Cutter", lambda limit, seen=seen: _Keeper(seen))
                prepare_pairs(read_preferences([one]), tokenizer)
            found.append(seen[0] if shape == "pair" else seen[0][:1])
        else:
            seen = []
            module = "prompts" if shape == "prompt" else "records"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"coserve.train.{module}.Cutter", lambda limit, seen=seen: _Keeper(seen))
                prepared = read_as(shape, [one], tokenizer, LengthLimit())
            found.append(prepared.examples if shape == "prompt" else seen[0])
    return found


class _Keeper:
    """A cutter that leaves all as it is."""

    counts = None

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def take(self, unit: Unit, place: str) -> Unit:
        self.seen.append(unit)
        return unit

    def take_prompt(self, length: int, place: str) -> bool:
        return length > 0


def cut_by_hand(example: Example, most: int) -> Example:
    pairs = list(zip(example.tokens, example.labels, strict=True))[:most]
    return Example(
        tuple(token for token, _ in pairs),
        tuple(
            label if row + 1 < len(pairs) or len(pairs) == len(example) else IGNORED
            for row, (_, label) in enumerate(pairs)
        ),
    )


def is_learned(unit: Unit) -> bool:
    return all(any(label != IGNORED for label in one.labels) for one in unit) and (
        len(unit) == 1 or unit[0] != unit[1]
    )


def border_kind(text: str, before: tuple[int, int], after: tuple[int, int]) -> int:
    """0 between paragraphs, 1 between sentences, 2 between words, 3 between characters, 4 within one."""
    if after[0] < before[1]:
        return 4
    # White space that the tokens' own places leave out, or that one of them has, is around the border.
    start, end = before[1], after[0]
    while start > 0 and text[start - 1].isspace():
        start -= 1
    while end < len(text) and text[end].isspace():
        end += 1
    if end >= len(text) or (start == end and not (re.search("[。！？]$", text[:start]))):
        return 3
    between = text[start:end]
    if between.count("\n") > 1:
        return 0
    ends = re.search(r"""[.!?…。！？]["'’”»)\]]{0,4}$""", text[:start])
    return 1 if "\n" in between or ends else 2


def pieces_by_hand(text: str, tokenizer: Any, most: int) -> list[list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    first = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    room = max(most - len(first), 1)
    last = last if room > len(last) else []
    found, at = [], 0
    while len(ids) - at + len(last) > room:
        can = range(at + 1, min(at + room, len(ids) - 1) + 1)
        kinds = {i: border_kind(text, places[i - 1], places[i]) for i in can}
        # Within a run of white space the last border counts, from which the next text begins.
        best = min(kinds.values())
        chosen = max(i for i in can if kinds[i] == best)
        found.append([*first, *ids[at:chosen]])
        at = chosen
    return [*found, [*first, *ids[at:], *last]]


@pytest.mark.parametrize("too_long", SETTINGS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "text"])
def test_what_is_left_of_every_shape_of_records(shape: str, too_long: TooLong) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, tokenizer = random.Random(seed), tokenizers()["letters"]
    if shape == "prompt" and too_long == "truncate":
        with pytest.raises(ConfigError, match=r"^A prompt that is cut asks something else: .* is 'error' or"):
            read_as(shape, records(draw, shape, 1), tokenizer, LengthLimit(9, too_long))
        return
    for _ in range(25):
        given = records(draw, shape, draw.randrange(1, 8))
        units = units_of(shape, given, tokenizer)
        lengths = [max(map(len, unit)) for unit in units]
        most = max(2, draw.choice([*lengths, min(lengths) - 1, max(lengths) + 1, draw.randrange(2, 60)]))
        limit = LengthLimit(most, too_long, f"max_length {most}")
        prepared = read_as(shape, given, tokenizer, limit)
        over = [unit for unit, length in zip(units, lengths, strict=True) if length > most]
        fine = shape == "prompt" or None
        wanted: list[Unit] = []
        truncated = skipped = dropped = 0
        for unit, length in zip(units, lengths, strict=True):
            short = tuple(cut_by_hand(one, most) for one in unit)
            if length <= most and (fine or is_learned(unit)):
                wanted.append(unit)
            elif length <= most:
                dropped += 1
            elif too_long == "truncate" and is_learned(short):
                truncated += 1
                wanted.append(short)
            else:
                skipped += 1
        counts = prepared.counts
        assert list(counts.lengths) == lengths and counts.over == len(over)
        assert (counts.truncated, counts.skipped, counts.dropped) == (truncated, skipped, dropped)
        assert counts.longest == max((max(map(len, unit)) for unit in over), default=0)
        if shape == "labelled":
            left = () if len(wanted) < 2 else tuple(one for (one,) in wanted)
            assert prepared.examples[::2] == left and max(map(len, prepared.examples), default=0) <= most
        else:
            assert prepared.examples == tuple(one for unit in wanted for one in unit)
        check(prepared, limit, bool(over) and too_long == "error")


def check(prepared: Prepared, limit: LengthLimit, is_refused: bool) -> None:
    """The one sentence that a limit is refused with, if it is."""
    counts = prepared.counts
    if not is_refused and prepared.examples:
        check_lengths_of(prepared, limit)
        return
    with pytest.raises(DataError) as caught:
        check_lengths_of(prepared, limit)
    said = str(caught.value)
    assert "\n" not in said and (limit.whose in said or not counts.skipped)
    if is_refused:
        assert said.startswith(f"{counts.over} of {len(counts.lengths)} example")
        assert f"the longest, {counts.place}, has {counts.longest} tokens: training.too_long 'skip'" in said
    else:
        assert said.startswith(("none of", "only one of")) and f" of {len(counts.lengths)} example" in said


@pytest.mark.parametrize("name", ["letters", "words"])
@pytest.mark.parametrize("too_long", SETTINGS)
def test_plain_texts_are_cut_at_borders_whatever_the_setting(name: str, too_long: TooLong) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, tokenizer = random.Random(seed), tokenizers()[name]
    for _ in range(40):
        text = sentences(draw, draw.choice([10, 100, 400])).replace("<|end|>", "")
        most = draw.randrange(2, 50)
        whole = prepare(read([{"text": text}]), tokenizer).examples[0]
        prepared = prepare(read([{"text": text}]), tokenizer, limit=LengthLimit(most, too_long, "x"))
        counts = prepared.counts
        assert list(counts.lengths) == [len(whole)] and not (
            counts.over or counts.skipped or counts.truncated
        )
        if len(whole) <= most:
            assert prepared.examples == (whole,) and counts.split == counts.pieces == 0
            continue
        wanted = [piece for piece in pieces_by_hand(text, tokenizer, most) if len(piece) > 1]
        assert [list(one.tokens) for one in prepared.examples] == wanted
        assert (counts.split, counts.pieces) == (1, len(wanted)) and max(map(len, wanted)) <= most
        for one in prepared.examples:
            assert one.labels == (*one.tokens[1:], IGNORED)
        check_lengths_of(prepared, LengthLimit(most, too_long, "x"))


def test_parts_of_a_text_are_pieces_of_one_example() -> None:
    """The tokens that end a text are in the last piece of the last part."""
    tokenizer = tokenizers()["letters"]
    text = "One two three. Four five six seven."
    for limit in (LengthLimit(), LengthLimit(10)):
        given = [{"text": "a b"}, {"text": text}, {"text": "c"}]
        prepared = prepare(read(given, limits=ReadLimits(characters=20)), tokenizer, limit=limit)
        end = tokenizer.eos_token_id
        ends = [example.tokens.index(end) for example in prepared.examples if end in example.tokens]
        assert len(ends) == 3 and prepared.examples[-2].tokens[-1] == end
        assert len(prepared.counts.lengths) == 3 and prepared.counts.split == 1
        assert prepared.counts.pieces == len(prepared.examples) - 2 > 1
        learned = "".join(
            tokenizer.decode(one.tokens, skip_special_tokens=True) for one in prepared.examples[1:-1]
        )
        assert learned == text


def test_pieces_are_whole_paragraphs_else_sentences_else_words() -> None:
    tokenizer = tokenizers()["words"]

    def pieces(text: str, most: int) -> list[str]:
        found = prepare(read([{"text": text}]), tokenizer, limit=LengthLimit(most)).examples
        assert tokenizer.decode([t for one in found for t in one.tokens], skip_special_tokens=True) == text
        return [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in found]

    text = "One two three. Four five six.\n\nSeven eight nine ten."
    long = len(tokenizer(text)["input_ids"])
    assert pieces(text, long + 1) == [text]
    assert pieces(text, long - 2) == ["One two three. Four five six.\n\n", "Seven eight nine ten."]
    first = len(tokenizer("One two three. Four")["input_ids"])
    assert pieces(text, first)[0] == "One two three."
    spelled = "Say <|end|> twice. Say <|end|> once."
    assert pieces(spelled, 20)[0].startswith("Say <|end|> twice") and len(pieces(spelled, 20)) > 1


def test_a_long_text_is_cut_in_linear_time() -> None:
    """Also one without any border, and one of borders alone: neither is looked at again for each piece."""
    tokenizer = tokenizers()["letters"]
    for text in ("x" * 60_000, "x" + " " * 60_000 + "y", "a b " * 20_000, "a\n\n" + "b" * 60_000):
        prepared = prepare(read([{"text": text}]), tokenizer, limit=LengthLimit(64))
        assert prepared.counts.pieces == len(prepared.examples) > 900


@pytest.mark.parametrize(
    ("max_length", "reserved", "names", "said"),
    [
        (None, 0, Names(), r"^1 of 2 examples is longer than the model's 8 positions; the longest, example 2,"
         r" has 9 tokens: training\.too_long 'skip' leaves such examples out, 'truncate' cuts them$"),
        (6, 0, Names("--max-length", "--too-long"), r"^1 of 2 examples is longer than --max-length 6; .*: "
         r"--too-long 'skip' .* 'truncate' cuts them, or let --max-length be higher$"),
        (None, 4, Names(), r"^2 of 2 examples are longer than the 4 of the model's 8 positions that virtual "
         r"tokens and answers leave; the longest, example 2,"),
        (9, 0, Names("max_length", None), r"model's 8 positions; .*: split such examples, or have them cut "
         r"with max_length$"),
    ],
)  # fmt: skip
def test_the_error_says_how_many_how_long_and_what_to_set(
    max_length: int | None, reserved: int, names: Names, said: str
) -> None:
    examples = [Example((1,) * length, (1,) * length) for length in (5, 9)]
    limit = limit_of(max_length, "error", 8, reserved, names)
    with pytest.raises(DataError, match=said):
        check_lengths_of(prepare_examples(examples, limit), limit)


def test_data_of_which_nothing_is_left_is_refused_in_a_sentence() -> None:
    def left(lengths: Sequence[int], too_long: TooLong, labels: int = 1) -> None:
        examples = [Example((1,) * n, (*(IGNORED,) * (n - 1), labels)) for n in lengths]
        limit = LengthLimit(4, too_long, "optimizer.max_length 4")
        check_lengths_of(prepare_examples(examples, limit), limit)

    with pytest.raises(DataError, match=r"^none of 2 examples is left to train on: 2 are longer than optim"):
        left([5, 6], "skip")
    with pytest.raises(DataError, match=r"^none .*: 1 is longer than .* 4, and 1 has nothing to learn$"):
        left([5, 3], "truncate", IGNORED)
    with pytest.raises(ConfigError, match=r"^training\.max_length must be at least 2"):
        LengthLimit(1)
