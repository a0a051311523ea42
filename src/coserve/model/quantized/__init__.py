"""Frozen weights in eight and four bits, as placements behind the frozen linear."""
