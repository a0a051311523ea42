"""The store: tenants, keys, files, jobs and adapters, in one SQLite file."""
