"""The server's end of the engine's socket."""
