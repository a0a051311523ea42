"""Tiny models of the kinds that differ in their attention, with weights that make answers depend on prompts;
and what an engine says and learns on one."""

import random
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.adapters.methods.lora import LoRAConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.config import EngineConfig
from coserve.core.request import SamplingParams
from coserve.engine.completion import Completion
from coserve.engine.engine import Engine
from coserve.train.config import TrainingConfig
from coserve.train.fresh import fresh_adapter
from coserve.train.save_policy import SavePolicy
from coserve.workload.requests import training_tokens
from coserve_benchmarks.ours import examples
from coserve_benchmarks.plans import local_sessions

VOCABULARY: Final = 20  # so that answers come with all log-probabilities
_WINDOW: Final = 20
_COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": _WINDOW},  # windows
    "gemma2": {"head_dim": 16, "sliding_window": _WINDOW, "query_pre_attn_scalar": 16},  # and soft caps
    "deepseek_v3": {  # keys and values of unlike widths
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1,
    },
    "gpt_oss": {  # sinks
        "head_dim": 16, "sliding_window": _WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
ROUTED: Final = ("deepseek_v3", "gpt_oss")  # a last bit may choose another expert
ADAPTERS: Final[Mapping[str, object]] = {
    "lora": LoRAConfig(rank=4),
    "larger lora": LoRAConfig(rank=9, rslora=True),
    "dora": LoRAConfig(rank=3, dora=True),
    "ia3": IA3Config(),
    "bottleneck": BottleneckConfig(width=5, activation="gelu"),
    "bitfit": BitFitConfig(),
    "prefix": PrefixTuningConfig(5),
    "prompt": PromptTuningConfig(6),
}
_JOBS: Final[Mapping[str, SavePolicy]] = {
    "lora": SavePolicy.EVERYTHING,
    "larger lora": SavePolicy.INPUTS,
    "ia3": SavePolicy.PRUNED,
    "prefix": SavePolicy.INPUTS,
}
_CUTS: Final = {
    "max_training_rows": 32,
    "min_training_rows": 12,
    "max_prefill_rows": 32,
    "min_prefill_rows": 4,
}
_FORCED: Final = {7: 100.0}  # every answer's tokens, whatever rounding prefers
_SAMPLING: Final = SamplingParams(
    max_tokens=6, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY, ignore_eos=True, logit_bias=_FORCED
)
_BETA: Final = 0.9  # of AdamW: its first moment is a tenth of the first gradient
_SPREAD: Final = 0.05  # of what is added to fresh adapters
_ADAMW: Final = {"warmup_ratio": 0.0, "max_grad_norm": None, "betas": (_BETA, 0.999), "learning_rate": 1e-6}


def make_model(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with three layers, whose own attention and experts are plain products: some releases of
    transformers leave out soft caps in others."""
    experts = {"experts_implementation": "eager"} if kind in ROUTED else {}
    config = AutoConfig.for_model(kind, **{**_COMMON, **KINDS[kind]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", **experts
        )
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    return model.to(dtype).eval()


def make_engine(kind: str, dtype: torch.dtype, device: str, **config: Any) -> Engine:
    """Small pages, chunks and windows, so that all is cut."""
    settings = EngineConfig(
        device=device,
        calibrate=False,
        cache_tokens=2048,
        page_size=4,
        scheduler=_CUTS,
        async_scheduling=False,
        **config,
    )
    return Engine(make_model(kind, dtype), settings)


def add_adapters(engine: Engine) -> None:
    """One adapter of every method; what is zero in fresh ones is not."""
    for name, config in ADAPTERS.items():
        drawn, draws = fresh_adapter(engine.base, name, config, 0), torch.Generator().manual_seed(1)
        filled = {
            key: (x.cpu().double() + _SPREAD * torch.randn(x.shape, generator=draws).double()).to(x)
            for key, x in drawn.parameters().items()
        }
        engine.adapters.add(drawn.with_parameters(filled).in_type(engine.base.dtype))


def log_probabilities(engine: Engine, adapters: list[str | None]) -> dict[str, Tensor]:
    """[rows, vocabulary] of prompts and answers side by side, by prompt and adapter; two for each adapter."""
    draws, asked = random.Random(0), []
    for number in range(2 * len(adapters)):
        prompt = [draws.randrange(1, VOCABULARY) for _ in range(draws.randint(3, 45))]
        adapter = adapters[number % len(adapters)]
        name = f"{number} ({adapter or 'base'})"
        asked.append((name, engine.generate(prompt, adapter, _SAMPLING, text=False)))
    engine.run()
    return {name: _table(answer) for name, answer in asked}


def _table(answer: Completion) -> Tensor:
    rows = [*answer.prompt_logprobs, *answer.logprobs]
    found = torch.full((len(rows), VOCABULARY), torch.nan, dtype=torch.float64)
    for row, of_row in enumerate(rows):
        for token, logprob in of_row.top:
            found[row, token] = logprob
    return found


def first_gradients(engine: Engine) -> dict[str, Tensor]:
    """Gradients of the first optimizer step of jobs of several methods that train at once, beside answers, by
    job and parameter."""
    draws = random.Random(1)
    data = examples(training_tokens([draws.randint(9, 40) for _ in range(4)], VOCABULARY))
    jobs = {}
    for kind, keep in _JOBS.items():
        training = TrainingConfig(batch_size=2, max_steps=2, rows=48, keep=keep, **_ADAMW)  # type: ignore[arg-type]
        jobs[f"tuned {kind}"] = engine.finetune(data, f"tuned {kind}", ADAPTERS[kind], training)
    engine.generate([1, 5, 9, 2] * 8, sampling=_SAMPLING, text=False)
    found: dict[str, Tensor] = {}
    while len({name.partition(":")[0] for name in found}) < len(jobs):
        engine.step()
        for name, job in jobs.items():
            if len(job.history) == 1 and not any(key.startswith(f"{name}:") for key in found):
                found |= _moments(engine, name, job.job)
    engine.run()
    return found


def graphed_gradients(engine: Engine) -> dict[str, Tensor]:
    """The first moments of a low-rank job after three optimizer steps, of which a device with graphs replays
    the last ones: a graph is captured when a second window asks for it. One gradient of four packed examples
    differs from the next by steps of a millionth."""
    data = examples(training_tokens([33, 20, 40, 12], VOCABULARY))
    training = TrainingConfig(batch_size=4, max_steps=4, rows=128, keep=SavePolicy.EVERYTHING, **_ADAMW)  # type: ignore[arg-type]
    job = engine.finetune(data, "graphed", ADAPTERS["lora"], training)
    while len(job.history) < 3:
        engine.step()
    found = _moments(engine, "graphed", job.job)
    engine.run()
    return found


def _moments(engine: Engine, name: str, job: str) -> dict[str, Tensor]:
    moments = local_sessions(engine)[job].weights.optimizer.snapshot()()[1]
    return {
        f"{name}: {key.removesuffix('.exp_avg')}": moment.cpu().double() / (1 - _BETA)
        for key, moment in moments.items()
        if key.endswith(".exp_avg")
    }
