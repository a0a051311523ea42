"""Inference peers in processes of their own, each in an interpreter that has the peer and need not have
coserve."""
