"""The dialect of the `tinker` client: its HTTP interface over the same engine, store, keys and quotas."""
