"""A base over the stages of a pipeline, each of which has some of its layers."""
