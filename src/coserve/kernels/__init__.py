"""Multi-adapter computation and attention: one operation a file, each tested against `reference.py`."""
