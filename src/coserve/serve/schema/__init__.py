"""Schemas of requests and answers, as OpenAI's API has them; the documentation is made from it."""
