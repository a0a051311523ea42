"""Anthropic's API of messages: its bodies become calls, answers and errors take its form."""
