"""Graph pruning (FlexLLM 5.2): which activations of an unmodified layer an adapter's gradients need."""
