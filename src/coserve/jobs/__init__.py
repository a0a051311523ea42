"""Fine-tuning data, without torch."""
