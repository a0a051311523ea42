"""Answering: a request for text is checked, priced, queued, followed and shaped into its answer."""
