"""Log-probabilities as JSON in the two formats of OpenAI's API, in parts of some tokens.

A reply may have millions of them, so they are written as they are: objects for each would take 3.7 s for
200,000, this takes 0.1 s.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from typing import Final, ParamSpec

import msgspec

from coserve.serve.http.json_replies import WrittenJson
from coserve.text import Text
from coserve.text.text import TokenBytes
from coserve.wire.scores import ABSENT, Scores, numbers

LOWEST: Final = -9999.0  # what OpenAI says for "very unlikely"; JSON has no infinity
_KNOWN: Final = 1 << 15  # tokens whose spelling is kept: 8 MB
P = ParamSpec("P")
_AT_ONCE: Final = 64  # tokens in one part of the JSON: 1,300 alternatives, 1 ms


class _Spellings:
    """Tokens' texts as JSON: a string, and the beginning of OpenAI's object for a token."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self.name = lru_cache(_KNOWN)(self._name)
        self.object = lru_cache(_KNOWN)(self._object)

    def _name(self, token: int) -> str:
        return json.dumps(self._tokens.text_of(token))

    def _object(self, token: int) -> str:
        bytes_of = json.dumps(list(self._tokens.bytes_of(token)), separators=(",", ":"))
        return f'{{"token":{self.name(token)},"bytes":{bytes_of},"logprob":'


def _as_json(write: Callable[P, Iterator[bytes]]) -> Callable[P, WrittenJson]:
    """Has a method give its pieces as what stands as it is in a reply."""

    @wraps(write)
    def written(*args: P.args, **kwargs: P.kwargs) -> WrittenJson:
        return WrittenJson(write(*args, **kwargs))

    return written


class LogprobWriter:
    """Writes the log-probabilities of one model's tokens. Thread-safe."""

    def __init__(self, text: Text) -> None:
        self._spelled = _Spellings(text.tokens)

    @_as_json
    def prompt(self, tokens: Sequence[int], scores: Scores) -> Iterator[bytes]:
        """vLLM's `prompt_logprobs`: for each token but the first, which has none, an object by token id."""
        yield b"[null"
        for at in range(1, len(tokens), _AT_ONCE):
            some = tokens[at : at + _AT_ONCE]
            rows = zip(some, *_columns(scores.rows(at - 1, at - 1 + len(some))), strict=True)
            yield "".join([f",{self._by_id(*row)}" for row in rows]).encode()
        yield b"]"

    def _by_id(self, token: int, chosen: str, ids: Sequence[int], top: Sequence[str]) -> str:
        ranked = {
            id: (logprob, str(rank)) for rank, (id, logprob) in enumerate(zip(ids, top, strict=True), 1)
        }
        told = {token: (chosen, "null")} | ranked
        entries = [
            f'"{id}":{{"logprob":{logprob},"rank":{rank},"decoded_token":{self._spelled.name(id)}}}'
            for id, (logprob, rank) in told.items()
        ]
        return f"{{{','.join(entries)}}}"

    def listed(self, tokens: Sequence[int], scores: Scores) -> Iterator[bytes]:
        """The objects of a chat's tokens with commas between them, without the brackets of a list."""
        for at in range(0, len(tokens), _AT_ONCE):
            some = tokens[at : at + _AT_ONCE]
            rows = zip(some, *_columns(scores.rows(at, at + len(some))), strict=True)
            made = ",".join([self._chat_token(*row) for row in rows])
            yield (f",{made}" if at else made).encode()

    @_as_json
    def chat(self, tokens: Sequence[int], scores: Scores) -> Iterator[bytes]:
        """`ChatLogprobs`: an object for each token, with the likeliest ones in its place."""
        yield b'{"content":['
        yield from self.listed(tokens, scores)
        yield b'],"refusal":null}'

    def _chat_token(self, token: int, chosen: str, ids: Sequence[int], top: Sequence[str]) -> str:
        write = self._spelled.object
        likeliest = ",".join([f"{write(id)}{logprob}}}" for id, logprob in zip(ids, top, strict=True)])
        return f'{write(token)}{chosen},"top_logprobs":[{likeliest}]}}'

    @_as_json
    def completion(
        self,
        tokens: Sequence[int],
        starts: Sequence[int],
        scores: Scores,
        alternatives: int,
        is_first: bool = False,
    ) -> Iterator[bytes]:
        """`CompletionLogprobs`: parallel lists. Where `is_first`, the first token has no log-probabilities,
        as nothing is before it, and `scores` are those of the others."""
        yield b'{"tokens":['
        for at in range(0, len(tokens), _AT_ONCE):
            names = ",".join(map(self._spelled.name, tokens[at : at + _AT_ONCE]))
            yield (f",{names}" if at else names).encode()
        yield b'],"token_logprobs":['
        first = ["null"] if is_first and tokens else []
        yield ",".join([*first, *_written(scores.chosen)]).encode()
        if alternatives:
            yield b'],"top_logprobs":['
            scored = tokens[len(first) :]
            yield b"null" if first else b""
            for at in range(0, len(scored), _AT_ONCE):
                some = scored[at : at + _AT_ONCE]
                rows = zip(some, *_columns(scores.rows(at, at + len(some))), strict=True)
                made = ",".join([self._likeliest(*row) for row in rows])
                yield (f",{made}" if at or first else made).encode()
            yield b'],"text_offset":['
        else:
            yield b'],"top_logprobs":null,"text_offset":['
        yield ",".join(map(str, starts)).encode()
        yield b"]}"

    def _likeliest(self, token: int, chosen: str, ids: Sequence[int], top: Sequence[str]) -> str:
        """The likeliest tokens, and the chosen one if it is not among them. Of several with one spelling, the
        likeliest counts."""
        names = [self._spelled.name(id) for id in reversed(ids)]
        pairs = {self._spelled.name(token): chosen, **dict(zip(names, reversed(top), strict=True))}
        return f"{{{','.join([f'{name}:{logprob}' for name, logprob in pairs.items()])}}}"


def _columns(scores: Scores) -> tuple[Sequence[str], Sequence[Sequence[int]], Sequence[Sequence[str]]]:
    """(log-probability, ids of the likeliest, theirs) of each row."""
    width = scores.width
    chosen, ids, top = _written(scores.chosen), numbers("i", scores.ids).tolist(), _written(scores.top)
    places = [slice(row * width, (row + 1) * width) for row in range(len(scores))]
    rows = [ids[place] for place in places]
    if ABSENT in ids:
        rows = [row[: row.index(ABSENT)] if ABSENT in row else row for row in rows]
    tops = [top[place][: len(row)] for place, row in zip(places, rows, strict=True)]
    return chosen, rows, tops


def _written(data: bytes) -> list[str]:
    """Packed log-probabilities as JSON, which has no number that is not finite. msgspec writes a list of them
    15 times as fast as `repr` would."""
    values = numbers("f", data).tolist()
    if not values:
        return []
    if not min(values) >= LOWEST:  # or the first is NaN
        values = [LOWEST if value < LOWEST else value for value in values]
    return msgspec.json.encode(values)[1:-1].decode().split(",")
