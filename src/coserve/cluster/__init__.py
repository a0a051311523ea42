"""Blocks of the zoo on several workers (BlockLLM, 5): where rows, pages and instances of blocks go."""
