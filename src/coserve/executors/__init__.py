"""What runs plans: on this device, on a script for tests, in another process."""
