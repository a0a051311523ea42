"""`coserve bench policies`: every scheduling strategy, and what one would do without."""
