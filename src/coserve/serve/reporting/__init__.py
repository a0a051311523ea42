"""Experiment trackers that are told of training: a file for each, behind an extra of its name."""
