"""`coserve bench cluster`: blocks on local workers, measured, beside the modelled rows of a cluster."""
