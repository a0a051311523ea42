"""What a client may do so that executors see less of its rows (Symbiosis, 3.8)."""
