"""`coserve bench memory`: activations kept, ledger, plans, prefix sharing and quantized weights, beside
peers."""
