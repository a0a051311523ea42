"""The base model, unmodified, and the loop that drives its layers."""
