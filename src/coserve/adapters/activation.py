"""Activated LoRA (aLoRA, Greenewald et al. 2025): adapters that act from their invocation tokens on.

A prompt has these tokens where the adapter's task begins. Rows before the last place where they begin are the
base's, so keys and values of a long context are shared with the base and with other adapters. PEFT finds the
place in the same way (`alora_invocation_tokens`).
"""

from collections.abc import Sequence
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.errors import AdapterError, RequestError

MOST_TOKENS: Final = 1024  # of an invocation
_SHOWN: Final = 8


def check_invocation(tokens: Sequence[object]) -> None:
    """Raises AdapterError unless these can be the tokens of an invocation; none are an ordinary adapter's."""
    if len(tokens) > MOST_TOKENS or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise AdapterError(
            f"alora_invocation_tokens are at most {MOST_TOKENS} ids of tokens, not {_listed(tokens)}"
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
        raise AdapterError(
            f"{adapter.name} acts from its invocation tokens on (aLoRA), and {what}; PEFT trains such ones"
        )


def first_active(prompt: Sequence[int], invocation: Sequence[int], adapter: str) -> int:
    """The position where a prompt's last invocation begins. Raises RequestError for a prompt without: the
    base would answer it alone."""
    size, wanted = len(invocation), list(invocation)
    for start in range(len(prompt) - size, -1, -1):
        if prompt[start] == wanted[0] and list(prompt[start : start + size]) == wanted:
            return start
    raise RequestError(
        f"adapter {adapter!r} acts from its invocation tokens on ({_listed(invocation)}), and the prompt has "
        "none: end it with them, or ask the base"
    )


def _listed(tokens: Sequence[object]) -> str:
    shown = ", ".join(map(str, tokens[:_SHOWN]))
    return f"{shown}, ..." if len(tokens) > _SHOWN else shown
