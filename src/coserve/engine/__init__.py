"""The loop and the Python API."""
