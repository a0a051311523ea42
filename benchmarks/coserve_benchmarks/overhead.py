"""Row `overhead.ratio`: throughput through HTTP and the server over that of the engine called directly."""

from coserve.errors import ServerError
from coserve.serve.settings import DEFAULT_SLO
from coserve.workload.requests import fixed_prompts
from coserve_benchmarks.client import Clients
from coserve_benchmarks.inference import answer_all, floor_seconds
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.served import Served
from coserve_benchmarks.streams import StreamRequest
from coserve_benchmarks.timing import alternate, speedup, timed


def run(bench: Bench, served: Served) -> None:
    """Measures the same answers through both, alternating. Both engines stay loaded; one is idle."""
    settings, shape = bench.settings, bench.shape
    prompts = fixed_prompts(settings.streams, settings.streams_prompt, shape.vocabulary, settings.seed)
    asks = [StreamRequest(prompt, settings.streams_answer) for prompt in prompts]
    clients_took: list[float] = []

    def stream_all() -> float:
        with Clients(served.url, served.name, asks) as clients:
            heard = clients.result()
        if any(one.written != settings.streams_answer or one.attempts > 1 for one in heard):
            raise ServerError("a stream was broken or cut short")
        clients_took.append(clients.processor_seconds)
        return max(one.ended for one in heard) - heard[0].asked

    engine = make_engine(bench)
    slo = DEFAULT_SLO["default"]  # what the server gives its requests too
    direct = timed(lambda: answer_all(engine, prompts, settings.streams_answer, slo))
    times = alternate({"http": stream_all, "direct": direct}, settings.streams_rounds, bench.machine.threads)
    tokens = settings.streams * settings.streams_answer
    length = settings.streams_prompt

    def floor() -> float:
        return tokens / floor_seconds(bench, settings.streams, length, settings.streams_answer)

    for name, taken in times.items():
        spread = (tokens / taken.high, tokens / taken.low)
        bench.results.figure(f"overhead.{name}", tokens / taken.median, "output tokens/s", spread, floor)
    ratio = speedup(times["http"], times["direct"])
    took = max(clients_took)
    note = (
        f"{settings.streams} streams of {length} tokens in and {settings.streams_answer} out; the clients "
        f"are one process on the same {bench.machine.threads} cores, which took at most {took:.2f} s of them "
        f"a round of {times['http'].median:.2f} s"
    )
    bench.results.ratio("overhead.ratio", ratio, note)
