"""Text to tokens and back, without torch: prompts, chats, answers as they come."""

from coserve.text.text import Text

__all__ = ["Text"]
