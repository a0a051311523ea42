"""Bypass networks beside the frozen base: identities, versions, methods, PEFT's file format."""
