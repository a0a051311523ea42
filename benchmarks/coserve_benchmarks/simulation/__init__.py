"""`coserve simulate --check`: the simulator beside this machine, at scale, and in the papers' settings."""
