"""Ray's batch client (`ray.data.llm`) with coserve behind it: a data set of questions through one server."""

import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from whole_server import Server

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytest.importorskip("pandas", reason="Ray's data sets need pandas")
pytestmark = pytest.mark.ray
QUESTIONS = [f"Where does number {number} live?" for number in range(12)]


def asked(row: dict[str, Any]) -> dict[str, Any]:
    chat = [{"role": "user", "content": row["question"]}]
    return {"payload": {"model": "coserve-tiny", "messages": chat, "max_tokens": 6, "temperature": 0}}


def told(row: dict[str, Any]) -> dict[str, Any]:
    reply = row["http_response"]
    return {"question": row["question"], "text": reply["choices"][0]["message"]["content"]}


def test_a_data_set_is_answered(tmp_path: Path) -> None:
    """Each row once, with the answer that the server gives alone."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    server = Server(tmp_path)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
        logging_level="error",
    )  # fmt: skip
    try:
        config = HttpRequestProcessorConfig(
            url=f"{server.url}/v1/chat/completions", batch_size=5, concurrency=1, max_retries=2
        )
        process = build_processor(config, preprocess=asked, postprocess=told)
        rows = process(ray.data.from_items([{"question": one} for one in QUESTIONS])).take_all()
        alone = {
            one: httpx.post(
                f"{server.url}/v1/chat/completions", json=asked({"question": one})["payload"], timeout=120
            ).json()["choices"][0]["message"]["content"]
            for one in QUESTIONS
        }
    finally:
        ray.shutdown()
        server.end()
    assert {row["question"]: row["text"] for row in rows} == alone and len(rows) == len(QUESTIONS)
    assert len(set(alone.values())) > 1
