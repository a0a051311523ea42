"""Prometheus metrics of a server: vLLM's names and units, with the prefix `coserve_`.

Metrics of jobs begin with `finetune_`, those of latency bounds with `slo_`.
"""

from operator import attrgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL = ("model_name",)
# What the engine counts: the metric, its place in the engine's statistics, and what it is.
COUNTERS: Final = (
    ("slo_met", "slo_met", "Answers within all bounds."),
    ("slo_missed", "slo_missed", "Answers beyond a bound."),
    ("answer_seconds", "answer_seconds", "Of answers that ended, from arrival to the last token."),
    ("answer_deferred_seconds", "answer_deferred_seconds", "Of these seconds, those that training took."),
    ("prefix_cache_queries", "asked_tokens", "Prompt tokens looked for in the cache."),
    ("prefix_cache_hits", "found_tokens", "Prompt tokens found in the cache."),
    ("adapter_hits", "paging.hits", "Requests whose adapter was in memory when they came."),
    ("adapter_misses", "paging.misses", "Requests that waited for theirs."),
    ("adapter_loads", "paging.loaded", "Adapters brought into memory."),
    ("adapter_loaded_bytes", "paging.loaded_bytes", "Bytes of these."),
    ("adapter_evictions", "paging.dropped", "Adapters dropped for others."),
    ("engine_steps", "steps", "Steps of the engine."),
    ("engine_fused_steps", "fused_steps", "Steps that answered and trained."),
    ("num_preemptions", "preemptions", "Sequences that lost their pages for want of some."),
    ("swapped_out_pages", "swapped_out_pages", "Pages of those and of prefixes written to the second tier."),
    ("swapped_in_pages", "swapped_in_pages", "Pages read from there instead of computed again."),
    ("prefix_pages_swapped_out", "prefix_pages_swapped_out", "Cached pages written there when evicted."),
    ("prefix_pages_swapped_in", "prefix_pages_swapped_in", "Pages of prompts found there."),
    ("swap_failures", "swap_failures", "Copies of pages that could not be written or read."),
    ("offloaded_read_bytes", "offloaded_read_bytes", "Keys and values of such prompts that steps have read."),
    ("offload_failures", "offload_failures", "Such prompts whose keys and values were lost."),
    ("recomputed_tokens", "recomputed_tokens", "Tokens that passed the model again after a preemption."),
    ("spec_decode_num_drafts", "drafts", "Times that an answer drafted tokens."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Tokens drafted."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Of these, those that became the answer's."),
)
GAUGES: Final = (
    ("slowdown_ratio", "slowdown", "Time of the newest 256 answers, over what it would be without training."),
    ("cost_model_error_ratio", "cost_error", "Mean relative error of predicted step times."),
    (
        "cost_model_margin_ratio",
        "cost_margin",
        "Added to predicted times of steps that train, relative to them.",
    ),
    ("memory_budget_bytes", "memory_budget", "Bytes that the engine may use."),
    (
        "memory_peak_bytes",
        "memory_peak",
        "Most bytes in use so far, measured, above those before the model came.",
    ),
    (
        "memory_imports_bytes",
        "memory_imports",
        "What the engine's process held before the model came, beside the budget.",
    ),
    ("adapters_known", "paging.known", "Adapters that can be brought in from disk."),
    ("adapters_in_memory", "adapters", "Adapter versions in memory."),
)
# Parts that are in use: the metric, the places of the part and of the whole, and what it is; 1 is all.
SHARES: Final = (
    ("kv_cache_usage_perc", "used_pages", "pages", "Part of the cache in use; 1 is all."),
    ("swap_usage_perc", "swap_pages_used", "swap_pages", "Part of the second tier in use; 1 is all."),
    (
        *("offload_usage_perc", "offloaded_pages_used", "offloaded_pages"),
        "Part of the second tier with prompts longer than the cache; 1 is all.",
    ),
)


class MirroredCounter:
    """Mirrors another process's counter, which restarts at zero with that process."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._seen = counter, 0.0
        self.total = 0.0  # what the counter stands at

    def reach(self, count: float) -> None:
        """Sets the mirrored counter's current value; a lower one than before means a restart."""
        more = count - self._seen if count >= self._seen else count
        self._counter.inc(more)
        self.total += more
        self._seen = count


class Metrics:
    """One server's metrics, in a registry of their own; attributes have the metrics' names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_inference()
        self._make_training()
        self._make_server()
        self._make_engine()

    def render(self) -> bytes:
        """All metrics in Prometheus's format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def _make_inference(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Sequences inside the engine.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences waiting to get there.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.", _MODEL)
        self.generation_tokens = self._counter("generation_tokens", "Answer tokens written.", _MODEL)
        self.request_success = self._counter(
            "request_success", "Answers that ended, by how.", (*_MODEL, "finished_reason")
        )
        self.answers_by_chain = self._counter(
            "answers_by_chain",
            "Answers of models that have approximate chains, by the chain that answered.",
            (*_MODEL, "chain"),
        )
        self.time_to_first_token = self._times("time_to_first_token_seconds", "To the first token.", _FIRST)
        self.inter_token_latency = self._times("inter_token_latency_seconds", "Token to token.", _BETWEEN)
        self.time_per_output_token = self._times(
            "request_time_per_output_token_seconds", "Mean of an answer, without its first token.", _BETWEEN
        )
        self.e2e_request_latency = self._times("e2e_request_latency_seconds", "To the answer's end.", _WHOLE)
        self.request_queue_time = self._times(
            "request_queue_time_seconds", "Waiting for a place in the engine.", _WHOLE
        )
        self.request_prompt_tokens = self._times("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generation_tokens = self._times(
            "request_generation_tokens", "Tokens of an answer.", _TOKENS
        )

    def _make_training(self) -> None:
        self.finetune_jobs = self._gauge("finetune_jobs", "Jobs that are not over, by status.", ("status",))
        self.finetune_jobs_starved = self._gauge(
            "finetune_jobs_starved", "Running jobs that requests have left no time to train for 10 s or more."
        )
        self.finetune_tokens = self._counter("finetune_tokens", "Tokens that passed forward and back.")
        self.finetune_steps = self._counter("finetune_steps", "Optimizer steps.")
        self.finetune_loss = self._gauge("finetune_loss", "Of a job's newest step.", ("job",))
        self.finetune_step_seconds = Histogram(
            "coserve_finetune_step_seconds", "One optimizer step.", buckets=_WHOLE, registry=self.registry
        )

    def _make_server(self) -> None:
        self.engine_up = self._gauge("engine_up", "1 while the engine is connected and gives signs of life.")
        self.weights_unreadable = self._gauge(
            "weights_unreadable",
            "1 while all work waits for weights of a streamed base that cannot be read, or a base executor.",
        )
        self.supervisor_up = self._gauge("supervisor_up", "1 while the supervisor gives signs of life.")
        self.engine_connections = self._gauge(
            "engine_connections", "Connections to an engine; each after the first follows a death."
        )
        self.engine_load_seconds = self._gauge(
            "engine_load_seconds", "What the engine took to load its model and to measure it."
        )
        self.process_resident = self._gauge(
            "process_resident_bytes", "Bytes of the server's processes in memory.", ("process",)
        )

    def _make_engine(self) -> None:
        self._counters = [(MirroredCounter(self._counter(name, text)), path) for name, path, text in COUNTERS]
        self._gauges = [(self._gauge(name, text), path) for name, path, text in GAUGES]
        self._shares = [(self._gauge(name, text), used, whole) for name, used, whole, text in SHARES]
        self._memory = self._gauge(
            "memory_bytes", "Bytes that are promised or held, by what they are for.", ("account",)
        )
        self._attainment = self._gauge(
            "slo_attainment",
            "Answers within all bounds, of those that ended: slo_met of slo_met and slo_missed.",
        )

    def show(self, stats: Any) -> None:
        """Shows the engine's statistics, a `wire.messages.EngineStats`."""
        for counter, path in self._counters:
            counter.reach(attrgetter(path)(stats))
        for gauge, path in self._gauges:
            gauge.set(attrgetter(path)(stats))
        for gauge, used, whole in self._shares:
            gauge.set(getattr(stats, used) / max(getattr(stats, whole), 1))
        for account, nbytes in stats.memory.items():
            self._memory.labels(account).set(nbytes)
        met, missed = (counter.total for counter, path in self._counters if path in ("slo_met", "slo_missed"))
        self._attainment.set(met / (met + missed) if met + missed else 1.0)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"coserve_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"coserve_{name}", text, labels, registry=self.registry)

    def _times(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"coserve_{name}", text, _MODEL, buckets=buckets, registry=self.registry)
