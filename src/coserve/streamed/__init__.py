"""Bases larger than memory: blocks whose parameters are in files, and in memory only while they run."""
