"""The engine: its step loop and the Python API."""
