"""Evals: graders over a data set, with or without a model that answers, and their results."""
