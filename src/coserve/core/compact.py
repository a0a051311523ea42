"""Compact JSON of measured figures with readable diffs: one row a line, four significant digits."""

import json
from typing import Any, Final

_DIGITS: Final = 4  # significant ones: no figure here is known better
_LONGEST: Final = 2000  # characters of a row, from which on each of its parts has a line
_SECTIONS: Final = 2  # levels whose rows always have a line each: the whole, and its sections


def compact_json(figures: dict[str, Any]) -> str:
    """The figures as JSON: floats to four significant digits, integers exact, without indentation.

    Each entry of the top two levels has a line; deeper levels are split only where a line would exceed 2,000
    characters.
    """
    return _lines(rounded(figures), 0) + "\n"


def rounded(value: Any) -> Any:
    """The value as `compact_json` writes it: floats in it to four significant digits, without a `.0`."""
    if isinstance(value, float):
        short = float(f"{value:.{_DIGITS}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return value


def _lines(value: Any, level: int) -> str:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    parts = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    is_row = not any(isinstance(part, dict | list) for part in parts)
    if is_row or (level >= _SECTIONS and len(whole) <= _LONGEST):
        return whole
    texts = [_lines(part, level + 1) for part in parts]
    if isinstance(value, list):
        return "[\n" + ",\n".join(texts) + "\n]"
    named = (
        f"{json.dumps(str(key), ensure_ascii=False)}:{text}" for key, text in zip(value, texts, strict=True)
    )
    return "{\n" + ",\n".join(named) + "\n}"
