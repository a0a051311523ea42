"""Differences that the probe at load time detects, and the identity of bases."""

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.errors import ModelError, UnsupportedModel
from coserve.model import load
from coserve.model.load import load_base
from coserve.model.routing import TiesAsBefore, of_rows
from coserve.train.proof import prove_training
from models import POSITIONS, WINDOW, tiny

LOW = (torch.bfloat16, torch.float16)
LLAMA4: dict[str, Any] = {"num_hidden_layers": 4, "num_local_experts": 2, "max_position_embeddings": 1 << 15}


def test_a_model_that_cannot_go_on_in_a_second_window_is_refused() -> None:
    """One that counts positions from the first row it is given agrees on whole sequences."""
    model = tiny("llama")
    own = model.model.rotary_emb.forward

    def from_zero(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(x, position_ids - position_ids[:, :1], *args, **kwargs)

    model.model.rotary_emb.forward = from_zero
    with pytest.raises(UnsupportedModel, match="cannot be driven layer by layer"):
        load_base(model)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return list(next(m for m in model.get_decoder().children() if isinstance(m, nn.ModuleList)))


def change(layer: nn.Module, how: Callable[..., Tensor]) -> None:
    """`how` is given what the layer gives and its arguments, and says what it gives from now on."""
    own = layer.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return how(own(hidden, *args, **kwargs), **kwargs)

    layer.forward = forward


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_one_wrong_row_is_enough(name: str, dtype: torch.dtype) -> None:
    """A row that is another's as soon as more than ten are there; in low precision, too, and whether or not
    routers choose: nine right rows in ten were enough there."""
    draws = random.Random(f"row/{name}/{dtype}")
    for layer in range(tiny(name).config.num_hidden_layers):
        model = tiny(name, dtype)
        wrong, other = draws.sample(range(11), 2)

        def mix(out: Tensor, wrong: int = wrong, other: int = other, **_: Any) -> Tensor:
            rows = [other if row == wrong and out.shape[1] > 10 else row for row in range(out.shape[1])]
            return out[:, rows]

        change(layers_of(model)[layer], mix)
        with pytest.raises(UnsupportedModel, match=rf"1 of 11 rows of layer {layer} "):
            load_base(model)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("begins", [7, 40, 200])
def test_what_begins_at_some_position_is_seen(begins: int, dtype: torch.dtype) -> None:
    """A fiftieth more on one layer's output, where the model's own forward counts the tokens in its cache:
    less than low precision rounds in some rows."""
    model = tiny("qwen3", dtype)

    def warmer(out: Tensor, past_key_values: Any = None, **_: Any) -> Tensor:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        return out * 1.02 if past >= begins else out

    change(layers_of(model)[1], warmer)
    with pytest.raises(UnsupportedModel, match="4 of 4 rows of the logits"):
        load_base(model)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_the_temperature_of_llama_4_is_seen(dtype: torch.dtype) -> None:
    """It begins at position 8191, in layers without rotary embeddings, and counts rows where there is no
    cache. Without it the model is driven right; so it is where no sequence becomes as long."""
    with pytest.raises(UnsupportedModel, match="position 3276"):
        load_base(tiny("llama4_text", dtype, attention_chunk_size=1 << 15, **LLAMA4))
    load_base(
        tiny("llama4_text", dtype, attention_chunk_size=1 << 15, attn_temperature_tuning=False, **LLAMA4)
    )
    load_base(
        tiny("llama4_text", dtype, attention_chunk_size=512, **{**LLAMA4, "max_position_embeddings": 256})
    )


def test_windows_of_the_wrong_layers_are_refused() -> None:
    """The windows of masks and layers are the same, but each layer has the other's."""
    model = tiny("gemma2")
    one, two = (layer.self_attn for layer in layers_of(model)[:2])
    one.sliding_window, two.sliding_window = two.sliding_window, one.sliding_window
    with pytest.raises(UnsupportedModel, match="layer 0 masks its attention otherwise"):
        load_base(model)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 5 * WINDOW])
def test_windows_that_are_off_are_refused(window: int) -> None:
    model = tiny("gemma2")
    layers_of(model)[2].self_attn.sliding_window = window
    with pytest.raises(UnsupportedModel, match=f"its layers .*{window}"):
        load_base(model)


def test_a_cache_that_is_shorter_than_what_layers_see_is_refused() -> None:
    """Moshi's layers pass no window on, and transformers generates with a cache of its configuration's. Where
    no sequence is as long the two agree."""
    with pytest.raises(
        UnsupportedModel, match=f"attend to all rows, and it generates with the last {WINDOW};"
    ):
        load_base(tiny("moshi", sliding_window=WINDOW, ffn_dim=192))
    load_base(tiny("moshi", sliding_window=POSITIONS, ffn_dim=192))


def test_tables_that_depend_on_the_farthest_row_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof sees them, had nothing limited sequences to the length up to which they do not."""
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"rope_parameters": {**scaling, **factors}, "original_max_position_embeddings": 64}
    assert load_base(tiny("phi3", **changes)).max_positions == 64
    monkeypatch.setattr(load, "positions_of", lambda _: 256)
    with pytest.raises(UnsupportedModel, match="treats a row otherwise when one at position 255"):
        load_base(tiny("phi3", **changes))


@pytest.mark.parametrize("seed", [0, 1, 12, 20])  # 12 and 20 have rows whose four scores are as good as one
def test_routers_may_choose_either_of_two_that_tie(seed: int) -> None:
    """Experts that a router tells apart by less than bfloat16 does; what they give is not alike."""
    torch.manual_seed(1000 + seed)
    model = tiny("mixtral", torch.bfloat16, seed)
    for layer in layers_of(model):
        weight = layer.mlp.gate.weight.data
        weight[1::2] = weight[::2] + 2e-4 * torch.randn_like(weight[::2])
    load_base(model)


def test_a_choice_that_differs_shows_unless_it_ties() -> None:
    scores = torch.tensor([[0.0, 1.0, 1.001, 9.0], [0.0, 5.0, 1.0, 9.0], [0.0, 1.0, 1.001, 9.0]])
    noted = torch.tensor([[3, 1], [3, 2], [2, 3]])
    with TiesAsBefore([noted], 0.01):
        values, indices = scores.topk(2, dim=-1)
    assert indices.tolist() == [[3, 1], [3, 1], [3, 2]]  # a tie, none, and the same in another order
    assert values.tolist() == scores.gather(1, indices).tolist()
    with TiesAsBefore([], 0.01):  # nothing was noted
        assert scores.topk(2).indices.tolist() == [[3, 2], [3, 1], [3, 2]]


def test_choices_of_some_rows_of_each_prompt() -> None:
    one, two = torch.arange(18).view(9, 2), torch.arange(100, 112).view(6, 2)
    (joined,) = of_rows([[one], [two]], [slice(0, 8), slice(3, 6)])
    assert joined.tolist() == [*one[:8].tolist(), *two[3:].tolist()]
    assert of_rows([[one], []], [slice(0, 8), slice(3, 6)]) == []
    assert of_rows([[one], [one]], [slice(0, 8), slice(3, 6)]) == []  # no telling which dimension counts rows


class _Breaks(Exception):
    pass


@pytest.mark.parametrize(
    "when",
    {
        "in its own forward": lambda out, attention_mask=None, **_: True,
        "driven": lambda out, **_: out.shape[1] == 11,  # two prompts at once
        "behind a cache": lambda out, past_key_values=None, **_: past_key_values is not None,
        "in a graph": lambda out, **_: torch.is_grad_enabled(),
    }.values(),
    ids=["own", "driven", "behind", "graph"],
)
@pytest.mark.parametrize("error", [_Breaks("of its\nown"), AssertionError(), RuntimeError("a shape")])
def test_whatever_fails_is_a_reason_to_refuse(
    when: Callable[..., bool], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """With the error as its cause, which the log names; the sentence does not."""
    model = tiny("llama")

    def fail(out: Tensor, **kwargs: Any) -> Tensor:
        if when(out, **kwargs):
            raise error
        return out

    change(layers_of(model)[1], fail)
    with pytest.raises(
        UnsupportedModel, match=r"llama cannot be .*: transformers' code for it fails"
    ) as refused:
        prove_training(load_base(model))
    assert refused.value.__cause__ is error and "\n" not in str(refused.value)
    assert type(error).__name__ in caplog.text and type(error).__name__ not in str(refused.value)


def test_want_of_memory_is_no_fault_of_the_model() -> None:
    model = tiny("llama")

    def starve(out: Tensor, **_: Any) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")

    change(layers_of(model)[1], starve)
    with pytest.raises(ModelError, match="not enough memory for llama") as refused:
        load_base(model)
    assert not isinstance(refused.value, UnsupportedModel)


def test_folders_that_transformers_cannot_read_are_refused(tmp_path: Path) -> None:
    """Whatever it raises: here a field of the wrong kind, of which it makes a TypeError of its own."""
    tiny("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": [4]'))
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_base(tmp_path)


def hands_on(model: PreTrainedModel) -> None:
    """The second layer adds what the first one left for it, as if it were one of its arguments."""
    left: list[Tensor] = []
    change(layers_of(model)[0], lambda out, **_: left.append(out) or 2 * out)  # type: ignore[func-returns-value]
    change(layers_of(model)[1], lambda out, **_: out + 0.1 * left[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_windows_would_not_have_are_refused(dtype: torch.dtype) -> None:
    """Its answers are right: only training runs a layer without the one before it."""
    model = tiny("llama", dtype)
    hands_on(model)
    base = load_base(model)
    with pytest.raises(UnsupportedModel, match="llama cannot be trained"):
        prove_training(base)


@pytest.mark.parametrize("name", ["llama4_text", "olmo"])
def test_models_that_write_to_what_a_linear_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train with copies of it; without, the proof finds that what is kept cannot stand for it."""
    changes = {"llama4_text": {"num_local_experts": 2}, "olmo": {"clip_qkv": 0.4}}[name]
    prove_training(load_base(tiny(name, **changes)))
    monkeypatch.setattr(load, "_hand_over_copies", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="cannot be trained") as refused:
        prove_training(load_base(tiny(name, **changes)))
    assert "a view and is being modified" in str(refused.value.__cause__)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_proofs_leave_nothing_behind(name: str) -> None:
    """No weights that only training needs, and no state."""
    base = load_base(tiny(name, torch.bfloat16))
    held = base.nbytes
    prove_training(base)
    assert base.nbytes == held and base.cell.rows is None


def test_a_fingerprint_tells_weights_and_configurations_apart() -> None:
    one, again, weights, configuration = (
        load_base(model).fingerprint
        for model in (tiny("llama"), tiny("llama"), tiny("llama", seed=1), tiny("llama", rms_norm_eps=1e-5))
    )
    assert one == again and len({one, weights, configuration}) == 3


def test_what_went_through_the_tail_is_held_by_nobody() -> None:
    base = load_base(tiny("llama"))
    hidden = torch.zeros(1, 3, base.hidden_size)
    there = weakref.ref(hidden)
    assert base.tail(hidden).shape == (3, base.vocabulary)
    del hidden
    gc.collect()
    assert there() is None
