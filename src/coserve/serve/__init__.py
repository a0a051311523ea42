"""The server: OpenAI's API for answers and fine-tuning, its processes and its store. Never imports torch."""
