"""Tokenizing of prompts and chats, and streaming detokenizing of answers; without torch."""

from coserve.text.text import Text

__all__ = ["Text"]
