"""`coserve bench methods`: adapter methods against oracles, beside each other, and while they learn."""
