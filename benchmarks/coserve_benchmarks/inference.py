"""Rows `inference.*`: output tokens a second of a closed batch of prompts."""

from collections.abc import Mapping, Sequence

from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.workload.requests import Tokens, fixed_prompts
from coserve_benchmarks.ours import Bench, greedy, make_engine
from coserve_benchmarks.peers import ContinuousBatching, StaticGenerate, best_batch_settings
from coserve_benchmarks.timing import Timing, alternate, speedup, timed

_PROBE_ANSWER = 4  # tokens: enough to tell settings of the peer apart


def run(bench: Bench) -> None:
    """Measures ours against transformers' static batch, then against its continuous batching."""
    engine = make_engine(bench)
    prompts, answer = _prompts(bench), bench.settings.answer
    ours = timed(lambda: answer_all(engine, prompts, answer))

    peer = StaticGenerate(bench.shape, prompts, answer)
    tried = peer.tune(bench.compiled)
    bench.results.peer("inference.generate", peer.settings.describe(), tried)
    note = f"the peer runs with {peer.settings.describe()}, the fastest of {_all(tried)}"
    times = alternate({"ours": ours, "generate": peer}, bench.settings.rounds, bench.machine.threads)
    del peer
    _figure(bench, "inference.ours", times["ours"])
    _figure(bench, "inference.generate", times["generate"])
    ratio = speedup(times["ours"], times["generate"])
    bench.results.row("inference.vs_generate", ratio.value, (ratio.low, ratio.high), note)

    best, tried = best_batch_settings(bench.shape, prompts, _PROBE_ANSWER)
    batching = ContinuousBatching(bench.shape, prompts, answer, best)
    times = alternate({"ours": ours, "batching": batching}, bench.settings.slow_rounds, bench.machine.threads)
    batching.close()
    _figure(bench, "inference.continuous_batching", times["batching"])
    ratio = speedup(times["ours"], times["batching"])
    bench.results.peer("inference.continuous_batching", best.describe(), tried)
    answers = f"the fastest on {_PROBE_ANSWER}-token answers"
    note = f"the peer runs with {best.describe()}, {answers} of {_all(tried)}"
    bench.results.row("inference.vs_continuous_batching", ratio.value, (ratio.low, ratio.high), note)


def _all(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ({taken:.2f} s)" for name, taken in tried.items())


def capacity(bench: Bench) -> float:
    """Our output tokens a second of the first row, measured now if that row has not been."""
    if "inference.ours" not in bench.results.figures:
        engine = make_engine(bench)
        prompts, answer = _prompts(bench), bench.settings.answer
        ours = timed(lambda: answer_all(engine, prompts, answer))
        times = alternate({"ours": ours}, bench.settings.rounds, bench.machine.threads)
        _figure(bench, "inference.ours", times["ours"])
    return bench.results.figures["inference.ours"].value


def answer_all(engine: Engine, prompts: Sequence[Tokens], answer: int, slo: SLO = SLO()) -> None:
    """Answers of exactly `answer` tokens to prompts that come at once."""
    answers = [engine.generate(prompt, sampling=greedy(answer), slo=slo) for prompt in prompts]
    engine.run()
    assert all(len(a.tokens) == answer for a in answers), "every answer has full length"


def _prompts(bench: Bench) -> list[Tokens]:
    settings = bench.settings
    return fixed_prompts(settings.prompts, settings.prompt, bench.shape.vocabulary, settings.seed)


def _figure(bench: Bench, name: str, times: Timing) -> None:
    """Output tokens a second, beside the most that prompts at the matrix rate and decode steps at the
    memory's bandwidth allow."""
    settings = bench.settings
    tokens = settings.prompts * settings.answer
    spread = (tokens / times.high, tokens / times.low)

    def floor() -> float:
        return tokens / floor_seconds(bench, settings.prompts, settings.prompt, settings.answer)

    bench.results.figure(name, tokens / times.median, "output tokens/s", spread, floor)


def floor_seconds(bench: Bench, prompts: int, length: int, answer: int) -> float:
    """Least time for answers: the prompts at the matrix rate, then every decode step's bytes."""
    shape, machine = bench.shape, bench.machine
    return machine.floor_train_seconds(shape.prefill_flops(prompts, length)) + sum(
        machine.floor_decode_seconds(shape.decode_bytes(prompts, length + step)) for step in range(1, answer)
    )
