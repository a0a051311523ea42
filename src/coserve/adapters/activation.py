"""Activated LoRA (aLoRA, Greenewald et al. 2025): adapters that act from their invocation tokens on.

A prompt has these tokens where the adapter's task begins. Rows before the last place where they begin are the
base's, so keys and values of a long context are shared with the base and with other adapters. PEFT finds the
place in the same way (`alora_invocation_tokens`), in training in the whole example.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses
from coserve.errors import AdapterError, RequestError

MOST_TOKENS: Final = 1024  # of an invocation
_SHOWN: Final = 8


def check_invocation(tokens: Sequence[object]) -> None:
    """Raises AdapterError unless these can be the tokens of an invocation; none are an ordinary adapter's."""
    if len(tokens) > MOST_TOKENS or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise AdapterError(
            f"alora_invocation_tokens are at most {MOST_TOKENS} ids of tokens, not {listed_tokens(tokens)}"
        )


def invocation_of(adapter: AdapterVersion) -> tuple[int, ...]:
    """The tokens from which on an adapter acts; none of one that acts on whole sequences. Raises
    AdapterError for one of several parts, of which one waits for its tokens."""
    found = [tokens for part in adapter.parts if (tokens := getattr(part.config, "invocation", ()))]
    if found and len(adapter.parts) > 1:
        raise AdapterError(
            f"{adapter.name} has a part that acts from its invocation tokens on (aLoRA), and others that act "
            "on all: it can be no part of several"
        )
    return tuple(found[0]) if found else ()


def expect_always_active(adapter: AdapterVersion, what: str) -> None:
    """Raises AdapterError for an adapter that does not act on whole sequences; `what` cannot be done."""
    if invocation_of(adapter):
        raise AdapterError(f"{adapter.name} acts from its invocation tokens on (aLoRA), and {what}")


def last_invocation(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The position where the last invocation among the tokens begins; None where there is none."""
    letters = {token: chr(number) for number, token in enumerate(dict.fromkeys(invocation), 1)}
    # As text, read from the end: Python's search for a long text takes time in proportion to what it reads.
    wanted = "".join([letters[token] for token in reversed(invocation)])
    found = "".join([letters.get(token, "\0") for token in reversed(tokens)]).find(wanted)
    return None if found < 0 else len(tokens) - found - len(invocation)


def first_active(prompt: Sequence[int], invocation: Sequence[int], adapter: str) -> int:
    """The position where a prompt's last invocation begins. Raises RequestError for a prompt without: the
    base would answer it alone."""
    found = last_invocation(prompt, invocation)
    if found is None:
        raise RequestError(
            f"adapter {adapter!r} acts from its invocation tokens on ({listed_tokens(invocation)}), and the "
            "prompt has none: end it with them, or ask the base"
        )
    return found


def active_rows(tokens: Sequence[int], lengths: Sequence[int], invocation: Sequence[int]) -> list[range]:
    """The rows of examples of these lengths, end to end, on which an adapter acts."""
    found, start = list[range](), 0
    for length in lengths:
        first = last_invocation(tokens[start : start + length], invocation)
        if first is not None:
            found.append(range(start + first, start + length))
        start += length
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ActiveBypasses(Bypasses):
    """The bypasses of an adapter for some rows, of which it acts on those of `spans` alone: these do not
    overlap, are in the order of the rows, and have the bypasses for their rows beside them."""

    spans: Sequence[tuple[slice, Bypasses]] = ()

    def chosen(self, rows: Sequence[int]) -> "ActiveBypasses":
        """The bypasses for some of the rows alone, whose numbers ascend."""
        cut = ((bisect_left(rows, own.start), bisect_left(rows, own.stop), each) for own, each in self.spans)
        spans = [(slice(first, last), each) for first, last, each in cut if first < last]
        return ActiveBypasses(self.inputs, self.outputs, spans)


def parted(bypasses: Bypasses, rows: int) -> Iterator[tuple[int, Bypasses]]:
    """Consecutive numbers of rows, `rows` in all, each with its bypasses: none where the adapter does not
    act."""
    if not isinstance(bypasses, ActiveBypasses):
        yield rows, bypasses
        return
    end = 0
    for own, each in bypasses.spans:
        if end < own.start:
            yield own.start - end, Bypasses()
        yield own.stop - own.start, each
        end = own.stop
    if end < rows:
        yield rows - end, Bypasses()


def acts(bypasses: Bypasses) -> bool:
    """Tells whether the adapter acts on any of the rows that these are for."""
    return not isinstance(bypasses, ActiveBypasses) or bool(bypasses.spans)


def listed_tokens(tokens: Sequence[object]) -> str:
    """The first of some tokens, for a message."""
    shown = ", ".join(map(str, tokens[:_SHOWN]))
    return f"{shown}, ..." if len(tokens) > _SHOWN else shown
