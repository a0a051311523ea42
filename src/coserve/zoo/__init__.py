"""The zoo: models and adapters stored as shared blocks (BlockLLM, chapter 4)."""
