"""Tiny models of every architecture, tokenizers, and the oracles they are compared with.

Nothing here uses coserve: an oracle is transformers' own model, with PEFT's adapters where there are any.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from coserve_benchmarks.models.shrunk import POSITIONS as POSITIONS
from coserve_benchmarks.models.shrunk import VOCABULARY as VOCABULARY
from coserve_benchmarks.models.shrunk import WINDOW as WINDOW
from coserve_benchmarks.models.shrunk import spread as spread

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
}
PANELS: dict[str, Any] = {  # all linears have whole panels of 64 outputs, as packed weights do
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
_GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": {**_COMMON, "sliding_window": WINDOW},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 16},
    # Gemma's default logit cap and query scaling are meant for larger widths.
    "gemma2": {**_COMMON, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_COMMON, "head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 7},
    "gpt2": _GPT2,
    "gpt_neox": _COMMON,
    "opt": {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "phi3": _COMMON,
    "granite": {**_COMMON, "logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 1.5},
    "starcoder2": {**_COMMON, "sliding_window": WINDOW},
    "gpt_bigcode": _GPT2,
    "mixtral": {**_COMMON, **_EXPERTS},
    "gpt_oss": {**_COMMON, **_EXPERTS, "head_dim": 16, "sliding_window": WINDOW},
    "glm": {**_COMMON, "head_dim": 16},
    "deepseek_v3": {**_COMMON, **_DEEPSEEK},
}
# The last two layers read the keys and values of the two before them.
SHARING: Mapping[str, dict[str, Any]] = {
    "gemma4_text": {
        **_COMMON,
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}
MIXTURES = ("mixtral", "gpt_oss", "deepseek_v3")


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of architecture `name` with a configuration object of its own; same arguments, same weights."""
    fields = {
        **{**ARCHITECTURES, **SHARING}.get(name, _COMMON),
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    config = AutoConfig.for_model(name, **fields)
    # The grouped products of fused experts have no float64.
    options = {"experts_implementation": "eager"} if name in MIXTURES and dtype == torch.float64 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what a model draws for itself
        model = AutoModelForCausalLM.from_config(config, **options)
    spread(model, seed)
    return model.to(dtype).eval()


def make_eager(model: PreTrainedModel) -> None:
    """Plain products alone, as float64 has them."""
    model.set_attn_implementation("eager")
    if model.config.model_type in MIXTURES:
        model.set_experts_implementation("eager")


def prompts(draws: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length."""
    return [[draws.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A folder with the model and a tokenizer of one token per byte-ish letter."""
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character (96 ids, 0 ends a text), so any id decodes to a letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' own greedy answer to one prompt, `tokens` long whatever it says."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=0,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits [rows, vocabulary] of one sequence."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def linear_paths(model: nn.Module) -> list[str]:
    """Linears inside the decoder layers, found by their types."""
    kinds = (nn.Linear, Conv1D)
    return [
        n for n, m in model.named_modules() if type(m) in kinds and any(p.isdigit() for p in n.split("."))
    ]


def with_lora(model: PreTrainedModel, seed: int, strength: float = 0.3, **fields: Any) -> PeftModel:
    """The model under a PEFT LoRA whose both matrices are random; all linears unless `target_modules` says.

    PEFT takes the `gate_proj` of a DeepSeek's dense layers for experts', unless it does not know the type.
    """
    fields = {"r": 4, "lora_alpha": 6, "target_modules": linear_paths(model), **fields}
    if model.config.model_type == "deepseek_v3":
        model.config.model_type = "of its own"
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(strength * noise / parameter.shape[-1] ** 0.5)
    return adapted.eval()


def lora_parameters(adapted: PeftModel) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """(A, B) of PEFT's default adapter, by the path of the linear in the unwrapped model."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in adapted.named_parameters():
        for letter in "AB":
            if name.endswith(f".lora_{letter}.default.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(f".lora_{letter}.default.weight")
                found.setdefault(path, {})[letter] = parameter
    return {path: (pair["A"], pair["B"]) for path, pair in found.items()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of an adapter's configuration file."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Exact:
    """Float64 stays float64, on all threads.

    Models compute norms, routers and softmax in float32 whatever their dtype is, which rounds two equal
    computations apart by 6e-8 as soon as they differ in the last bit, or in their number of rows. While
    this holds a float64 tensor that is asked for as float32 stays as it is, so that bounds of 1e-10 say
    something. It holds for coserve and for its oracle alike.

    The functions that take a type are replaced meanwhile. A mode of torch's sees all functions, and took a
    third of the time of a step.
    """

    _lock, _holders = threading.Lock(), 0
    _own: ClassVar[dict[tuple[Any, str], Any]] = {}

    def __enter__(self) -> Self:
        with self._lock:
            if not Exact._holders:
                for owner, names in _TYPED.items():
                    for name in names:
                        self._own[owner, name] = vars(owner).get(name)
                        setattr(owner, name, _in_float64(getattr(owner, name)))
                self._own[Tensor, "float"] = vars(Tensor).get("float")
                Tensor.float = _stays(Tensor.float)  # type: ignore[method-assign]
            Exact._holders += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            Exact._holders -= 1
            if not Exact._holders:
                for (owner, name), own in self._own.items():
                    if own is None:  # of a class that it is derived from
                        delattr(owner, name)
                    else:
                        setattr(owner, name, own)


@contextmanager
def inexact() -> Iterator[None]:
    """Has functions take float64 for float32 no more, in the middle of `Exact`."""
    with Exact._lock:
        lifted = {(owner, name): vars(owner)[name] for owner, name in Exact._own} if Exact._holders else {}
        for owner, name in lifted:
            setattr(owner, name, vars(owner)[name].__wrapped__)
    try:
        yield
    finally:
        for (owner, name), function in lifted.items():
            setattr(owner, name, function)


_TYPED: dict[Any, tuple[str, ...]] = {
    Tensor: (
        "to", "type", "softmax", "log_softmax", "sum", "mean", "prod", "cumsum", "cumprod", "norm",
        "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    ),
    torch: (
        "softmax", "log_softmax", "sum", "mean", "prod", "cumsum", "cumprod", "norm", "zeros_like",
        "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    ),
}  # fmt: skip


def _in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or args[0].dtype is not torch.float64:
            return function(*args, **named)
        if named:
            named = {k: torch.float64 if a is torch.float32 else a for k, a in named.items()}
        return function(*(torch.float64 if a is torch.float32 else a for a in args), **named)

    return call


def _stays(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(x: Tensor, *args: Any, **named: Any) -> Tensor:
        return x if x.dtype is torch.float64 else function(x, *args, **named)

    return call
