"""What clients may send and what they get, as OpenAI's API has it; the documentation is made from it."""
