"""The OpenAPI document, and requests made from it by the hundred: no 5xx, nothing undocumented, no hang."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving import SECONDS, listening, world

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread, with an adapter root, for all examples."""
    folder: Path = tmp_path_factory.mktemp("document")
    (folder / "root").mkdir()
    found: list[str] = []
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with world(folder, {}, {"adapter_root": folder / "root"}) as it, listening(it.app) as url:
            found.append(url)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(SECONDS)
    yield found[0]
    stop.set()
    thread.join(SECONDS)


@pytest.fixture(scope="module")
def schema(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.sample(1)  # right or wrong requests
@pytest.mark.parametrize("examples", [2, pytest.param(25, marks=pytest.mark.slow)])  # of each operation
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_requests_made_from_the_document_do_no_harm(schema: Any, mode: GenerationMode, examples: int) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 9
    for operation in operations:
        if mode is GenerationMode.POSITIVE or operation.body:  # there is no wrong way to ask without a body
            _try(operation, mode, examples)


def test_the_document_promises_nothing_that_fastapi_only_thinks_of(schema: Any) -> None:
    for path, methods in schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            keyed = "Idempotency-Key" in [one["name"] for one in operation.get("parameters", [])]
            assert ("422" in operation["responses"]) is keyed, (path, method)
            assert operation["summary"] and operation["tags"]
            if path.startswith("/v1/"):
                errors = {status for status in operation["responses"] if status >= "400"}
                assert {"400", "401", "413", "429", "503"} <= errors, (path, method)
    assert "ValidationError" not in schema.raw_schema["components"]["schemas"]
    chat = schema.raw_schema["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(chat) == {"application/json", "text/event-stream"}


def _try(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), known=booleans())
    def attempt(case: Any, known: bool) -> None:
        if known and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny"  # or hardly any request would come further than to its model
        case.call_and_validate(checks=CHECKS, timeout=SECONDS)

    attempt()
