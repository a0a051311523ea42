"""What a fine-tuning job is and the data it eats. No torch here."""
