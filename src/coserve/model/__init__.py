"""The base, unmodified, and its seams."""
