"""Endpoints of the dialect, by the client's resources."""

from coserve.serve.tinker.routes import futures, service

ROOMS = (service, futures)
