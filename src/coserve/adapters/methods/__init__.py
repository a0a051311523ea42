"""One file per adapter method."""
