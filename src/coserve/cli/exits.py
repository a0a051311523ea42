"""Exit statuses of the command line. Deliberate errors are 1, wrong usage is 2."""

INTERRUPTED = 130  # what a shell reports after Ctrl-C
