"""Rows `parity[method].forward` and `.gradient`: against PEFT or a plain torch module, one at a time."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import write_adapter
from coserve.adapters.settings import settings_of
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.engine import Engine
from coserve.train.config import TrainingConfig
from coserve.train.fresh import fresh_adapter
from coserve.workload.requests import training_tokens
from coserve_benchmarks.methods.menu import METHODS
from coserve_benchmarks.methods.oracles import oracle_of
from coserve_benchmarks.ours import Bench, examples

_VOCABULARY: Final = 96
_SPREAD: Final = "least and greatest of the shapes"
_LENGTHS: Final = (23, 31, 17)
_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_LLAMA: Final[Mapping[str, Any]] = {
    **_COMMON, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "gpt2": {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_LLAMA, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
}  # fmt: skip
# An optimizer step of plain descent: with an epsilon that dwarfs every gradient and no memory, AdamW
# subtracts learning rate / epsilon times the gradient.
_HUGE: Final = 1e12
_STEP: Final = 1e6


def run(bench: Bench) -> None:
    """The largest error of all shapes; spreads are the least and greatest of them."""
    for method, fields in METHODS.items():
        found = {shape: _errors(shape, fields) for shape in SHAPES}
        for number, what in enumerate(("forward", "gradient")):
            errors = [pair[number] for pair in found.values()]
            note = ", ".join(f"{shape} {pair[number]:.1e}" for shape, pair in found.items())
            spread = (min(errors), max(errors))
            bench.results.row(f"parity[{method}].{what}", max(errors), spread, note, _SPREAD)


def _errors(shape: str, fields: Mapping[str, Any]) -> tuple[float, float]:
    """Largest error of a log-probability, and of a gradient of the mean loss."""
    data = training_tokens(list(_LENGTHS), _VOCABULARY, 0)
    with tempfile.TemporaryDirectory() as scratch:
        folder, after = Path(scratch) / "before", Path(scratch) / "after"
        engine = Engine(_model(shape), EngineConfig(calibrate=False, cache_tokens=1024))
        write_adapter(_stirred(fresh_adapter(engine.base, "probe", settings_of(fields), 0)), folder)
        probe = engine.adapters.load("probe", folder)
        scored = [_scored(engine, list(tokens)) for tokens in data]
        training = TrainingConfig(
            learning_rate=_STEP * _HUGE, epsilon=_HUGE, betas=(0.0, 0.0), schedule="constant",
            warmup_ratio=0.0, max_grad_norm=None, batch_size=len(data),
        )  # fmt: skip
        engine.finetune(examples(data), "trained", training=training, start_from=probe).result()
        engine.adapters.save("trained", after)
        then, now = (load_file(f / "adapter_model.safetensors") for f in (folder, after))
        oracle = oracle_of(_model(shape), folder)
    losses, forward = [], 0.0
    for tokens, mine in zip(data, scored, strict=True):
        ids = torch.tensor(tokens)
        logprobs = oracle.logits(ids).log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        forward = max(forward, float((logprobs.detach() - mine).abs().max()))
        losses.append(-logprobs.sum())
    parameters = oracle.parameters()
    loss = torch.stack(losses).sum() / (sum(_LENGTHS) - len(_LENGTHS))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    wrong = [
        float(((then[name] - now[name]) / _STEP - gradient).abs().max())
        for name, gradient in zip(parameters, gradients, strict=True)
    ]
    return forward, max(wrong)


def _model(shape: str) -> PreTrainedModel:
    """A small model with weights that make answers depend on their prompts; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape, **SHAPES[shape]))
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim > 1:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(0.1 * noise)
    built: PreTrainedModel = model.float().eval()
    return built


def _stirred(adapter: AdapterVersion) -> AdapterVersion:
    """The adapter with noise on its parameters: a fresh one would change nothing."""
    generator = torch.Generator().manual_seed(1)
    return adapter.with_parameters(
        {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in adapter.parameters().items()}
    )


def _scored(engine: Engine, tokens: list[int]) -> Tensor:
    """Log-probability of each token but the first."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = engine.generate(tokens, "probe", asked).result().prompt_logprobs
    return torch.tensor([logprob.chosen for logprob in found])
