"""Files that several servers share: adapters, checkpoints and uploads, in a folder or an object store."""
