"""In the deterministic mode another thread that changes torch's default type changes no bit.

Libraries change torch's default type for a while: transformers does so while it makes a model. Two threads
that did so at once left bfloat16 behind, and every adapter that was drawn from then on was another one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_deterministic import Told, crowd, engine_of, examples

from coserve import Engine, SavePolicy, TrainingConfig
from coserve.adapters.settings import settings_of
from coserve.engine.finetuning import FineTuning

METHODS: dict[str, object] = {
    "lora": {"peft_type": "LORA", "r": 5, "lora_dropout": 0.1, "target_modules": ["q_proj", "embed_tokens"]},
    "dora": {"peft_type": "LORA", "r": 3, "use_dora": True, "bias": "lora_only"},
    "ia3": {"peft_type": "IA3"},
    "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5},
    "p-tuning": {"peft_type": "P_TUNING", "num_virtual_tokens": 5, "encoder_hidden_size": 16},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5, "prefix_projection": True},
    "bottleneck": {"peft_type": "COSERVE_BOTTLENECK"},
}
TRAINING = TrainingConfig(batch_size=3, rows=110, learning_rate=3e-3, keep=SavePolicy.PRUNED)
Bits = tuple[list[tuple[int, float, float]], dict[str, torch.Tensor]]


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def bits_of(engine: Engine, handles: list[FineTuning]) -> Bits:
    """Every step's loss and gradient norm, each step once, and the weights they led to."""
    steps = {update.step: update for handle in handles for update in handle.history}
    weights = {n: p.view(torch.uint8) for n, p in engine.adapters.weights("job").parameters().items()}
    return [(u.step, u.loss, u.grad_norm) for _, u in sorted(steps.items())], weights


def assert_same(found: Bits, expected: Bits, what: object) -> None:
    assert found[0] == expected[0], what
    assert [n for n in expected[1] if not torch.equal(found[1][n], expected[1][n])] == [], what


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return engine_of("llama", torch.bfloat16), engine_of("llama", torch.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_torchs_default_type(engines: tuple[Engine, Engine], method: str) -> None:
    """Another one from before the job begins to its end, answers beside it included."""
    engine, settings = engines[0], settings_of(METHODS[method])

    def train(dtype: torch.dtype) -> tuple[Bits, Told]:
        with default_type(dtype):
            job = engine.finetune(examples("types", 6), "job", settings, TRAINING)
            (asked,) = crowd("types", 1, names=[None])
            answer = Told.of(engine.generate(asked.prompt, None, asked.sampling).result())
            found = bits_of(engine, [job.result()]), answer
        engine.adapters.unload("job")
        return found

    expected = train(torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        found = train(dtype)
        assert_same(found[0], expected[0], (method, dtype))
        assert found[1] == expected[1], (method, dtype)
