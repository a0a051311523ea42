"""Batches: the lines of a file as requests, below everything else, and their results as files."""
