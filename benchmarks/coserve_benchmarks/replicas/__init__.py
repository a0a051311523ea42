"""`coserve bench replicas`: several servers behind a router, in counts and on modelled seconds."""
