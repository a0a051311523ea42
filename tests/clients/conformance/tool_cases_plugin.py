"""A plugin of pytest by which vLLM's and llama.cpp's own cases of tool calls ask the server at $SERVER_URL
in place of one that they would start. It runs in the clients' environment, without coserve.

Their cases name many models of a hub, of which a server has one: those that then ask the same run once. With
$ASKED_FILE the bodies of requests are added to that file, a line each. $SERVER_MODEL is the model that is
asked, at a temperature of 0 unless a case says otherwise.
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
import pytest_asyncio

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
# Parameters of llama.cpp's cases that choose a model or its chat template.
_OF_MODELS = frozenset({"hf_repo", "template_override", "template_name", "n_predict", "result_override"})
PATIENCE = 600.0  # seconds of one request


def _note(body: bytes | str) -> None:
    if file := os.environ.get("ASKED_FILE"):
        with open(file, "a") as out:
            out.write(json.dumps(json.loads(body)) + "\n")


def pytest_configure() -> None:
    """Puts what both suites take for granted in the place of modules that would start servers."""
    # vLLM's: only the folder of its sources is asked for.
    beside = ModuleType("tests.utils")
    beside.VLLM_PATH = Path()  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = beside
    if not Path("utils.py").exists():
        return
    sys.path.insert(0, "")
    import utils  # llama.cpp's

    address, own = httpx.URL(URL), utils.ServerProcess.make_request

    def start(self: Any, *_: object, **__: object) -> None:
        self.server_host, self.server_port = address.host, address.port

    def with_model(self: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
        if data is not None:
            data = {"model": MODEL, "temperature": 0, **data}  # llama.cpp's server needs no name
            _note(json.dumps(data))
        return own(self, method, path, data, *rest, **{**more, "timeout": PATIENCE})

    utils.ServerProcess.start = start
    utils.ServerProcess.make_request = with_model
    if hasattr(utils.ServerProcess, "make_stream_request"):
        stream = utils.ServerProcess.make_stream_request

        def streamed(self: Any, method: str, path: str, data: Any = None, *rest: Any) -> Iterator[Any]:
            data = {"model": MODEL, "temperature": 0, **(data or {})}
            _note(json.dumps(data))
            return iter(stream(self, method, path, data, *rest))

        utils.ServerProcess.make_stream_request = streamed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps one of the cases that ask the same, and skips those that wait for a model's thoughts."""
    seen, kept = set(), list[pytest.Item]()
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        asks = (item.name.partition("[")[0], *(
            (name, repr(value)) for name, value in sorted(given.items()) if name not in _OF_MODELS
        ))  # fmt: skip
        if asks in seen:
            continue
        seen.add(asks)
        kept.append(item)
        if given.get("expect_reasoning_content") is not None:
            item.add_marker(pytest.mark.skip("it waits for a reasoning model's own thoughts"))
    items[:] = kept


@pytest.fixture
def server_config() -> dict[str, Any]:
    """A model as vLLM's cases know it."""
    return {"model": "the server's", "supports_parallel": True}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of vLLM's cases."""

    async def noted(request: httpx.Request) -> None:
        if request.method == "POST":
            _note(await request.aread())

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [noted]}, trust_env=False, timeout=PATIENCE)
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", http_client=http) as made:
        listed = await made.models.list()
        listed.data.sort(key=lambda one: one.id != MODEL)  # the cases ask the first
        made.models.list = AsyncMock(return_value=listed)  # type: ignore[method-assign]
        yield made
