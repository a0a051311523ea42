"""Decides what runs next. Knows numbers of tokens, layers, pages and seconds, and no tensor."""
