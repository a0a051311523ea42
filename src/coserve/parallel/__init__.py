"""One model over several ranks: states of tensors, plans of bypasses, shards, and collectives."""
