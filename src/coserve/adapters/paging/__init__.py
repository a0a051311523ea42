"""Adapters stored on disk, loaded on demand: which are in memory, and how they are read."""
