"""Adapters that have names: finding them, bringing them in, taking them away."""
