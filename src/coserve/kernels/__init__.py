"""Multi-adapter computation and attention: one operation a file, each fast path beside its plain twin."""
