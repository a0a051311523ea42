"""Calls of tools in answers: a file for each format that models write them in, told by the chat template."""
