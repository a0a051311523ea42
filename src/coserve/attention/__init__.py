"""Attention over cached keys and values: a protocol, and a file for each backend."""
