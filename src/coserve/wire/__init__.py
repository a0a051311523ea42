"""What the server and the engine's process say to each other: messages in msgpack on a local socket."""
