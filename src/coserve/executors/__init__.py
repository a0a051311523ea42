"""Executors run plans: `local` on this device, `deterministic` bit for bit, `scripted` without a model, for
tests."""
