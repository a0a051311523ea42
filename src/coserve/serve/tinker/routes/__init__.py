"""Endpoints of the dialect, by the client's resources."""
