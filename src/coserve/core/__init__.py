"""The nouns of coserve: requests, sequences, plans. Standard library only."""
