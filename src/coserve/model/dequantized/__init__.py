"""Checkpoints that were saved quantized, read as those that were not: a file for each family of forms."""
