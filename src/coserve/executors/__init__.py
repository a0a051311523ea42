"""Executors run plans: `local` on this device, `deterministic` bit for bit, `remote` in another process,
`scripted` without a model, for tests."""
