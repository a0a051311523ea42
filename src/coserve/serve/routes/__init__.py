"""Endpoints, one file for each group."""
