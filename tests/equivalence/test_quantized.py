"""A quantized base is the base with other weights: what is served and trained on it is what transformers and
PEFT make of those weights, one request and one adapter at a time."""

import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve import LoRAConfig, SamplingParams, TrainingConfig
from coserve.model.load import load_base
from coserve.model.quantized.embedding import QuantizedEmbedding
from coserve.model.quantized.nf4 import NF4Placement
from coserve.train.example import Example
from methods import SMALL, case_of, engine_of, forward_errors, served, windowed_errors, with_peft
from models import Exact, greedy, inexact, logits_of, tiny
from plain import with_biases, with_bottlenecks

BITS = ("8bit", "4bit")
# Linears that lie transposed and tied embeddings; scaled embeddings; fused experts.
SHAPES = ("llama", "gpt2", "gemma3_text", "mixtral")
LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(autouse=True)
def library_works_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `Exact`, too, which would hand it float64 in the guise of float32."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with inexact():
                return function(*args, **kwargs)

        return call

    for name in ("__init__", "_dense"):
        monkeypatch.setattr(NF4Placement, name, outside(getattr(NF4Placement, name)))


@torch.no_grad()
def with_weights_of(model: PreTrainedModel, bits: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The same model, with what its weights are once they are quantized, in its own type or after that."""
    dtype = model.dtype if dtype is None else dtype
    changes = {"vocab_size": model.config.vocab_size}
    own = {path: module for path, module in model.named_modules() if hasattr(module, "weight")}
    base = load_base(tiny(model.config.model_type, dtype, **changes), quantize=bits)
    for path, linear in base.linears.items():
        module = own.get(path) or own[f"{path}.base_layer"]
        dense = linear.placement.weight()
        module.weight.copy_(dense.t() if isinstance(module, Conv1D) else dense)
    embedding = base.model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    model.get_input_embeddings().weight.copy_(embedding.weight)
    return model


def adapted(config: Any, dtype: torch.dtype, bits: str, **changes: Any) -> PeftModel:
    oracle = with_peft("llama", config, dtype, **changes)
    with_weights_of(oracle.get_base_model(), bits)
    return oracle


def plain(make: Callable[..., Any], bits: str, *args: Any) -> Any:
    oracle = make("llama", torch.float64, *args)
    with_weights_of(oracle.model, bits)
    return oracle


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_the_dense_weights(name: str, bits: str) -> None:
    engine = engine_of(name, config={"quantize": bits})
    oracle = with_weights_of(tiny(name), bits)
    draws = random.Random(f"{name}/{bits}")
    asked = [[draws.randrange(1, 96) for _ in range(length)] for length in (1, 9, 40)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = [engine.generate(prompt, sampling=sampling) for prompt in asked]
    engine.run()
    assert [answer.result().tokens for answer in answers] == [greedy(oracle, p, 12) for p in asked]
    other = (logits_of(oracle, asked[1]) - logits_of(tiny(name), asked[1])).abs().max()
    assert other > 1e-2, "rounding changed nothing, so nothing was shown"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [3, 40, 100])
def test_in_low_precision_the_fast_products_are_as_near(bits: str, rows: int) -> None:
    """Of few rows and of many: as near to the exact answer as transformers is with the dense weights."""
    exact = with_weights_of(tiny("llama", vocab_size=SMALL), bits, torch.bfloat16)
    short = with_weights_of(tiny("llama", torch.bfloat16, vocab_size=SMALL), bits)
    draws = random.Random(rows)
    prompt = [draws.randrange(1, SMALL) for _ in range(rows)]
    wanted, theirs = (logits_of(m, prompt)[:-1].float().log_softmax(-1) for m in (exact, short))
    engine = engine_of("llama", torch.bfloat16, config={"quantize": bits}, vocab_size=SMALL)
    mine = float((served(engine, prompt, None) - wanted).abs().mean())
    assert mine <= 1.5 * float((theirs - wanted).abs().mean())


@pytest.mark.parametrize("bits", BITS)
def test_adapters_are_served_on_it(bits: str, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=LINEARS)
    oracle = adapted(config, torch.float32, bits, vocab_size=SMALL)
    engine = engine_of("llama", config={"quantize": bits}, vocab_size=SMALL)
    error, difference = forward_errors("llama", oracle, tmp_path, engine)
    assert error <= 1 and difference > 1e-2


BIASED = [f"model.layers.{i}.{name}" for i in range(3) for name in ("self_attn.q_proj", "mlp.up_proj")]
METHODS: dict[str, Callable[[str], Any]] = {
    "lora": lambda bits: adapted(
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEARS), torch.float64, bits
    ),
    "dora": lambda bits: adapted(
        LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=LINEARS), torch.float64, bits
    ),
    "embeddings": lambda bits: adapted(
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens", "lm_head", "k_proj"]),
        torch.float64,
        bits,
    ),
    "ia3": lambda bits: adapted(
        IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        torch.float64,
        bits,
    ),
    "bottleneck": lambda bits: plain(with_bottlenecks, bits, "houlsby", "gelu"),
    "bitfit": lambda bits: plain(with_biases, bits, BIASED),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_dense_weights(method: str, bits: str, tmp_path: Path) -> None:
    """Window by window against autograd through the dense weights, in float64."""
    with Exact():
        oracle = METHODS[method](bits)
        trainable = getattr(oracle, "trainable", None)
        if trainable is not None:
            oracle.save_pretrained(tmp_path)
        case = case_of("llama", oracle, tmp_path, trainable, config={"quantize": bits})
        errors = windowed_errors(case, sizes=(11,))
    assert max(errors.values()) <= 1e-10, errors


def test_gradients_through_tiles(tmp_path: Path) -> None:
    """In bfloat16 few rows and many go different ways there, and the same way back: as near to the exact
    gradients as a base that is not quantized comes."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEARS)
    worst = {}
    for bits in ("none", "4bit"):
        exact = with_peft("llama", config, torch.float32)
        if bits != "none":
            with_weights_of(exact.get_base_model(), bits, torch.bfloat16)
        case = case_of("llama", exact, tmp_path / bits, dtype=torch.bfloat16, config={"quantize": bits})
        kinds = {type(linear.placement) for linear in case.engine.base.linears.values()}
        assert (bits == "4bit") == any(issubclass(kind, NF4Placement) for kind in kinds)
        worst[bits] = max(windowed_errors(case, sizes=(11, 1000), floor=1e-2).values())
    assert worst["4bit"] <= 2 * worst["none"], worst


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", BITS)
def test_in_the_deterministic_mode_bits_are_the_same(bits: str) -> None:
    """Alone or beside others and a job: tokens, log-probabilities and what is trained."""
    found = []
    for others in (0, 5):
        engine = engine_of("llama", torch.bfloat16, config={"quantize": bits, "deterministic": True})
        draws = random.Random(1)
        asked = [[draws.randrange(1, 96) for _ in range(length)] for length in (13, 1, 30, 7, 22, 9)]
        sampling = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3)
        data = [Example(tuple(range(1, 50)), tuple(range(2, 51)))] * 6
        job = engine.finetune(data, "mine", LoRAConfig(), TrainingConfig(learning_rate=1e-2, batch_size=2))
        answers = [engine.generate(prompt, sampling=sampling) for prompt in asked[: 1 + others]]
        engine.run()
        first = answers[0].result()
        weights = engine.adapters.weights("mine").parameters()
        found.append((first.tokens, first.logprobs, [step.loss for step in job.history], weights))
    alone, together = found
    assert alone[:3] == together[:3]
    assert alone[3].keys() == together[3].keys()
    assert all(torch.equal(alone[3][name], together[3][name]) for name in alone[3])


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", BITS)
def test_a_base_in_few_bits_learns_what_the_dense_one_learns(bits: str) -> None:
    losses = {}
    for how in ("none", bits):
        engine = engine_of("llama", torch.bfloat16, config={"quantize": how})
        draws = random.Random(3)
        tokens = [tuple(draws.randrange(1, 96) for _ in range(24)) for _ in range(4)]
        data = [Example(t, (*t[1:], -100)) for t in tokens] * 20
        training = TrainingConfig(learning_rate=3e-3, batch_size=4)
        job = engine.finetune(data, "mine", LoRAConfig(rank=8), training)
        job.result()
        losses[how] = [step.loss for step in job.history]
    assert losses["none"][-1] < 0.6 * losses["none"][0], losses
    assert losses[bits][-1] < 1.2 * losses["none"][-1], losses
