"""Named adapters: lookup, import and removal."""
