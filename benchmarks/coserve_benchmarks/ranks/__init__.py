"""`coserve bench ranks`: one model over several processes, and plans of bypasses between real ones."""
