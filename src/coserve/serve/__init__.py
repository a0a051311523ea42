"""The server: OpenAI's API for answers and fine-tuning, its processes, and what it keeps. Never torch."""
