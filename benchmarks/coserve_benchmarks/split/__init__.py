"""Clients of one base executor, beside processes with bases of their own (Symbiosis, chapter 4)."""
