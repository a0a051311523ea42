"""A model of the hub is had, or refused within seconds."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from coserve.errors import ModelNotFound
from coserve.model import hub
from coserve.model.hub import check_hub


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_hub_that_says_nothing_is_waited_for_briefly(
    silent: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
    began = time.monotonic()
    with pytest.raises(
        ModelNotFound, match="'some/model' is no local folder or reachable hub name: the cache"
    ):
        check_hub("some/model")
    assert time.monotonic() - began < 20.0, "the client of the hub would ask again"
    check_hub(tmp_path)


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelNotFound, match="does not answer"):
        check_hub("some/model")
    with pytest.raises(ModelNotFound, match="no hub name"):
        check_hub("a/b/c")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        check_hub("some/model")
