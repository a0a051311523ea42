"""Two servers behind Ray Serve: multiplexing loads no adapter twice without need, and spreads a hot one."""

import asyncio
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coserve import tiny
from coserve.serve.processes.claim import find_running
from waiting import wait_until

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
NAMES = [f"poet-{i}" for i in range(4)]
PATIENCE = 400.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of Ray Serve's proxy, and the folder of the servers' states."""
    from peft import LoraConfig, get_peft_model
    from ray import serve
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("ray")
    adapter = folder / "adapter"
    model = AutoModelForCausalLM.from_pretrained(tiny.path())
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(adapter)
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT)]
    scripts = str(Path(sys.executable).parent)
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }
    sys.path.append(str(ROOT))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": environment},
        logging_level="error",
    )
    try:
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        from deploy.ray_serve import Replica

        flags = [part for name in NAMES for part in ("--adapter", f"{name}={adapter}")]
        server = Replica.options(num_replicas=2, max_ongoing_requests=4)
        serve.run(server.bind(str(tiny.path()), str(folder / "state"), *flags, "--no-standby"))
        yield f"http://127.0.0.1:{port}", folder / "state"
        serve.shutdown()
    finally:
        ray.shutdown()


def _free_port() -> int:
    """A port that neither the system nor Ray's own processes hand out while Ray Serve starts."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def servers(state: Path) -> list[str]:
    """URLs of the servers behind Ray."""
    found = [find_running(folder) for folder in state.iterdir()] if state.exists() else []
    return [one.url for one in found if one is not None and one.url]


def loaded(url: str) -> set[str]:
    """Adapters that a server has in memory."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    samples = [one for family in families for one in family.samples]
    return {
        one.labels["adapter_name"] for one in samples if one.name == "vllm:lora_adapter_loaded" and one.value
    }


def ask(client: httpx.Client, name: str) -> None:
    body = {"model": name, "prompt": "x", "max_tokens": 2}
    reply = client.post("/v1/completions", json=body, headers={"serve_multiplexed_model_id": name})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-coserve-version"].startswith("adapter-")


def test_multiplexing_keeps_adapters_where_they_are_and_spreads_a_hot_one(
    address: tuple[str, Path],
) -> None:
    url, state = address
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        for name in NAMES:
            ask(client, name)
            time.sleep(1.0)  # until the proxy has heard which replica has it
        for _ in range(3):
            for name in NAMES:
                ask(client, name)
        time.sleep(2.0)  # engines tell once a second
        there = [loaded(each) for each in servers(state)]
        assert sum(map(len, there)) == len(NAMES) == len(set().union(*there))

        async def crowd() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as many:
                body: dict[str, Any] = {
                    "model": NAMES[0], "prompt": "x", "max_tokens": 400, "ignore_eos": True,
                }  # fmt: skip
                headers = {"serve_multiplexed_model_id": NAMES[0]}
                asked = [many.post("/v1/completions", json=body, headers=headers) for _ in range(16)]
                assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}

        asyncio.run(crowd())
        wait_until(lambda: all(NAMES[0] in loaded(each) for each in servers(state)), PATIENCE)
        assert len(servers(state)) == 2
