"""`coserve bench adapters`: many adapters in one step, beside one adapter, none, and other ways to do it."""
