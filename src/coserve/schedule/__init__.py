"""Scheduling: numbers of tokens, layers, pages and seconds, and no tensors."""
