"""Figures `cache8.*`: keys and values in eight bits: their bytes, their error, and how fast they are read."""

from statistics import fmean
from typing import Final

from coserve import tiny
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.workload.requests import Tokens, fixed_prompts
from coserve_benchmarks.inference import answer_all
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.timing import alternate, timed

_KINDS: Final = ("auto", "int8")
_LENGTH: Final = 200  # tokens of a text
_BEGINNINGS: Final = ("Once upon a time", "The fox", "In the morning", "She said that")


def measure_eight_bits(bench: Bench) -> None:
    """Bytes and speed on the bench's shape; the error on the embedded model, whose keys mean something."""
    settings = bench.settings
    engines = {kind: make_engine(bench, cache_dtype=kind, calibrate=False) for kind in _KINDS}
    sizes = {kind: engine.executor.spec.cache_nbytes for kind, engine in engines.items()}
    for kind, size in sizes.items():
        bench.results.figure(f"cache8.{kind}_bytes", size, "bytes of the cache")
    bench.results.figure("cache8.bytes", sizes["int8"] / sizes["auto"], "of the model's own type's bytes")
    prompts = fixed_prompts(settings.prompts, settings.prompt, bench.shape.vocabulary, settings.seed)
    work = {
        kind: timed(lambda engine=engine: answer_all(engine, prompts, settings.answer))  # type: ignore[misc]
        for kind, engine in engines.items()
    }
    times = alternate(work, settings.slow_rounds, bench.machine.threads)
    for kind, timing in times.items():
        tokens = settings.prompts * settings.answer
        spread = (tokens / timing.high, tokens / timing.low)
        bench.results.figure(f"cache8.{kind}_rate", tokens / timing.median, "output tokens/s", spread)
    mean, most = logit_errors(settings.cache8_texts)
    unit = "nats, of what the embedded model says of its own texts"
    bench.results.figure("cache8.logit_error", mean, f"{unit}: the mean")
    bench.results.figure("cache8.logit_error_most", most, f"{unit}: the greatest")


def logit_errors(texts: int) -> tuple[float, float]:
    """Difference that eight bits make to log-probabilities of texts that the embedded model wrote, in
    float32: the mean and the greatest difference of a token's."""
    exact, rounded = (
        Engine(
            tiny.path(),
            EngineConfig(dtype="float32", calibrate=False, cache_tokens=4096, cache_dtype=kind),
        )
        for kind in _KINDS
    )
    written = [_write(exact, seed) for seed in range(texts)]
    differences = [
        abs(one - other)
        for text in written
        for one, other in zip(_scores(exact, text), _scores(rounded, text), strict=True)
    ]
    return fmean(differences), max(differences)


def _write(engine: Engine, seed: int) -> Tokens:
    assert engine.text is not None, "a model from a folder or the hub has a tokenizer"
    prompt = engine.text.encode(_BEGINNINGS[seed % len(_BEGINNINGS)])
    sampling = SamplingParams(max_tokens=_LENGTH, temperature=0.8, seed=seed, ignore_eos=True)
    return (*prompt, *engine.generate(prompt, sampling=sampling).result().tokens)


def _scores(engine: Engine, text: Tokens) -> list[float]:
    scored = engine.generate(text, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)).result()
    return [row.chosen for row in scored.prompt_logprobs]
