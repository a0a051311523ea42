"""Split execution: the base's frozen linears in one process, for clients in others (Symbiosis, 3)."""
