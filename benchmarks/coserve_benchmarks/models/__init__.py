"""Every type of language models that transformers knows, each tried small."""
