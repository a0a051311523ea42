"""What the server must not forget: tenants, keys, files, jobs and adapters, in one SQLite file."""
