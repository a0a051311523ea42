"""Records of supervised training: token ids with the label of every row."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from coserve.errors import DataError, TurnsRewritten
from coserve.jobs.datasets import place_of
from coserve.jobs.formats import ChatRecord, CompletionRecord, SupervisedRecord, TextRecord
from coserve.text.chat import encode_chat, encode_turns
from coserve.text.control import text_encoding, text_ids
from coserve.text.tokenizer import Tokenizer, first_tokens, last_tokens
from coserve.train.example import IGNORED, Example, LossOn, Prepared, digest
from coserve.train.lengths import Cutter, LengthLimit
from coserve.train.pieces import borders_of


def tokenize(record: SupervisedRecord, tokenizer: Tokenizer, loss_on: LossOn = "assistant") -> Example:
    """A record's example.

    With `loss_on="assistant"` only the assistant's turns of a chat and the completion of a prompt have
    labels; with "all" every token but the first. A text has labels everywhere in both cases.
    """
    return _shifted(*_encode(record, tokenizer, loss_on))


def prepare(
    records: Iterable[SupervisedRecord],
    tokenizer: Tokenizer,
    loss_on: LossOn = "assistant",
    limit: LengthLimit = LengthLimit(),
    allow_special_tokens: bool = False,
) -> Prepared:
    """Tokenizes all records, and applies the limit; plain texts beyond it are cut into pieces. DataError
    names the place of a record.

    Text that spells a control token stays text, unless `allow_special_tokens`. With a template that renders
    earlier turns of a chat differently, each of its turns that is learned is an example.
    """
    cutter = Cutter(limit)

    def made() -> Iterator[Example]:
        has_begun = False  # a text of several records
        for number, record in enumerate(records, 1):
            try:
                try:
                    tokens, wanted = _encode(record, tokenizer, loss_on, allow_special_tokens)
                except TurnsRewritten:
                    assert isinstance(record, ChatRecord), "only chats have turns"
                    each = encode_turns(record.messages, tokenizer, allow_special_tokens, record.tools)
                    for example in [_shifted(*turn) for turn in each]:
                        yield from cutter.take((example,), place_of(records, number))
                    continue
                goes_on = isinstance(record, TextRecord) and record.goes_on
                if isinstance(record, TextRecord) and (has_begun or goes_on or _is_cut(tokens, limit)):
                    pieces = _pieces(record, tokenizer, limit.most or len(tokens), allow_special_tokens)
                    yield from cutter.take_pieces(pieces, len(tokens), has_begun)
                    has_begun = goes_on
                    continue
                example = _shifted(tokens, wanted)
            except DataError as error:
                raise DataError(f"{place_of(records, number)}: {error}") from error
            yield from cutter.take((example,), place_of(records, number))

    examples = tuple(made())
    return Prepared(examples, cutter.counts, digest=digest(examples))


def prepare_examples(examples: Iterable[Example], limit: LengthLimit = LengthLimit()) -> Prepared:
    """Token examples, to which the limit is applied."""
    cutter = Cutter(limit)
    kept = tuple(
        one
        for number, example in enumerate(examples, 1)
        for one in cutter.take((example,), f"example {number}")
    )
    return Prepared(kept, cutter.counts, digest=digest(kept))


def _is_cut(tokens: list[int], limit: LengthLimit) -> bool:
    """Tells whether a text of these tokens is cut into pieces; there are none of one token."""
    return limit.most is not None and len(tokens) > limit.most > 1


def _pieces(record: TextRecord, tokenizer: Tokenizer, most: int, allow_special_tokens: bool) -> list[Example]:
    """A text in pieces of at most `most` tokens, which together have its tokens. Each has the tokens that
    begin a text; those that end it are in the last one alone, as the text goes on after the others."""
    text, first = record.text, first_tokens(tokenizer)
    last = [] if record.goes_on else last_tokens(tokenizer)
    tokens, places = text_encoding(tokenizer, text, allow_special_tokens)
    room = max(most - len(first), 1)
    if room <= len(last):
        last = []
    pieces = [
        [*first, *tokens[start:end]]
        for start, end in pairwise(borders_of(text, len(tokens), places, room, len(last)))
    ]
    pieces[-1] += last
    return [_shifted(piece, [True] * len(piece)) for piece in pieces]


def _shifted(tokens: list[int], wanted: list[bool]) -> Example:
    """`wanted[i]` tells whether token i is a target; its label belongs to the row before."""
    following = zip(tokens[1:], wanted[1:], strict=True)
    labels = [token if learned else IGNORED for token, learned in following]
    return Example(tuple(tokens), (*labels, IGNORED) if tokens else ())


def _encode(
    record: SupervisedRecord, tokenizer: Tokenizer, loss_on: LossOn, allow_special_tokens: bool = False
) -> tuple[list[int], list[bool]]:
    """(tokens, whether each is a target)."""
    if isinstance(record, ChatRecord):
        try:
            tokens, wanted = encode_chat(record.messages, tokenizer, allow_special_tokens, record.tools)
        except TurnsRewritten:
            if loss_on != "all":
                raise
            silent = tuple(replace(one, weight=0) for one in record.messages)
            tokens, wanted = encode_chat(silent, tokenizer, allow_special_tokens, record.tools)
        return tokens, [True] * len(tokens) if loss_on == "all" else wanted
    encode = partial(text_ids, tokenizer, allow_special_tokens=allow_special_tokens)
    first, last = first_tokens(tokenizer), last_tokens(tokenizer)
    if isinstance(record, CompletionRecord):
        prompt, completion = _split(record, encode)
        asked, answer = [*first, *prompt], [*completion, *last]
        return asked + answer, [loss_on == "all"] * len(asked) + [True] * len(answer)
    tokens = [*first, *encode(record.text), *last]
    return tokens, [True] * len(tokens)


def _split(record: CompletionRecord, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, exactly as in a request with this prompt, and of the completion.

    Both are encoded together if that keeps the prompt's tokens (some tokenizers put a space before a text),
    and separately if a token would straddle the border: inference never samples that token.
    """
    prompt = encode(record.prompt)
    both = encode(record.prompt + record.completion)
    if both[: len(prompt)] == prompt:
        return prompt, both[len(prompt) :]
    return prompt, encode(record.completion)
