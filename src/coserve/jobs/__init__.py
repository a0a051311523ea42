"""Fine-tuning data. No torch here."""
