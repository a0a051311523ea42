"""Training on the device: examples, windows, activations, backward, optimizer steps."""
