"""The supervisor and what it keeps alive."""
