"""Images, sounds and films in records, which training would leave out: such records are refused."""

from collections.abc import Mapping
from typing import Any, Final

from coserve.errors import DataError

MEDIA: Final = ("images", "image", "audios", "audio", "videos", "video")
_PLACEHOLDER: Final = "<image>"  # stands for an image in texts of several trainers' files
# Where it does. In "text", to be learned as it is, it is a word like others: nothing is left out there.
_FIELDS: Final = (
    "messages", "conversations", "history", "prompt", "completion", "chosen", "rejected", "question",
    "answer", "instruction", "input", "output", "preferred_output", "non_preferred_output",
)  # fmt: skip


def check_text_only(record: Mapping[str, Any]) -> None:
    """Raises DataError for a record with images, sounds or films, or with a placeholder of an image."""
    found = [f'"{key}"' for key in MEDIA if record.get(key)]
    if any(_has_placeholder(record[key]) for key in _FIELDS if key in record):
        found.append(_PLACEHOLDER)
    if found:
        raise DataError(
            f"expected text alone; found {' and '.join(found)}: training would leave out what that shows, so "
            "take such records out of the file"
        )


def _has_placeholder(value: object) -> bool:
    waiting = [value]
    while waiting:  # not recursive: nesting is checked later
        one = waiting.pop()
        if isinstance(one, str):
            if _PLACEHOLDER in one:
                return True
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
    return False
