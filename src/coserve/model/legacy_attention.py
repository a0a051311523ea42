"""Attention modules older than transformers' attention interface, which compute attention by code of their
own: here they make queries, keys and values as ever, and call the function that the interface has.

Bloom adds a bias to each score, a slope of the head times the key's position (ALiBi). That is a product too:
a few further numbers of each query and key, so whatever attends (pages, kernels, training windows) needs to
know nothing of it. The numbers are those of the distance between both, which stays exact in 16 bits: the
bias of a position alone would not.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coserve.adapters.sites import decoder_layers
from coserve.model.indexed_attention import choose_all_keys
from coserve.model.told_positions import hand_positions

# Positions of a model with ALiBi: the high and the low half of a position, both exact in bfloat16.
MOST_POSITIONS: Final = 1 << 15
_LOW: Final = 128
_WIDER: Final = 8  # numbers that ALiBi adds to a key, of which it uses six


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Has a model's attention computed by the function that is registered under a name."""
    choose_all_keys(model)
    hand_positions(model)
    _number(model)
    found = [(module, form) for module in model.modules() if (form := _form_of(module)) is not None]
    if not found:
        model.set_attn_implementation(name)
        return
    for module, form in found:
        form(module, model.config)
    model.config._attn_implementation_internal = name


def _number(model: PreTrainedModel) -> None:
    """Gives attention the number of its layer where it has none (GPT, Zamba's shared layers)."""
    for number, layer in enumerate(decoder_layers(model).values()):
        for module in layer.modules():
            unnumbered = getattr(module, "layer_idx", 0) in (None, -1)
            if unnumbered or type(module).__module__.endswith("modeling_openai"):
                module.layer_idx = number  # type: ignore[assignment]


def with_plain_linears(model: PreTrainedModel) -> None:
    """Makes linears of Falcon's own class plain ones, whose output is the same."""
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear


def _form_of(module: nn.Module) -> Callable[[Any, Any], None] | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    own: Any = module
    if kind.__name__ == "BloomAttention" and own.pretraining_tp > 1 and own.slow_but_exact:
        return None
    if kind.__name__ == "FalconAttention" and own.config.alibi and own.num_heads != own.num_kv_heads:
        return None  # a key has a bias by head
    if kind.__name__ in _ENCODERS and not own.is_decoder:
        return None
    if kind.__name__ == "Attention" and not kind.__module__.endswith("modeling_openai"):
        return None
    return _FORMS.get(kind.__name__)


def _attend(config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """[1, rows, heads, dv] by the function that the configuration names."""
    name = config._attn_implementation
    out: Tensor = AttentionInterface()[name](module, *args, **kwargs)[0]
    return out


def _scored_apart(module: Any, config: Any) -> None:
    """GPT-J, CodeGen and the Japanese GPT-NeoX have a method for scores and what follows."""
    scale = 1 / (module.norm_factor if hasattr(module, "norm_factor") else module.scale_attn)

    def attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        query, key = (x.to(value.dtype) for x in (query, key))  # CodeGen's rotary tables are in float32
        out = _attend(config, module, query, key, value, attention_mask, scaling=scale)
        return out.transpose(1, 2), None

    module._attn = attn


def _gpt_neo(module: Any, config: Any) -> None:
    """Its scores have no scale; the window of local layers is in no mask that it asks for."""
    window = config.window_size if module.attention_type == "local" else None
    module.layer_idx = module.layer_id

    def attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        if attention_mask is None:
            AttentionMaskInterface()[config._attn_implementation](local_size=window)
        given = {"scaling": 1.0, "sliding_window": window}
        return _attend(config, module, query, key, value, **given).transpose(1, 2), None

    module._attn = attn


def _openai(module: Any, config: Any) -> None:
    """The first GPT asks for no mask."""

    def attn(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
        """`key` is [1, heads, width, rows]."""
        AttentionMaskInterface()[config._attn_implementation]()
        scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
        return [_attend(config, module, query, key.transpose(2, 3), value, scaling=scaling).transpose(1, 2)]

    module._attn = attn


def _falcon(module: Any, config: Any) -> None:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

    share = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1

    def forward(
        hidden_states: Tensor, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        split = module._split_heads(module.query_key_value(hidden_states))
        query, key, value = (x.transpose(1, 2) for x in split)
        key, value = key[:, ::share], value[:, ::share]  # which it repeats for the queries of a group
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        else:  # the rows' positions [1, rows]
            slopes = build_alibi_tensor(
                torch.ones_like(alibi[:, :1]).expand(1, 2), module.num_heads, torch.bfloat16
            )
            query, key = with_biases(query, key, slopes[:, 0, 1:] * alibi)
            if attention_mask is not None:  # its own biases, and the least number
                attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min
        scaling = module.inv_norm_factor
        out = _attend(config, module, query, key, value, attention_mask, scaling=scaling)
        return module.dense(out.flatten(2)), None

    module.forward = forward


def _bloom(module: Any, config: Any) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    scale = float(module.inv_norm_factor)

    def forward(
        hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """`alibi` are the rows' positions [1, rows]."""
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        slopes = _get_alibi_slopes(module.num_heads, query.device) / scale
        query, key = with_distances(query, key, alibi, slopes)
        out = _attend(config, module, query, key, value, attention_mask, scaling=scale)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward


def _mpt(module: Any, config: Any) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    scale = float(module.softmax_scale)

    def forward(
        hidden_states: Tensor, position_bias: Tensor, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """`position_bias` are the rows' positions [1, rows]."""
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (_heads(x, module.n_heads) for x in mixed.chunk(3, 2))
        slopes = -build_mpt_alibi_tensor(module.n_heads, 2, device=query.device)[:, 0, 0] / scale
        query, key = with_distances(query, key, position_bias, slopes)
        mask = attention_mask if attention_mask.numel() > 1 else None  # made of NO_MASK
        return module.out_proj(
            _attend(config, module, query, key, value, mask, scaling=scale).flatten(2)
        ), None

    module.forward = forward


def _scaled_before(module: Any, config: Any) -> None:
    """XGLM, MVP and TrOCR scale queries before they split them by head."""

    def forward(hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        query = module.q_proj(hidden_states) * module.scaling
        states = (query, module.k_proj(hidden_states), module.v_proj(hidden_states))
        query, key, value = (_heads(x, module.num_heads) for x in states)
        out = _attend(config, module, query, key, value, attention_mask, scaling=1.0)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward


def _bert(module: Any, config: Any) -> None:
    """Encoders' layers that were made decoders; RoFormer turns queries and keys by position."""
    scaling = module.attention_head_size**-0.5

    def forward(
        hidden_states: Tensor, attention_mask: Any = None, sinusoidal_pos: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        linears = (module.query, module.key, module.value)
        query, key, value = (_heads(linear(hidden_states), module.num_attention_heads) for linear in linears)
        if sinusoidal_pos is not None:
            query, key, *turned = module.apply_rotary_position_embeddings(
                sinusoidal_pos, query, key, value if module.rotary_value else None
            )
            value = turned[0] if turned else value
        out = _attend(config, module, query, key, value, attention_mask, scaling=scaling)
        return out.flatten(2), None

    module.forward = forward


def _diffllama(module: Any, config: Any) -> None:
    """It attends twice with the same queries and keys: here once, to both halves of the values."""
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    def forward(
        hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        linears = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (
            _heads(x, x.shape[-1] // module.head_dim) for x in (f(hidden_states) for f in linears)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        value = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)
        out = _attend(config, module, query, key, value, attention_mask, scaling=module.scaling)
        one, other = out.chunk(2, 2)
        pairs = ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
        first, second = ((q * k).sum(-1, dtype=torch.float32).exp().to(query.dtype) for q, k in pairs)
        out = module.groupnorm(one - (first - second + module.lambda_init) * other)
        return module.o_proj(((1 - module.lambda_init) * out).flatten(2)), None

    module.forward = forward


def _doge(module: Any, config: Any) -> None:
    """Each score has a bias that is made of its key's value. It drops the keys of the least biases where
    there are more than `keep_window_size` (`model/positions.py`)."""
    from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

    def forward(
        hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        linears = (module.q_proj, module.k_proj, module.v_proj)
        own = [linear(hidden_states) for linear in linears]
        query, key, value = (_heads(x, x.shape[-1] // module.head_dim) for x in own)
        query, key = apply_rotary_pos_emb(module.q_norm(query), module.k_norm(key), *position_embeddings)
        biases = torch.exp(module.A * F.softplus(module.dt_proj(own[2])))[0].t() / module.scaling
        query, key = with_biases(query, key, biases)
        out = _attend(config, module, query, key, value, attention_mask, scaling=module.scaling)
        return module.o_proj(out.flatten(2)), None

    module.forward = forward


def _heads(x: Tensor, count: int) -> Tensor:
    """[1, rows, width] as [1, heads, rows, width of a head]."""
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


_ENCODERS: Final = frozenset(
    {"MegatronBertSelfAttention", "RemBertSelfAttention", "BigBirdSelfAttention", "RoFormerSelfAttention"}
)
_FORMS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "GPTJAttention": _scored_apart,
    "CodeGenAttention": _scored_apart,
    "GPTNeoSelfAttention": _gpt_neo,
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
    "GPTNeoXJapaneseAttention": _scored_apart,
    "Attention": _openai,
    "MptAttention": _mpt,
    "XGLMAttention": _scaled_before,
    "MvpAttention": _scaled_before,
    "TrOCRAttention": _scaled_before,
    "DiffLlamaAttention": _diffllama,
    "DogeAttention": _doge,
    **dict.fromkeys(_ENCODERS, _bert),
}


def with_biases(query: Tensor, key: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [1, heads, rows, width + 8] whose product is that of `query` and `key` plus the keys'
    `biases` [heads, rows]."""
    none = (0, _WIDER - 1)
    ones = query.new_ones(*query.shape[:3], 1)
    own = biases.to(key.dtype)[None, ..., None]
    return torch.cat([query, F.pad(ones, none)], -1), torch.cat([key, F.pad(own, none)], -1)


def with_distances(query: Tensor, key: Tensor, positions: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [1, heads, rows, width + 8] and keys of as many heads whose product is that of `query` and
    `key` plus `slopes` [heads] times (key's position - query's position)."""
    exact = torch.float64  # which has the products of slopes in float32 with halves of positions
    own = slopes.to(query.dtype).to(exact)[:, None]
    high, low = (half.to(exact)[0] for half in (positions // _LOW, positions % _LOW))
    ones, none = torch.ones_like(high), torch.zeros_like(high)
    keys = torch.stack([high, low, ones, ones, ones, ones, none, none], -1).to(key.dtype)
    # What each product of a slope with a query's half does not have in the queries' type is added beside it.
    halves = [-(own * _LOW * high), -(own * low)]
    rounded = [half.to(query.dtype).to(exact) for half in halves]
    rest = [half - near for half, near in zip(halves, rounded, strict=True)]
    constant = [(own * factor).expand_as(halves[0]) for factor in (_LOW, 1.0)]
    given = [*constant, rounded[0], rest[0], rounded[1], rest[1], *[torch.zeros_like(halves[0])] * 2]
    queries = torch.stack(given, -1).to(query.dtype)
    assert queries.shape[-1] == keys.shape[-1] == _WIDER
    wider = keys.expand(*key.shape[:3], _WIDER)
    return torch.cat([query, queries[None]], -1), torch.cat([key, wider], -1)
