"""Row `router.reloads`: adapters that servers load again behind a router that knows of adapters, over those
behind one that takes servers in turn. A count, which no load of the machine changes."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from itertools import cycle, product
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from coserve import tiny
from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.errors import ServerError
from coserve.workload.prompts import draw_by_popularity
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.served import Served
from coserve_benchmarks.timing import LEAST_AND_MOST

ADAPTERS: Final = 16
RANK: Final = 16
MEMORY: Final = "2MiB"  # of each server: for twelve adapters in bfloat16, as the embedded model is
_REQUESTS: Final = 320
_QUICK_REQUESTS: Final = 48
_EXPONENT: Final = 0.8  # of the adapters' popularity
_ROUNDS: Final = 3
_SETTLE_SECONDS: Final = 1.2  # engines tell of their adapters once a second
_SOME: Final = 8  # requests between two looks at the metrics, as routers look every so often
_LOADS: Final = re.compile(r"^coserve_adapter_loads_total (\S+)$", re.MULTILINE)
_PICKER: Final = Path(__file__).parents[3] / "examples" / "endpoint_picker.py"


def make_adapters(folder: Path) -> dict[str, str]:
    """LoRA adapters for the embedded model, by name, with random weights."""
    config = AutoConfig.from_pretrained(tiny.path())
    generator = torch.Generator().manual_seed(0)
    value = config.num_key_value_heads * config.head_dim
    found = {}
    for number in range(ADAPTERS):
        own = folder / f"adapter-{number}"
        own.mkdir(parents=True)
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, width in (("q_proj", config.num_attention_heads * config.head_dim), ("v_proj", value)):
                start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                for part, shape in (("A", (RANK, config.hidden_size)), ("B", (width, RANK))):
                    drawn = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{start}.lora_{part}.weight"] = drawn
        save_file(tensors, own / WEIGHTS)
        told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
        (own / CONFIG).write_text(json.dumps(told))
        found[own.name] = str(own)
    return found


def run(bench: Bench, servers: Sequence[Served]) -> None:
    """The same requests, some at a time, by the same law of popularity through each router. Each adapter was
    asked for once before, so what is counted are loads of adapters that had been there."""
    count = _QUICK_REQUESTS if bench.results.header["quick"] else _REQUESTS
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    picker, turns = _picker(), cycle(range(len(servers)))
    again = defaultdict[str, list[int]](list)
    rounds = 1 if bench.results.header["quick"] else _ROUNDS
    for number, way in product(range(rounds), ("in_turn", "aware")):
        asked = draw_by_popularity(names, count, _EXPONENT, bench.settings.seed + number)

        def choose(name: str, endpoints: Mapping[str, Any], way: str = way) -> int:
            return int(picker.pick(name, endpoints)) if way == "aware" else next(turns)

        _send(servers, names, picker, choose)
        before = _loads(servers)
        _send(servers, asked, picker, choose)
        again[way].append(_loads(servers) - before)
    for way, loads in again.items():
        spread = min(loads), max(loads)
        bench.results.figure(f"router.{way}.loads", median(loads), f"loads of {count} requests", spread)
    if not all(again["in_turn"]):
        raise ServerError("servers that were taken in turn had all adapters in memory: nothing to compare")
    ratios = [aware / turn for aware, turn in zip(again["aware"], again["in_turn"], strict=True)]
    note = f"{ADAPTERS} adapters, of which each of {len(servers)} servers has room for a part"
    of_rounds = min(ratios), max(ratios)
    bench.results.row("router.reloads", median(ratios), of_rounds, note, LEAST_AND_MOST)


def _send(
    servers: Sequence[Served], names: Sequence[str], picker: ModuleType, choose: Callable[..., int]
) -> None:
    """Sends requests for these adapters, some at once; the metrics are read between."""
    with ThreadPoolExecutor(_SOME) as threads:
        for at in range(0, len(names), _SOME):
            endpoints = {str(place): picker.described(_metrics(one)) for place, one in enumerate(servers)}
            sent = [(servers[choose(name, endpoints)], name) for name in names[at : at + _SOME]]
            list(threads.map(lambda one: _ask(*one), sent))


def _ask(server: Served, adapter: str) -> None:
    body = {"model": adapter, "prompt": [5, 6, 7], "max_tokens": 1}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    if reply.status_code != 200:
        raise ServerError(f"{adapter} was not answered: {reply.text}")


def _loads(servers: Sequence[Served]) -> int:
    """Loads of all servers so far, once their engines have told of the last ones."""
    time.sleep(_SETTLE_SECONDS)
    return sum(int(float(_LOADS.findall(_metrics(server))[0])) for server in servers)


def _picker() -> ModuleType:
    """The example's endpoint picker."""
    spec = spec_from_file_location("endpoint_picker", _PICKER)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _metrics(server: Served) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=30.0, trust_env=False).text
