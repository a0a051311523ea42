"""Endpoints of the dialect, by the client's resources."""

from coserve.serve.tinker.routes import account, checkpoints, futures, service, training

ROUTERS = (
    service.router,
    futures.router,
    training.router,
    account.router,
    checkpoints.router,
    checkpoints.open_router,
)
LARGE = ("/api/v1/asample", "/api/v1/forward_backward")  # paths whose bodies may be large
