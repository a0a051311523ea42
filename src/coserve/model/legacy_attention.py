"""Attention modules older than transformers' attention interface, which compute attention by code of their
own: here they make queries, keys and values as ever, and call the function that the interface has.

Bloom adds a bias to each score, a slope of the head times the key's position (ALiBi). That is a product too:
a few further numbers of each query and key, so whatever attends (pages, kernels, training windows) needs to
know nothing of it. The numbers are those of the distance between both, which stays exact in 16 bits: the
bias of a position alone would not.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coserve.adapters.sites import decoder_layers, decoder_of
from coserve.model.indexed_attention import choose_all_keys

# Positions of a model with ALiBi: the high and the low half of a position, both exact in bfloat16.
MOST_POSITIONS: Final = 1 << 15
_LOW: Final = 128
_WIDER: Final = 8  # numbers that ALiBi adds to a key, of which it uses six


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Has a model's attention computed by the function that is registered under a name."""
    choose_all_keys(model)
    found = [(module, form) for module in model.modules() if (form := _form_of(module)) is not None]
    if not found:
        model.set_attn_implementation(name)
        return
    for module, form in found:
        form(module, model.config)
    if counts_no_positions(model):
        _Positions().hand_to_layers(model)
    model.config._attn_implementation_internal = name


def counts_no_positions(model: PreTrainedModel) -> bool:
    """Tells whether a model's positions are in its attention's biases alone, and these are known."""
    return any(
        type(module).__name__ == "BloomAttention" and _form_of(module) is not None
        for module in model.modules()
    )


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
    if kind.__name__ == "FalconAttention" and own.config.alibi:  # its biases are rounded to 8 bits
        return None
    return _FORMS.get(kind.__name__)


def _attend(config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """[1, rows, heads, dv] by the function that the configuration names."""
    name = config._attn_implementation
    out: Tensor = AttentionInterface()[name](module, *args, **kwargs)[0]
    return out


def _scored_apart(module: Any, config: Any) -> None:
    """GPT-J and CodeGen have a method for scores and what follows."""
    scale = 1 / module.scale_attn

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


def _falcon(module: Any, config: Any) -> None:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    share = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1

    def forward(
        hidden_states: Tensor, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        split = module._split_heads(module.query_key_value(hidden_states))
        query, key, value = (x.transpose(1, 2) for x in split)
        key, value = key[:, ::share], value[:, ::share]  # which it repeats for the queries of a group
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
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


_FORMS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "GPTJAttention": _scored_apart,
    "CodeGenAttention": _scored_apart,
    "GPTNeoSelfAttention": _gpt_neo,
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
}


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


class _Positions(threading.local):
    """Positions [1, rows] of the forward under way on this thread."""

    now: Tensor | None = None

    def hand_to_layers(self, model: PreTrainedModel) -> None:
        """Has layers be called with the rows' positions in place of biases that the decoder makes: it counts
        rows, where those of several texts are side by side."""
        decoder_of(model).register_forward_pre_hook(self._note, with_kwargs=True)
        for layer in decoder_layers(model).values():
            layer.register_forward_pre_hook(self._place, with_kwargs=True)

    def _note(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.pop("position_ids", None)
        if positions is None:
            given = args[0] if args else kwargs.get("input_ids")
            given = kwargs["inputs_embeds"] if given is None else given
            past = kwargs.get("past_key_values")
            start = 0 if past is None else past.get_seq_length()
            positions = torch.arange(start, start + given.shape[1], device=given.device)[None]
        self.now = positions
        return args, kwargs

    def _place(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"alibi": self.now}
