"""Graders of reinforcement jobs: an answer's text to its reward."""
