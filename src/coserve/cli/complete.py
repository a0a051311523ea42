"""Shell completion of the server's names: fast, and without errors."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coserve.cli.client import Client

PATIENCE = 1.0  # seconds
MOST = 100


def complete_adapters(incomplete: str) -> list[str]:
    """Adapters of the server that the environment or the configuration file names."""
    return _ask(incomplete, _adapters)


def complete_models(incomplete: str) -> list[str]:
    """Adapters of that server, and its base model."""
    return _ask(incomplete, lambda client: [model["id"] for model in client.get("/v1/models")["data"]])


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of the newest jobs."""
    return _ask(
        incomplete,
        lambda client: [job["id"] for job in client.get("/v1/fine_tuning/jobs", limit=MOST)["data"]],
    )


def _adapters(client: "Client") -> list[str]:
    return [model["id"] for model in client.get("/v1/models")["data"] if model.get("parent")]


def _ask(incomplete: str, names: Callable[["Client"], list[str]]) -> list[str]:
    from coserve.cli.client import Client
    from coserve.cli.config import load_client_settings
    from coserve.errors import CoserveError

    try:
        with Client(load_client_settings({}, None), patience=PATIENCE) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except CoserveError:
        return []
