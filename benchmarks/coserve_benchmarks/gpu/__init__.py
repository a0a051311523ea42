"""`make gpu`: whether coserve computes rightly on a device, and how fast, in one run of nine minutes."""
