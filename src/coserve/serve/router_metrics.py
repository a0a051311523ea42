"""Metrics by the names and labels of vLLM, which routers read: the endpoint pickers of llm-d and of the
Gateway API's inference extension, the production stack's router, autoscalers."""

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram

from coserve.serve.adapter_registry.catalog import Catalog
from coserve.serve.answering.fair import FairQueue
from coserve.serve.engine.link import EngineLink

_LOADS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MODEL: Final = ("model_name",)
MOST_LISTED: Final = 1024  # adapters that one metric names: a tenant may have a thousand


class RouterMetrics:
    """Gauges with the prefix `vllm:`; attributes have the metrics' names. Those of a base have the first
    base's name as `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = _MODEL) -> Gauge:
            return Gauge(f"vllm:{name}", text, labels, registry=registry)

        self.num_requests_running = gauge("num_requests_running", "Sequences inside the engine.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences waiting to get there.")
        self.kv_cache_usage_perc = gauge("kv_cache_usage_perc", "Part of the cache in use; 1 is all.")
        self.cache_config_info = gauge(
            "cache_config_info", "1, with the cache's sizes.", (*_MODEL, "block_size", "num_gpu_blocks")
        )
        self.lora_requests_info = gauge(
            "lora_requests_info",
            "Unix time, with the adapters of requests: max_lora is how many one step may have.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        self.lora_adapter_loaded = gauge(
            "lora_adapter_loaded",
            "1 for each adapter in memory that requests have named lately.",
            ("adapter_name", "level", "pinned", "rank"),
        )
        self.num_gpu_loaded_lora_adapters = gauge(
            "num_gpu_loaded_lora_adapters", "Adapters in the device's memory."
        )
        self.lora_adapter_load_seconds = Histogram(
            "vllm:lora_adapter_load_seconds",
            "To make an adapter ready that the engine did not have, with its way from the artifact store.",
            buckets=_LOADS,
            registry=registry,
        )

    def show(self, catalog: Catalog, link: EngineLink, queue: FairQueue, page_size: int) -> None:
        """Sets all gauges to the present state."""
        model, hello, stats = catalog.base.name, link.hello, link.stats
        self.num_requests_running.labels(model).set(queue.inside)
        self.num_requests_waiting.labels(model).set(queue.waiting)
        running = {live.request.adapter for live in link.live.values()}
        used = catalog.used
        self.lora_requests_info.clear()
        most = 0 if hello is None else hello.max_running
        self.lora_requests_info.labels(
            str(most),
            _listed(used[key] for key in used if key in running),
            _listed(used[key] for key in used if key not in running),
        ).set(time.time())
        self.lora_adapter_loaded.clear()
        if stats is None:  # a router that finds nothing here sends requests elsewhere
            self.num_gpu_loaded_lora_adapters.labels(model).set(0)
            return
        self.kv_cache_usage_perc.labels(model).set(stats.used_pages / max(stats.pages, 1))
        self.cache_config_info.clear()
        self.cache_config_info.labels(model, str(page_size), str(stats.pages)).set(1)
        pinned = frozenset(stats.paging.pinned)
        self.num_gpu_loaded_lora_adapters.labels(model).set(len(stats.paging.resident))
        for key in stats.paging.resident[-MOST_LISTED:]:
            if (name := catalog.name_of(key)) is not None:
                self.lora_adapter_loaded.labels(name, "gpu", str(key in pinned).lower(), "0").set(1)


def _listed(names: Iterable[str]) -> str:
    """Names with commas between, as the label's readers split it; one with a comma itself is left out."""
    return ",".join(sorted(name for name in islice(names, MOST_LISTED) if "," not in name))
