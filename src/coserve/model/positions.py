"""The longest sequences of a model: up to there each row is computed alike, whatever comes after it.

Some models change their rotary tables, for all rows of a sequence, once it is longer than they were first
trained for (longrope, dynamic). Keys that lie in pages were computed before that, beside other sequences that
are shorter. Up to that length these models are exact, and longer sequences are refused as those beyond the
last position are. So are those that an index of sparse attention would choose from. Masks may be a limit too
(`load._limit_to_masks`).
"""

from collections.abc import Iterator
from typing import Any, Final

from coserve.model.legacy_attention import MOST_POSITIONS

_UNLIMITED: Final = 1 << 30
# Types that count positions from behind that of their padding token (`told_positions.py`).
_BEHIND_PADDING: Final = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)


def positions_of(text: Any) -> int:
    """The most positions of a sequence, given the configuration of a language model."""
    return min(_lengths(text), default=_UNLIMITED)


def _lengths(text: Any) -> Iterator[int]:
    longest = getattr(text, "max_position_embeddings", None)
    if longest := longest or getattr(text, "max_seq_len", None):
        yield int(longest) - (int(text.pad_token_id) + 1 if text.model_type in _BEHIND_PADDING else 0)
    if text.model_type in ("bloom", "mpt"):
        yield MOST_POSITIONS
    if text.model_type == "doge":
        yield int(text.keep_window_size)
    if "indexed_attention" in (getattr(text, "layer_types", None) or ()):
        yield int(getattr(text, "index_topk", 0) or text.indexer_budget)
    rope = getattr(text, "rope_parameters", None) or {}
    for own in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if own.get("rope_type") in ("longrope", "dynamic"):
            original = own.get("original_max_position_embeddings")
            if original := original or getattr(text, "original_max_position_embeddings", None):
                yield int(original)
