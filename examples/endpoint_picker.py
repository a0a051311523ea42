"""An endpoint picker that knows of adapters, as the Gateway API's inference extension has one.

It reads what every server of vLLM's kind says of itself at `/metrics`, and sends a request to a server that
has its adapter in memory, while that one's queue is short: where it has more than `SPREAD` waiting requests
beyond the shortest queue, a further server loads the adapter, too.

    python examples/endpoint_picker.py poet http://10.0.0.1:8000 http://10.0.0.2:8000
"""

import hashlib
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPREAD = 2  # waiting requests that a server with the adapter may have beyond the shortest queue
SAMPLE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Endpoint:
    """A server as its metrics describe it."""

    load: float = 0.0  # sequences inside and waiting
    waiting: float = 0.0
    adapters: frozenset[str] = frozenset()  # in memory, or asked for by a request under way
    picked: list[str] = field(
        default_factory=list
    )  # adapters of requests sent there since the metrics were read


def described(metrics: str) -> Endpoint:
    """An endpoint of the text at `/metrics`."""
    found, adapters = Endpoint(), set[str]()
    for name, labels, value in SAMPLE.findall(metrics):
        told = dict(LABEL.findall(labels))
        if name == "num_requests_waiting":
            found.waiting = float(value)
            found.load += float(value)
        elif name == "num_requests_running":
            found.load += float(value)
        elif name == "lora_adapter_loaded":
            adapters.add(told["adapter_name"])
        elif name == "lora_requests_info":
            for state in ("running_lora_adapters", "waiting_lora_adapters"):
                adapters.update(filter(None, told[state].split(",")))
    found.adapters = frozenset(adapters)
    return found


def pick(adapter: str, endpoints: Mapping[str, Endpoint]) -> str:
    """The endpoint of the next request, which is noted there."""

    def queue(name: str) -> float:
        return endpoints[name].waiting + len(endpoints[name].picked)

    shortest = min(map(queue, endpoints))
    has = [
        name
        for name, one in endpoints.items()
        if adapter in one.adapters or adapter in one.picked
        if queue(name) <= shortest + SPREAD
    ]

    # Of servers without it, a hash decides, so that adapters spread though all queues are empty.
    def order(name: str) -> tuple[float, bytes]:
        return queue(name), hashlib.sha256(f"{adapter} {name}".encode()).digest()

    chosen = min(has or endpoints, key=order)
    endpoints[chosen].picked.append(adapter)
    return chosen


def main(adapter: str, urls: Sequence[str]) -> None:
    """Prints the URL for a request."""
    endpoints = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=2) as reply:
            endpoints[url] = described(reply.read().decode())
    print(pick(adapter, endpoints))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
