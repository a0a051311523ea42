"""Endpoints of the dialect, by the client's resources."""

from coserve.serve.tinker.routes import account, checkpoints, futures, service

ROUTERS = (service.router, futures.router, account.router, checkpoints.router, checkpoints.open_router)
