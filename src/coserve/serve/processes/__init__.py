"""The supervisor and its child processes."""
