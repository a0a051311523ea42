"""Data types of coserve: requests, sequences, plans. Standard library only."""
