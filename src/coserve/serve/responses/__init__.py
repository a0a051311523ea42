"""OpenAI's Responses and Conversations."""
