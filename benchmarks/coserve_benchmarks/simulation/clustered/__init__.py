"""A simulated cluster of blocks: the policies of `coserve.cluster` on a virtual clock (BlockLLM, 5)."""
