"""Tokenizing of prompts and chats, and streaming detokenizing of answers; without torch.

`Text` is imported when it is first used: sandboxes that render templates need no tokenizer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coserve.text.text import Text as Text

__all__ = ["Text"]


def __getattr__(name: str) -> Any:
    if name == "Text":
        from coserve.text.text import Text

        return Text
    raise AttributeError(f"module 'coserve.text' has no attribute {name!r}")
