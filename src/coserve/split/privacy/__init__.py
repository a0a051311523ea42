"""Modes in which executors see less of a client's rows (Symbiosis, 3.8)."""
