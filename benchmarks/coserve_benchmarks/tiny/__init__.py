"""The embedded model's recipe: its corpus, tokenizer and training, and how well it answers."""
