"""Kernels of recurrent layers against transformers' own functions and their plain twins, on fresh random
inputs: one row and many, odd sizes, strided inputs, states at scattered places."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_selective_state_update,
)
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from compiled import each_type, in_type, numbers  # noqa: F401  # a fixture
from coserve.kernels import recurrent as plain
from coserve.kernels.native import recurrent
from coserve.kernels.recurrent import StatePlaces

DRAWS = random.Random()
# Of results, relative to the largest: bfloat16 keeps 8 bits of each of some factors; sums are in float32.
NEAR = {torch.bfloat16: 3e-2, torch.float32: 2e-5}
LEAST = {torch.bfloat16: 3e-2, torch.float32: 1e-6}  # beside it: terms are of size 1, and may cancel
TRIES = 8


@pytest.fixture(autouse=True)
def _without_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return in_type(torch.randn(shape) * scale)


def strided(*shape: int) -> Tensor:
    """Rows with other numbers between them."""
    return drawn(shape[0], 2, *shape[1:])[:, 1]


def placed(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> StatePlaces:
    order = torch.randperm(2 * rows + 3)
    return StatePlaces(torch.randn(2 * rows + 3, *shape).to(dtype), order[:rows], order[rows : 2 * rows])


def assert_near(got: Tensor, want: Tensor, near: float, least: float = 1e-30) -> None:
    assert got.shape == want.shape and torch.isfinite(got).all()
    assert float((got.double() - want).abs().max()) <= near * float(want.double().abs().max()) + least


def check(
    places: StatePlaces,
    own: Callable[[Tensor], tuple[Tensor, Tensor]],
    kernel: Callable[[StatePlaces], Tensor],
    twin: Callable[[StatePlaces], Tensor],
) -> None:
    """The output and states of transformers' own function of states [n, ...], of the kernel, and of its twin
    in float64; other places are as they were."""
    near, before = NEAR[numbers.dtype], places.held.clone()
    want, states = own(places.read())
    exact = StatePlaces(places.held.double(), places.before, places.after)
    rounded = near if numbers.dtype == torch.bfloat16 else 0.0  # of the sum's terms, which are of size 1
    for run, where in ((kernel, places), (twin, exact)):
        assert_near(run(where), want, near, rounded + 1e-30)
        assert_near(where.held[where.after], states, near)
    others = torch.ones(len(before), dtype=torch.bool)
    others[places.after] = False
    assert torch.equal(places.held[others], before[others])
    assert_near(places.held[places.after], exact.held[places.after], near)


def check_convolution(with_silu: bool) -> None:
    rows, channels, width = (
        DRAWS.choice([1, 2, 17]),
        DRAWS.choice([1, 7, 64, 1001]),
        DRAWS.choice([2, 3, 4]),
    )
    places, x, weight = (
        placed(rows, channels, width, dtype=numbers.dtype),
        strided(rows, channels),
        drawn(channels, width),
    )
    bias = DRAWS.choice([None, drawn(channels)])
    assert recurrent.takes_conv(x, weight, bias, places)

    def own(states: Tensor) -> tuple[Tensor, Tensor]:
        y = causal_conv1d_update(x[..., None], states, weight, bias, "silu" if with_silu else None)
        return y[..., 0], states

    def twin(where: StatePlaces) -> Tensor:
        exact = None if bias is None else bias.double()
        return plain.conv_update(x.double(), weight.double(), exact, with_silu, where)

    check(places, own, lambda where: recurrent.conv_update(x, weight, bias, with_silu, where), twin)


@pytest.mark.parametrize("with_silu", [False, True])
def test_a_step_of_a_convolution(with_silu: bool) -> None:
    for _ in range(TRIES):
        check_convolution(with_silu)


def check_delta_rule(is_normed: bool) -> None:
    rows, groups, share = DRAWS.choice([1, 2, 17]), DRAWS.choice([1, 3]), DRAWS.choice([1, 2])
    keys, values = DRAWS.choice([1, 5, 16, 64]), DRAWS.choice([1, 7, 32, 64])
    size = 1.0 if is_normed else keys**-0.5
    q, k, v = (
        strided(rows, groups, keys) * size,
        strided(rows, groups, keys) * size,
        strided(rows, groups * share, values),
    )
    decay, beta = -torch.rand(rows, groups * share), drawn(rows, groups * share).sigmoid()
    places, row = placed(rows, groups * share, keys, values), (q, k, v, decay, beta)
    assert recurrent.takes_delta(*row, places)

    def own(states: Tensor) -> tuple[Tensor, Tensor]:
        y, after = torch_recurrent_gated_delta_rule(
            *(x[:, None] for x in (q, k, v)),
            g=decay[:, None],
            beta=beta[:, None],
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=is_normed,
        )
        return y[:, 0], after

    check(
        places,
        own,
        lambda where: recurrent.delta_update(*row, is_normed, where),
        lambda where: plain.delta_update(*(x.double() for x in row), is_normed, where),
    )


@pytest.mark.parametrize("is_normed", [False, True])
def test_a_step_of_the_gated_delta_rule(is_normed: bool) -> None:
    for _ in range(TRIES):
        check_delta_rule(is_normed)


def check_recurrence(is_second: bool, is_gated: bool) -> None:
    rows, groups, states = (
        DRAWS.choice([1, 2, 17]),
        1 + is_second * DRAWS.choice([0, 1]),
        DRAWS.choice([1, 8, 33]),
    )
    heads, width = groups * DRAWS.choice([1, 3, 20]), is_second * DRAWS.choice([2, 7, 16]) or 1
    x, b, c = strided(rows, heads, width), strided(rows, groups, states), strided(rows, groups, states)
    z = strided(rows, heads, width) if is_gated else None
    raw, bias, d = drawn(rows, heads), drawn(heads), drawn(heads)
    a = -torch.rand(heads, 1 if is_second else states).expand(heads, states)
    places = placed(rows, heads, width, states)
    step = F.softplus(raw + bias).float()
    assert recurrent.takes_selective(x, step, a, b, c, z, places)

    def own(before: Tensor) -> tuple[Tensor, Tensor]:
        if is_second:
            whole = raw[..., None].expand(-1, -1, width), a[:, None].expand(-1, width, -1)
            ends = (one[:, None].expand(-1, width) for one in (d, bias))
            y = mamba2_selective_state_update(before, x, *whole, b, c, next(ends), next(ends), True, z=z)
            return y, before
        one = before[:, :, 0]
        gate = None if z is None else z[..., 0]
        y = mamba_selective_state_update(one, x[..., 0], raw, a, b[:, 0], c[:, 0], d, bias, True, z=gate)
        return y[..., None], one[:, :, None]

    def twin(where: StatePlaces) -> Tensor:
        exact = None if z is None else z.double()
        return plain.selective_update(
            x.double(), step.double(), a.double(), b.double(), c.double(), d.double(), exact, where
        )

    check(places, own, lambda where: recurrent.selective_update(x, step, a, b, c, d.float(), z, where), twin)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_step_of_mambas_recurrence(is_second: bool, is_gated: bool) -> None:
    """Mamba 1 has a decay for each state, of channels by themselves; Mamba 2 one for a head."""
    for _ in range(TRIES):
        check_recurrence(is_second, is_gated)


@pytest.mark.parametrize("is_gated_first", [False, True])
def test_a_norm_with_a_gate_is_the_models_own(is_gated_first: bool) -> None:
    for _ in range(TRIES):
        rows, groups, size = (
            DRAWS.choice([1, 2, 70]),
            1 + is_gated_first * DRAWS.choice([0, 2]),
            DRAWS.choice([1, 7, 64]),
        )
        width = groups * size
        own = BambaRMSNormGated(width, size, 1e-5) if is_gated_first else Qwen3_5RMSNormGated(width, 1e-5)
        own.weight.copy_(torch.randn(width))
        own.to(numbers.dtype)
        x, gate = (
            drawn(1, rows, width, scale=DRAWS.choice([1e-2, 1.0, 30.0])),
            drawn(1, rows, width + 3)[..., :width],
        )
        found = recurrent.rms_norm_gated(x, gate, own.weight, groups, 1e-5, is_gated_first)
        torch.testing.assert_close(found, own(x, gate), rtol=NEAR[numbers.dtype], atol=1e-6)


def test_rows_do_not_depend_on_their_neighbours_or_on_threads() -> None:
    rows, heads, keys = 40, 4, 32
    q, k, v = (drawn(rows, heads, keys) for _ in range(3))
    decay, beta, places = (
        -torch.rand(rows, heads),
        drawn(rows, heads).sigmoid(),
        placed(rows, heads, keys, keys),
    )
    whole = recurrent.delta_update(q, k, v, decay, beta, True, places)
    states = places.held.clone()
    for row in range(rows):
        one = slice(row, row + 1)
        alone = StatePlaces(places.held, places.before[one], places.after[one])
        own = recurrent.delta_update(q[one], k[one], v[one], decay[one], beta[one], True, alone)
        assert torch.equal(own, whole[one])
    assert torch.equal(places.held, states)


def drawn_rows(is_normed: bool) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, log decay and beta of several rows, and a state before them or none."""
    batch, length, key_heads = DRAWS.choice([1, 3]), DRAWS.choice([1, 2, 17, 32, 70]), DRAWS.choice([1, 2])
    heads, keys, values = key_heads * DRAWS.choice([1, 2]), DRAWS.choice([4, 20, 64]), DRAWS.choice([16, 48])
    q, k = (drawn(batch, length, key_heads, keys) for _ in range(2))
    if not is_normed:  # or states grow
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay, beta = -torch.rand(batch, length, heads) * 3, drawn(batch, length, heads).sigmoid()
    state = torch.randn(batch, heads, keys, values) if DRAWS.random() < 0.5 else None
    return [q, k, drawn(batch, length, heads, values), decay, beta], state


def results(rule: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], seed: int) -> list[Tensor]:
    """Outputs, states behind, and all gradients, of the rule of `given`."""
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        outputs = rule(*leaves)
        torch.manual_seed(seed)
        gradients = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


@pytest.mark.parametrize("is_normed", [False, True])
def test_rows_of_the_gated_delta_rule_and_their_gradients(is_normed: bool) -> None:
    near = NEAR[numbers.dtype]
    for seed in range(TRIES):
        rows, state = drawn_rows(is_normed)
        assert recurrent.takes_rows(*rows, state)
        given = rows if state is None else [*rows, state]

        def own(*x: Tensor) -> tuple[Tensor, Tensor]:
            y, after = torch_chunk_gated_delta_rule(
                *x[:5], initial_state=x[5] if len(x) > 5 else None, output_final_state=True,
                use_qk_l2norm_in_kernel=is_normed,
            )  # fmt: skip
            return y, after

        twin, kernel = (
            lambda *x, rule=rule: rule(*x[:5], is_normed, *x[5:])
            for rule in (plain.delta_rows, recurrent.delta_rows)
        )
        exact = results(twin, [x.double() for x in given], seed)
        for found in (results(kernel, given, seed), results(own, given, seed)):
            for got, want in zip(found, exact, strict=True):
                assert_near(got, want, near, LEAST[numbers.dtype])


def test_kimis_rows_decay_by_key() -> None:
    """Several rows with gradients, and one row of each sequence."""
    near = NEAR[numbers.dtype]
    for seed in range(TRIES):
        (q, k, v, _, beta), state = drawn_rows(True)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        rows = [q, k, v, -torch.rand(*v.shape[:3], k.shape[-1]) * 3, beta]
        given = rows if state is None else [*rows, state]
        assert recurrent.takes_rows(*rows, state)

        def own(*x: Tensor) -> tuple[Tensor, Tensor]:
            y, after = chunk_kimi_delta_attention(
                *x[:5], initial_state=x[5] if len(x) > 5 else None, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return y, after

        twin, kernel = (
            lambda *x, rule=rule: rule(*x[:5], True, *x[5:])
            for rule in (plain.delta_rows, recurrent.delta_rows)
        )
        exact = results(twin, [x.double() for x in given], seed)
        for found in (results(kernel, given, seed), results(own, given, seed)):
            for got, want in zip(found, exact, strict=True):
                assert_near(got, want, near, LEAST[numbers.dtype])
        places = placed(len(v), *v.shape[2:3], k.shape[-1], v.shape[-1])
        one = [x[:, 0] for x in rows]
        assert recurrent.takes_delta(*one, places)
        wanted = StatePlaces(places.held.double(), places.before, places.after)
        found, want = (
            recurrent.delta_update(*one, True, places),
            plain.delta_update(*(x.double() for x in one), True, wanted),
        )
        assert_near(found, want, near)
        assert_near(places.held, wanted.held, near)


def test_rows_do_not_depend_on_where_they_are_cut() -> None:
    for _ in range(TRIES):
        rows, state = drawn_rows(True)
        whole, after = recurrent.delta_rows(*rows, True, state)
        cut = DRAWS.randint(1, whole.shape[1])
        first, between = recurrent.delta_rows(*(x[:, :cut] for x in rows), True, state)
        if cut < whole.shape[1]:
            second, between = recurrent.delta_rows(*(x[:, cut:] for x in rows), True, between)
            first = torch.cat((first, second), 1)
        assert torch.equal(first, whole) and torch.equal(between, after)


def test_rows_of_mamba_2_and_their_gradients() -> None:
    near = NEAR[numbers.dtype]
    for seed in range(TRIES):
        (c, b, x, _, dt), state = drawn_rows(False)
        held = None if state is None else state.transpose(2, 3)
        given = [x, dt, -torch.rand(x.shape[2]) * 3, b, c, *([] if held is None else [held])]

        def own(*x: Tensor) -> tuple[Tensor, Tensor]:
            before = x[5] if len(x) > 5 else None
            y, after = mamba2_chunk_scan(*x[:5], 16, initial_states=before, return_final_states=True)
            return y.to(numbers.dtype), after

        exact = results(plain.selective_rows, [one.double() for one in given], seed)
        for found in (results(recurrent.selective_rows, given, seed), results(own, given, seed)):
            for got, want in zip(found, exact, strict=True):
                assert_near(got, want, near, LEAST[numbers.dtype])


def test_rows_of_mamba_1_and_their_gradients() -> None:
    """Odd numbers of channels and of states; wherever rows are cut. Gradients of B and C are sums over
    channels, which threads share."""
    near = NEAR[numbers.dtype]
    for seed in range(TRIES):
        batch, length = DRAWS.choice([1, 3]), DRAWS.choice([1, 2, 17, 33])
        channels, states = DRAWS.choice([1, 16, 50]), DRAWS.choice([1, 8, 16])
        x, b, c = (drawn(batch, length, size) for size in (channels, states, states))
        dt, a = torch.rand(batch, length, channels), -torch.rand(channels, states) * 3
        state = torch.randn(batch, channels, states) if DRAWS.random() < 0.5 else None
        given = [x, dt, b, c, *([] if state is None else [state])]
        assert recurrent.takes_scan(x, dt, a, b, c, state)

        def run(
            rule: Callable[..., tuple[Tensor, Tensor]], *of: Tensor, a: Tensor = a
        ) -> tuple[Tensor, Tensor]:
            return rule(*of[:2], a.to(of[1].dtype), *of[2:])

        exact = results(partial(run, plain.scan_rows), [one.double() for one in given], seed)
        for got, want in zip(results(partial(run, recurrent.scan_rows), given, seed), exact, strict=True):
            assert_near(got, want, near, LEAST[numbers.dtype])
        whole, after = recurrent.scan_rows(x, dt, a, b, c, state)
        cut = DRAWS.randint(1, length)
        first, between = recurrent.scan_rows(
            *(one[:, :cut] for one in (x, dt)), a, b[:, :cut], c[:, :cut], state
        )
        assert torch.equal(first, whole[:, :cut])
        if cut < length:
            rest = (one[:, cut:] for one in (x, dt))
            second, between = recurrent.scan_rows(*rest, a, b[:, cut:], c[:, cut:], between)
            assert torch.equal(second, whole[:, cut:])
        assert torch.equal(between, after)


def check_rows_of_a_convolution(with_silu: bool, seed: int) -> None:
    batch, channels, rows = DRAWS.choice([1, 3]), DRAWS.choice([1, 7, 64, 300]), DRAWS.choice([1, 2, 3, 21])
    weight = drawn(channels, DRAWS.choice([2, 4, 8]))
    bias = DRAWS.choice([None, drawn(channels)])
    x = DRAWS.choice([drawn(batch, rows + 1, channels)[:, 1:].mT, drawn(batch, channels, rows)])
    assert recurrent.takes_conv_rows(x, weight, bias)

    def kernel(x: Tensor) -> tuple[Tensor]:
        return (recurrent.conv_rows(x, weight, bias, with_silu),)

    def own(x: Tensor) -> tuple[Tensor]:
        return (causal_conv1d_fn(x, weight, bias, "silu" if with_silu else None),)

    def twin(x: Tensor) -> tuple[Tensor]:
        return (plain.conv_rows(x, weight.double(), None if bias is None else bias.double(), with_silu),)

    exact = results(twin, [x.double()], seed)
    for found in (results(kernel, [x], seed), results(own, [x], seed)):
        for got, want in zip(found, exact, strict=True):
            assert_near(got, want, NEAR[numbers.dtype], 1e-3)  # one number may be next to nothing
    cut = DRAWS.randint(1, rows)
    assert torch.equal(kernel(x[..., :cut])[0], kernel(x)[0][..., :cut])


@pytest.mark.parametrize("with_silu", [False, True])
def test_rows_of_a_convolution_and_their_gradients(with_silu: bool) -> None:
    """Channels lie side by side, or rows do; rows are as those of a sequence that ends there."""
    for seed in range(TRIES):
        check_rows_of_a_convolution(with_silu, seed)


def check_gradients_of_a_norm(is_gated_first: bool, seed: int) -> None:
    rows, groups, size = DRAWS.choice([1, 2, 70]), 1 + is_gated_first * 2, DRAWS.choice([1, 7, 64])
    width = groups * size
    x, gate = drawn(1, rows, width), drawn(1, rows, width + 3)[..., :-3]
    module = BambaRMSNormGated(width, size, 1e-5) if is_gated_first else Qwen3_5RMSNormGated(width, 1e-5)
    module.weight.copy_(torch.randn(width))
    weight = module.to(numbers.dtype).requires_grad_(False).weight
    assert recurrent.takes_gated(x, gate, weight)

    def kernel(x: Tensor, gate: Tensor) -> tuple[Tensor]:
        return (recurrent.rms_norm_gated(x, gate, weight, groups, 1e-5, is_gated_first),)

    def own(x: Tensor, gate: Tensor) -> tuple[Tensor]:
        return (module(x, gate),)

    def twin(x: Tensor, gate: Tensor) -> tuple[Tensor]:
        v = (x * F.silu(gate) if is_gated_first else x).unflatten(-1, (groups, size))
        normed = (v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(2) * weight.double()
        return (normed if is_gated_first else normed * F.silu(gate),)

    exact = results(twin, [x.double(), gate.double()], seed)
    for found in (results(kernel, [x, gate], seed), results(own, [x, gate], seed)):
        for got, want in zip(found, exact, strict=True):
            assert_near(got, want, NEAR[numbers.dtype], 1e-3)  # of one number nearly no gradient is left


@pytest.mark.parametrize("is_gated_first", [False, True])
def test_gradients_of_a_norm_with_a_gate(is_gated_first: bool) -> None:
    for seed in range(TRIES):
        check_gradients_of_a_norm(is_gated_first, seed)
