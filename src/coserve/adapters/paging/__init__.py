"""Adapters that lie on disk until somebody needs them: which are in memory, and how they come there."""
