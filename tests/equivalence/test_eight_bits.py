"""Keys and values in eight bits: by how much answers change, and that nothing else changes them."""

import random
from pathlib import Path
from statistics import fmean

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.engine.completion import Completion
from coserve.errors import ConfigError
from coserve_benchmarks.memory.eight_bits import logit_errors
from models import logits_of, prompts, tiny
from virtual import with_virtual

# Windows, soft-capping, sinks, keys of another width than values.
NAMES = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)


def engine_of(name: str, dtype: torch.dtype = torch.float32, **settings: object) -> Engine:
    options = {"calibrate": False, "page_size": 4, "cache_tokens": 1024, "cache_dtype": "int8", **settings}
    return Engine(tiny(name, dtype), EngineConfig(**options))


def scores(answer: Completion) -> list[float]:
    return [row.chosen for row in (*answer.prompt_logprobs, *answer.logprobs)]


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_nearly_the_model_s(name: str) -> None:
    """Within 0.05 of transformers' on average and 0.6 at most, where they reach down to -15: the weights of
    these models are random and make much of little."""
    draws = random.Random(name)
    engine = engine_of(name, scheduler={"max_prefill_rows": 10, "min_prefill_rows": 4})
    misses = []
    for prompt in prompts(draws, [3, 30, 70]):
        answer = engine.generate(prompt, sampling=SCORED).result()
        tokens = [*prompt, *answer.tokens]
        wanted = logits_of(tiny(name), tokens).log_softmax(-1)
        exact = [float(wanted[row, tokens[row + 1]]) for row in range(len(tokens) - 1)]
        misses += [abs(one - other) for one, other in zip(scores(answer), exact, strict=True)]
    assert 1e-5 < fmean(misses) < 0.05 and max(misses) < 0.6


def test_log_probabilities_of_a_trained_model() -> None:
    """Of texts that the embedded model wrote."""
    mean, most = logit_errors(1)
    assert 0 < mean < 0.01 and most < 0.15


def test_how_a_prompt_is_cut_and_who_read_it_first_change_little() -> None:
    """Rows always see what the cache gives back, those of their own chunk too."""
    (prompt,) = prompts(random.Random("cut"), [44])
    whole = engine_of("llama", prefix_sharing=False)
    cut = engine_of("llama", scheduler={"max_prefill_rows": 7, "min_prefill_rows": 7})
    wanted = scores(whole.generate(prompt, sampling=SCORED).result())
    assert scores(cut.generate(prompt, sampling=SCORED).result()) == pytest.approx(wanted, abs=0.02)
    again = cut.generate(prompt, sampling=SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True)).result()
    assert again.sequence.cached == 43
    assert scores(again) == pytest.approx(wanted[43:], abs=0.02)


def test_bits_of_the_deterministic_mode(tmp_path: Path) -> None:
    """Cut, found, behind virtual tokens, with few pages: eight bits are the same eight bits."""
    with torch.no_grad():
        with_virtual(tiny("llama"), "prefix").save_pretrained(str(tmp_path))
    draws = random.Random("bits")
    begun = prompts(draws, [30])[0]
    asked = [[*begun[: draws.randint(1, 30)], *prompts(draws, [draws.randint(0, 9)])[0]] for _ in range(10)]
    told = []
    for settings in ({"prefix_sharing": False}, {"cache_tokens": 140}):
        engine = engine_of("llama", deterministic=True, scheduler={"training_window": 16}, **settings)
        engine.adapters.load("prefix", tmp_path)
        sampling = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
        answers = [engine.generate(p, (None, "prefix")[i % 2], sampling) for i, p in enumerate(asked)]
        told.append([(answer.result().tokens, answer.logprobs) for answer in answers])
    assert told[0] == told[1] and engine.scheduler.stats.found_tokens > 20


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_dtype must be auto or int8, not 'int4'"):
        EngineConfig(cache_dtype="int4")
