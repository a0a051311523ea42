"""Endpoints: one file for each group, nothing in them but what HTTP asks for."""
