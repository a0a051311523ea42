"""Answering: checks, prices and queues requests for text, and formats their answers."""
