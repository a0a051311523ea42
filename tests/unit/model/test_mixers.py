"""Recurrent mixers of a base: found by what they do with a cache, with the linears around them; and that
cache against transformers' own."""

import random
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from coserve.kernels.native.build import library
from coserve.model.linear import frozen
from coserve.model.load import load_base
from coserve.model.native_mixer import updates_places
from coserve.model.recurrent import Mixer, MixerRun, WindowCache
from coserve_benchmarks.models import shrunk
from models import tiny
from recurrent import SHAPES, build


def mixers_of(name: str) -> list[Mixer]:
    base = load_base(build(name))
    assert all(isinstance(mixer, Mixer) for mixer in base.mixers)
    return list(base.mixers)  # type: ignore[arg-type]


def names(mixer: Mixer) -> list[tuple[str, float]]:
    return [(flat.path.rpartition(".")[2], flat.factor) for flat in mixer.anatomy.flat]


def test_mixers_are_found_with_the_linears_around_them() -> None:
    first, second = mixers_of("qwen3_next")
    assert (first.layer, second.layer) == (0, 2) and (first.number, second.number) == (0, 1)
    assert names(first) == [("in_proj_qkvz", 1.0), ("in_proj_ba", 1.0)]
    assert first.anatomy.last == "model.layers.0.linear_attn.out_proj"
    assert [(shape.shape, shape.dtype) for shape in first.shapes] == [
        ((96, 4), torch.float32),
        ((4, 8, 16), torch.float32),
    ]
    multiplied, *_ = mixers_of("falcon_h1")
    assert names(multiplied) == [("in_proj", 1.25)]
    convolution, *_ = mixers_of("lfm2")
    assert [shape.shape for shape in convolution.shapes] == [(48, 3)]
    assert not load_base(tiny("llama")).mixers


def test_one_that_forgets_its_state_goes_by_rows() -> None:
    """Mamba 1's code for several rows begins with an empty state, but for kernels; and it reads a linear's
    weight instead of calling it."""
    one, _ = mixers_of("mamba")
    two, _ = mixers_of("mamba2")
    exact, *_ = load_base(build("mamba", torch.float64)).mixers
    assert isinstance(exact, Mixer) and exact.anatomy.by_rows and not two.anatomy.by_rows
    assert one.anatomy.by_rows is (library(torch.float32) is None)
    assert names(one) == [("in_proj", 1.0)]
    if library(torch.float32) is not None:
        assert all(mixers_of(name)[0].anatomy.in_place for name in SHAPES)
    base = load_base(build("mamba"))
    inside = [path for path in base.linears if path.endswith(("x_proj", "dt_proj"))]
    assert len(inside) == 4 and not set(inside) & set(base.sites)


@torch.no_grad()
def test_a_row_that_trains_after_a_state_is_as_among_several() -> None:
    """Nemotron H has a least time step for several rows and none for one, so a decoded row is another."""
    fields = {"layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2, "time_step_min": 0.05}
    model = shrunk.build("nemotron_h", **fields)
    model.model.layers[0].mixer.dt_bias.sub_(12.0)
    base = load_base(model)
    (mixer,) = base.mixers
    assert isinstance(mixer, Mixer)
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    paths = [flat.path for flat in mixer.anatomy.flat]
    run = MixerRun(mixer, hidden, {p: frozen(hidden, base.linears[p].placement) for p in paths})
    whole, _ = run.run(slice(0, 6), 1, None)
    _, before = run.run(slice(0, 5), 1, None)
    kept = [state.clone() for state in before]
    trained, _ = run.run(slice(5, 6), 1, before, trains=True)
    assert torch.allclose(trained, whole[:, 5:], rtol=0, atol=1e-6 * float(whole.abs().max()))
    decoded, _ = run.run(slice(5, 6), 1, tuple(kept))
    assert float((decoded - whole[:, 5:]).abs().max()) > 1e-3 * float(whole.abs().max())


def test_a_window_cache_keeps_the_columns_that_transformers_keeps() -> None:
    draws, generator = random.Random("columns"), torch.Generator().manual_seed(0)
    for _ in range(20):
        own, size = LinearAttentionLayer(), draws.randint(2, 5)
        before: dict[tuple[str, int], torch.Tensor] = {}
        for _ in range(6):
            new = torch.randn(2, 3, draws.randint(1, 7), generator=generator)
            cache = WindowCache(before, is_recording=True)
            got = cache.update_conv_state(new, 0, conv_kernel_size=size)
            assert torch.equal(got, own.update_conv_state(new, conv_kernel_size=size))
            assert torch.equal(cache.after["conv", 0], own.conv_states[0])
            assert cache.is_asked and cache.has_previous_state() is bool(before)
            before = dict(cache.after)


@torch.no_grad()
def test_kimis_mixer_goes_by_kernels() -> None:
    """A mixer that makes sure in its own code that the state which a function returns is in float32."""
    config = AutoConfig.for_model("kimi_linear", hidden_size=64)
    config.linear_num_heads, config.linear_head_dim = 2, 16
    module = KimiLinearDeltaAttention(config, 0).requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    hidden = torch.randn(1, 5, 64)

    def run(x: torch.Tensor, given: dict[Any, Any]) -> tuple[torch.Tensor, dict[Any, Any]]:
        cache = WindowCache(given, x.shape[1] > 1)
        out = module(x, cache_params=cache)
        return (out[0] if isinstance(out, tuple) else out), {**given, **cache.after}

    _, states = run(hidden, {})
    several = partial(run, hidden)
    places = updates_places(module, partial(run, hidden[:, :2].transpose(0, 1)), several, states, several)
    assert places is (library(torch.float32) is not None)
