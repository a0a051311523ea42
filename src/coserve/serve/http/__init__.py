"""HTTP around every request: authentication, limits, uploads, streams."""
