"""What a run of `coserve bench policies` looks like: colours, charts, and how they get into a page."""
