"""A whole engine run whose cache has another layout gives the same tokens."""

import random

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.worker.worker import Worker
from layouts import BACKENDS
from models import prompts, tiny

Outcome = tuple[list[list[int]], torch.Tensor]
# Virtual tokens where a model can have any: a prefix where keys are as wide as values.
METHODS = {
    "llama": PrefixTuningConfig(6),
    "gemma2": PrefixTuningConfig(9),
    "gpt_oss": PrefixTuningConfig(5),
    "deepseek_v3": PromptTuningConfig(6),
    "gemma4_text": LoRAConfig(rank=2),
}
ANSWER = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0)


def run(name: str, backend: str, patch: pytest.MonkeyPatch) -> Outcome:
    """Answers and their log-probabilities, of a run in which prompts are cut, share pages, stand behind
    virtual tokens, lose their pages, and pass beside a job's rows."""
    patch.setattr(Worker, "attention_type", staticmethod(BACKENDS[backend]))
    config = EngineConfig(
        calibrate=False, page_size=4, cache_tokens=84, max_running=6, scheduler={"max_prefill_rows": 20}
    )
    engine = Engine(tiny(name, torch.float64), config)
    draws = random.Random(name)
    engine.adapters.add(fresh_adapter(engine.base, "adapter", METHODS[name], 1))
    lengths = [17, 5, 1, 33, 12, 26]
    own = prompts(draws, lengths)
    shared = prompts(draws, [14])[0]
    asked = [*own, *(shared + rest for rest in prompts(draws, [3, 9]))]
    adapters = [None, "adapter", None, None, "adapter", None, None, None]
    examples = [Example(tuple(x), (*x[1:], -100)) for x in prompts(draws, [11, 19, 8, 15])]
    job = engine.finetune(examples, "mine", LoRAConfig(rank=2), TrainingConfig(batch_size=2, epochs=1))
    answers = [
        engine.generate(prompt, adapter, ANSWER) for prompt, adapter in zip(asked, adapters, strict=True)
    ]
    engine.run()
    assert job.status == "succeeded" and engine.stats().preemptions
    scores = [[score.chosen for score in answer.logprobs] for answer in answers]
    return [answer.tokens for answer in answers], torch.tensor(scores, dtype=torch.float64)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["page major", "plain"])
@pytest.mark.parametrize("name", METHODS)
def test_an_engine_answers_alike(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, scores = run(name, backend, monkeypatch)
    their_tokens, their_scores = run(name, "batched", monkeypatch)
    assert tokens == their_tokens
    assert float((scores - their_scores).abs().max()) < 1e-5  # norms and rotary tables are float32
