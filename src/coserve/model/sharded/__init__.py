"""Bases that are cut over ranks: the third placement of frozen linears, and how their files are read."""
