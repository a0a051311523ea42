"""The other end of the engine's socket."""
