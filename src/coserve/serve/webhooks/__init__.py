"""Alerts: events of the server, posted to the operator's addresses."""
