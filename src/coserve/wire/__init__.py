"""The protocol between the server and the engine's process: messages in msgpack on a local socket."""
