"""The hub, which models come from that are named and are no folder."""

import threading
from pathlib import Path
from typing import Final

from coserve.errors import ModelNotFound

_SECONDS: Final = 3.0  # for an answer; the hub's client asks again for minutes where packets are dropped


def check_hub(model: str | Path, file: str = "config.json", revision: str | None = None) -> None:
    """Raises ModelNotFound for a model, or what else has a `file` of this name, that is no folder, not in the
    hub's cache, and cannot be fetched, as the hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(model).exists():
        return
    try:
        if isinstance(try_to_load_from_cache(str(model), file, revision=revision), str):
            return
    except ValueError as error:
        raise ModelNotFound(f"{str(model)!r} is no local folder and no hub name") from error
    told = f"{str(model)!r} is no local folder or reachable hub name: "
    if constants.is_offline_mode():
        raise ModelNotFound(f"{told}the hub's cache does not hold it, and HF_HUB_OFFLINE is set")
    if not _answers(constants.ENDPOINT):
        raise ModelNotFound(f"{told}the cache does not hold it, and {constants.ENDPOINT} does not answer")


def _answers(url: str) -> bool:
    """Tells whether a server answers in time. A thread asks: nothing bounds how long a name is looked up."""
    import httpx  # here: few models come from the hub

    found = threading.Event()

    def ask() -> None:
        try:
            httpx.head(url, timeout=_SECONDS)
        except (httpx.HTTPError, OSError):
            return
        found.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return found.is_set()
