"""A base over the stages of a pipeline answers as transformers and PEFT do, and trains what one process
trains."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import make_examples

from bases import check_scored
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.core.training import ACCURACY
from coserve.engine.completion import Completion
from coserve.executors.remote import RemoteExecutor
from forked_executors import fork_executors
from models import logits_of, prompts, save, tiny, with_lora

pytestmark = pytest.mark.local
CUTS = {"max_training_rows": 24, "min_training_rows": 3, "max_prefill_rows": 16, "min_prefill_rows": 4}
TRAINING = TrainingConfig(
    learning_rate=1e-3, batch_size=3, epochs=9, max_steps=3, rows=64, max_grad_norm=0.05
)
SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True, prompt_logprobs=2)
DRAWN = SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.0, seed=5)
FOUR = {"num_hidden_layers": 4, "tie_word_embeddings": True}
DORA = LoRAConfig(rank=2, dropout=0.1, dora=True)
IA3 = IA3Config(targets=("k_proj", "v_proj"))
MLP_BIASES = BitFitConfig("all", targets=("c_fc", "c_proj"))  # those of keys have no gradient but rounding
ONE = LoRAConfig(rank=2, targets=("layers.1.self_attn.v_proj",))
VIRTUAL = [PrefixTuningConfig(3, projection=True, hidden=8), PromptTuningConfig(2, start="SAMPLE_VOCAB")]
# Of a model with a tolerance: its stages and the ranks of each, and what trains.
CASES = [
    pytest.param("llama", (2, 1), torch.float64, {}, [*VIRTUAL, DORA], id="llama in float64"),
    pytest.param("gpt2", (2, 1), torch.float32, {}, [LNTuningConfig()], id="gpt2, whose head is tied"),
    pytest.param("mixtral", (2, 2), torch.float32, {}, [IA3], id="mixtral on ranks"),
    pytest.param("llama", (2, 2), torch.float64, {}, [*VIRTUAL, DORA], id="llama on ranks",
                 marks=pytest.mark.slow),
    pytest.param("gpt2", (2, 2), torch.float32, {}, [PTuningConfig(3), MLP_BIASES], id="gpt2, ranks",
                 marks=pytest.mark.slow),
    pytest.param("gemma2", (2, 1), torch.float32, {}, [BottleneckConfig()], id="gemma2",
                 marks=pytest.mark.slow),
    pytest.param("qwen2", (3, 2), torch.float32, {}, [BitFitConfig()], id="three stages",
                 marks=pytest.mark.slow),
    pytest.param("llama", (4, 1), torch.float32, FOUR, [ONE], id="four stages, one of which trains",
                 marks=pytest.mark.slow),
]  # fmt: skip


@contextmanager
def engine_of(folder: Path, stages: int, ranks: int) -> Iterator[Engine]:
    settings: dict[str, Any] = {"cache_tokens": 80, "page_size": 8, "scheduler": CUTS}
    settings |= {"pipeline_parallel": stages, "tensor_parallel": ranks}
    engine = Engine(folder, EngineConfig(calibrate=False, **settings))
    try:
        yield engine
    finally:
        if isinstance(engine.executor, RemoteExecutor):
            engine.executor.close()


def ask(engine: Engine, questions: list[list[int]], adapter: str | None = None) -> list[Completion]:
    return [engine.generate(question, adapter, SAMPLING) for question in questions]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "grid", "dtype", "changes", "parts"), CASES)
def test_stages_compute_what_one_process_does(
    name: str, grid: tuple[int, int], dtype: torch.dtype, changes: dict[str, Any], parts: list[object],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Answers with and without adapters, beside two jobs, some of them preempted or with a prefix of others;
    in windows and slices that are paused."""
    alone = 1, 1
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    fork_executors(monkeypatch)
    folder = save(tiny(name, dtype, **changes), tmp_path / "model")
    questions = prompts(random.Random(name), [14, 3, 23])
    peft = with_lora(tiny(name, dtype, **changes), seed=1)
    peft.save_pretrained(str(tmp_path / "peft"))
    data, jobs, adapters = make_examples(name, 9), {}, {}
    for count in (alone, grid):
        with engine_of(folder, *count) as engine:
            told: list[Any] = [engine.base.fingerprint, engine.base.parameters, list(engine.base.sites)]
            engine.adapters.load("peft", tmp_path / "peft")
            running = [
                engine.finetune(data, "mine", LoRAConfig(rank=4), TRAINING),
                engine.finetune(data, "other", parts, TRAINING),
            ]
            answers = [*ask(engine, questions), *ask(engine, questions, "peft")]
            drawn = [engine.generate(question, "peft", DRAWN) for question in questions]
            engine.run()
            assert engine.scheduler.stats.preemptions, "pages run out"
            for longer in ((), (7, 8, 9)):
                asked = [*questions[2], *longer]
                again = engine.generate(asked, sampling=DRAWN, scope="mine").result()
            assert again.sequence.cached >= 16, "its prefix is there"
            own = [*ask(engine, questions, "mine"), *ask(engine, questions, "other")]
            engine.run()
            jobs[count] = (
                [step for job in running for step in job.history],
                told, [answer.tokens for answer in (*answers, *drawn, again, *own)],
            )  # fmt: skip
            adapters[count] = {
                (one, path): weight
                for one in ("mine", "other")
                for path, weight in engine.adapters.weights(one).parameters().items()
            }
            engine.adapters.save("mine", tmp_path / f"mine-{count[0]}")
        for model, answered in ((tiny(name, dtype, **changes), answers[:3]), (peft, answers[3:])):
            for question, answer in zip(questions, answered, strict=True):
                with torch.no_grad():
                    logits = logits_of(model, [*question, *answer.tokens[:-1]])
                check_scored(logits, question, answer, 1e-5 * float(logits.abs().max()))
    (one, *wanted), (several, *found) = jobs[alone], jobs[grid]
    assert wanted == found, "facts of the base, and all tokens"
    assert len(one) == len(several) == 2 * TRAINING.max_steps
    for before, after in zip(one, several, strict=True):
        assert before.grad_norm > 0 and before.labels == after.labels
        assert after.loss == pytest.approx(before.loss, rel=tolerance, abs=0)
        assert after.grad_norm == pytest.approx(before.grad_norm, rel=tolerance, abs=0)
        assert after.metrics == before.metrics and before.metrics.keys() == {ACCURACY}
    with engine_of(folder, *alone) as engine:
        saved = engine.adapters.load("saved", tmp_path / f"mine-{grid[0]}").parameters()
    assert adapters[alone].keys() == adapters[grid].keys()
    for (job, path), weight in adapters[alone].items():
        assert weight.abs().max() > 0
        for other in (adapters[grid][job, path], *([saved[path]] if job == "mine" else [])):
            torch.testing.assert_close(other, weight, rtol=0, atol=tolerance, msg=path)
