"""What of a layer's activations an adapter's gradients need: FlexLLM 5.2, on layers that nobody edited."""
