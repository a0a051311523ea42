"""Experiment trackers that jobs are reported to: a file for each, behind an extra of its name."""
