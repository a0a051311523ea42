"""Rows `inference.*`: output tokens a second of a closed batch of prompts."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from coserve.core.request import SLO
from coserve.engine.engine import Engine
from coserve.workload.requests import Tokens, fixed_prompts, greedy
from coserve_benchmarks.floors import decode_bytes, prefill_flops
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.outside.peer import LLAMA_CPP, VLLM, Outside, OutsidePeer, interpreter_with
from coserve_benchmarks.peers import ContinuousBatching, StaticGenerate, best_batch_settings
from coserve_benchmarks.timing import Timing, alternate, speedup, timed

_PROBE_ANSWER = 4  # tokens: enough to tell settings of the peer apart


def run(bench: Bench) -> None:
    """Measures ours against transformers' static batch, its continuous batching, and peers outside."""
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
    bench.results.ratio("inference.vs_generate", ratio, note)

    best, tried = best_batch_settings(bench.shape, prompts, _PROBE_ANSWER)
    batching = ContinuousBatching(bench.shape, prompts, answer, best)
    times = alternate({"ours": ours, "batching": batching}, bench.settings.slow_rounds, bench.machine.threads)
    batching.close()
    _figure(bench, "inference.continuous_batching", times["batching"])
    ratio = speedup(times["ours"], times["batching"])
    bench.results.peer("inference.continuous_batching", best.describe(), tried)
    answers = f"the fastest on {_PROBE_ANSWER}-token answers"
    note = f"the peer runs with {best.describe()}, {answers} of {_all(tried)}"
    bench.results.ratio("inference.vs_continuous_batching", ratio, note)
    for other in (LLAMA_CPP, VLLM):
        python = interpreter_with(other.needs, bench.pythons)
        if python is None:
            missing = f"{other.name} is left out: no interpreter has it ({other.install}; --peer-python)"
            bench.results.note(f"inference.{other.key}", missing)
        else:
            _against(bench, engine, other, python)


def _against(bench: Bench, engine: Engine, peer: Outside, python: str) -> None:
    """Measures ours against a peer in a process of its own: answers whole, and prompts and the rest apart."""
    prompts, answer = _prompts(bench), bench.settings.answer
    rounds: list[tuple[float, float]] = []

    def ours() -> float:
        rounds.append(answer_apart(engine, prompts, answer))
        return sum(rounds[-1])

    with tempfile.TemporaryDirectory() as folder:
        bench.shape.build().save_pretrained(folder)
        with OutsidePeer(peer, python, folder, prompts, answer) as theirs:
            best, tried = theirs.tune(bench.machine.threads)
            theirs.rounds.clear()
            contestants: dict[str, Callable[[], float]] = {"ours": ours, "peer": theirs}
            times = alternate(contestants, bench.settings.rounds, bench.machine.threads)
    found = [(one.prefill, one.decode) for one in theirs.rounds]
    for name, parts in (("ours", rounds), ("peer", found)):
        for part, seconds in zip(
            ("prefill", "decode"), zip(*parts[-bench.settings.rounds :], strict=True), strict=True
        ):
            taken = Timing(seconds)
            called = f"inference.{peer.key}.{name}_{part}"
            bench.results.figure(called, taken.median, "s", (taken.low, taken.high))
    _figure(bench, f"inference.{peer.key}", times["peer"])
    bench.results.peer(f"inference.{peer.key}", best.describe(), tried)
    ratio = speedup(times["ours"], times["peer"])
    note = f"{peer.name} runs in a process of its own with {best.describe()}, the best that it was tried with"
    bench.results.ratio(f"inference.vs_{peer.key}", ratio, note)


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


def answer_apart(engine: Engine, prompts: Sequence[Tokens], answer: int) -> tuple[float, float]:
    """`answer_all`: seconds until every prompt has its first token, and from then to the last one. What came
    first goes on meanwhile, so fewer than `answer` - 1 steps are left of most answers then."""
    started = time.perf_counter()
    answers = [engine.generate(prompt, sampling=greedy(answer)) for prompt in prompts]
    while not all(a.tokens for a in answers):
        engine.step()
    between = time.perf_counter()
    engine.run()
    assert all(len(a.tokens) == answer for a in answers), "every answer has full length"
    return between - started, time.perf_counter() - between


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
    return machine.floor_train_seconds(prefill_flops(shape, prompts, length)) + sum(
        machine.floor_decode_seconds(decode_bytes(shape, prompts, length + step)) for step in range(1, answer)
    )
