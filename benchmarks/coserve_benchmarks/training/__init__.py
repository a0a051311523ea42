"""Training as other systems' clients drive it: what of them works, and how fast."""
