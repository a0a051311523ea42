"""A base over several ranks answers as transformers and PEFT do, and trains what one rank trains."""

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
from coserve.engine.completion import Completion
from coserve.errors import ConfigError
from coserve.executors.remote import RemoteExecutor
from forked_executors import fork_executors
from models import logits_of, prompts, save, tiny, with_lora

pytestmark = pytest.mark.local
CUTS = {"max_training_rows": 24, "min_training_rows": 3, "max_prefill_rows": 16, "min_prefill_rows": 4}
TRAINING = TrainingConfig(
    learning_rate=1e-3, batch_size=3, epochs=9, max_steps=3, rows=64, max_grad_norm=0.05
)
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
# Four ranks have a head each, and a quarter of the vocabulary, whose head is the embedding.
TIED: dict[str, Any] = {"num_key_value_heads": 4, "tie_word_embeddings": True}
# Beside what is cut by vocabulary too.
ENDS = "embed_tokens", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head"
CASES = [
    pytest.param("llama", 2, torch.float64, {}, id="llama in float64"),
    pytest.param("llama", 4, torch.float32, TIED, id="llama on four ranks"),
    pytest.param("mixtral", 2, torch.float32, {}, id="mixtral"),
    pytest.param("gemma2", 2, torch.float32, {}, id="gemma2"),
    pytest.param("qwen3", 2, torch.float32, {"attention_bias": True}, id="qwen3 with biases"),
]


# Rows of 128 and 256 inputs, of which two ranks have whole blocks of four bits; a tied head's are in eight.
BLOCKS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@contextmanager
def engine_of(folder: Path, ranks: int, quantize: str = "none") -> Iterator[Engine]:
    settings: dict[str, Any] = {"cache_tokens": 1024, "page_size": 8, "scheduler": CUTS, "quantize": quantize}
    engine = Engine(folder, EngineConfig(calibrate=False, tensor_parallel=ranks, **settings))
    try:
        yield engine
    finally:
        if isinstance(engine.executor, RemoteExecutor):
            engine.executor.close()


def ask(engine: Engine, questions: list[list[int]], adapter: str | None = None) -> list[Completion]:
    return [engine.generate(question, adapter, SAMPLING) for question in questions]


@pytest.mark.parametrize(("name", "ranks", "dtype", "changes"), CASES)
def test_ranks_compute_what_one_does(
    name: str, ranks: int, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Answers with and without adapters, beside training, in windows and slices that are paused."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    fork_executors(monkeypatch)
    folder = save(tiny(name, dtype, **changes), tmp_path / "model")
    questions = prompts(random.Random(name), [9, 3, 21])
    peft = with_lora(tiny(name, dtype, **changes), seed=1)
    peft.save_pretrained(str(tmp_path / "peft"))
    data, jobs, adapters = make_examples(name, 9), {}, {}
    for count in (1, ranks):
        with engine_of(folder, count) as engine:
            told = [engine.base.fingerprint, engine.executor.spec.cache_nbytes * count]
            engine.adapters.load("peft", tmp_path / "peft")
            method = LoRAConfig(rank=4, targets=ENDS) if name == "qwen3" else LoRAConfig(rank=4)
            job = engine.finetune(data, "mine", method, TRAINING)
            answers = [*ask(engine, questions), *ask(engine, questions, "peft")]
            engine.run()
            own = ask(engine, questions, "mine")
            engine.run()
            jobs[count] = job.history, told, [answer.tokens for answer in (*answers, *own)]
            adapters[count] = engine.adapters.weights("mine").parameters()
            engine.adapters.save("mine", tmp_path / f"mine-{count}")
        for model, answered in ((tiny(name, dtype, **changes), answers[:3]), (peft, answers[3:])):
            for question, answer in zip(questions, answered, strict=True):
                with torch.no_grad():
                    logits = logits_of(model, [*question, *answer.tokens[:-1]])
                check_scored(logits, question, answer, 1e-5 * float(logits.abs().max()))
    (one, *wanted), (several, *found) = jobs[1], jobs[ranks]
    assert wanted == found, "the fingerprint, bytes of all ranks' pages, and all tokens"
    assert len(one) == len(several) == TRAINING.max_steps
    for before, after in zip(one, several, strict=True):
        assert before.grad_norm > (TRAINING.max_grad_norm or 0) and before.labels == after.labels
        assert after.loss == pytest.approx(before.loss, rel=tolerance, abs=0)
        assert after.grad_norm == pytest.approx(before.grad_norm, rel=tolerance, abs=0)
    with engine_of(folder, 1) as engine:
        saved = engine.adapters.load("saved", tmp_path / f"mine-{ranks}").parameters()
    assert adapters[1].keys() == adapters[ranks].keys() == saved.keys()
    for path, weight in adapters[1].items():
        assert weight.abs().max() > 0
        for other in (adapters[ranks][path], saved[path]):
            torch.testing.assert_close(other, weight, rtol=0, atol=tolerance, msg=path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "bits", "changes"),
    [
        ("llama", "4bit", BLOCKS),
        ("llama", "8bit", TIED),
        ("gemma2", "8bit", {}),
        ("qwen3", "8bit", {"attention_bias": True}),
    ],
)
def test_quantized_ranks_have_the_numbers_of_one(
    name: str, bits: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of the base and of a trained adapter, and its training: each rank quantizes its own part."""
    fork_executors(monkeypatch)
    folder = save(tiny(name, torch.float32, **changes), tmp_path / "model")
    questions, found = prompts(random.Random(name), [9, 3, 21]), []
    for count in (1, 2):
        with engine_of(folder, count, bits) as engine:
            job = engine.finetune(make_examples(name, 9), "mine", LoRAConfig(rank=4), TRAINING)
            answers = ask(engine, questions)
            engine.run()
            answers += ask(engine, questions, "mine")
            engine.run()
            numbers = [[x.chosen for x in answer.logprobs] for answer in answers]
            losses = [(step.loss, step.grad_norm) for step in job.history]
            found.append((engine.base.fingerprint, [answer.tokens for answer in answers], numbers, losses))
    (*same, numbers, losses), (*others, close, trained) = found
    assert same == others
    for before, after in zip([*numbers, *losses], [*close, *trained], strict=True):
        assert list(after) == pytest.approx(list(before), rel=1e-5, abs=1e-5)


def test_blocks_of_four_bits_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    folder = save(tiny("llama", torch.float32), tmp_path / "model")
    words = (
        "2 ranks would cut the blocks of 64 weights of model.layers.0.self_attn.o_proj, which has 64 inputs"
    )
    with pytest.raises(ConfigError, match=words), engine_of(folder, 2, "4bit"):
        pass
