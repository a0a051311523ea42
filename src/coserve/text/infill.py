"""Prompts to fill in the middle of a text, by the special tokens that code models have for it."""

from collections.abc import Sequence
from typing import Final

from coserve.errors import DataError
from coserve.text.tokenizer import Tokenizer

# Tokens before the beginning, before the end and before the middle, in the order of the parts in a prompt.
_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)


def infill(
    tokenizer: Tokenizer, first: Sequence[int], begin: Sequence[int], end: Sequence[int]
) -> tuple[int, ...]:
    """The prompt of a text's middle, between its `begin` and its `end`; `first` are tokens that the tokenizer
    puts before every text. Raises DataError for a tokenizer without tokens for it."""
    added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    for marks in _MARKS:
        if all(mark in added for mark in marks):
            before, behind, middle = (added[mark] for mark in marks)
            return (*first, before, *begin, behind, *end, middle)
    raise DataError(
        "this model's tokenizer has no tokens to fill in the middle of a text, which suffix needs"
    )
