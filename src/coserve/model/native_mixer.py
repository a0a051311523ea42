"""Recurrent mixers by the kernels of a CPU, or by Triton's on a GPU.

A mixer's code calls functions of its module for one row of each sequence: a step of a causal convolution, of
the gated delta rule or of Mamba's recurrence. It gets a copy of its own code in which these names are other
functions. These compute as their own, unless they are given `StatePlaces` instead of states, which they read
and write where they lie. On a CPU convolutions, the gated delta rule and Mamba's recurrences of several rows
are kernels, too, with gradients. Mamba 1's function for several rows begins with an empty state, whatever its
mixer has asked the cache for; here it begins with that one (`asked`). An experiment tells whether the mixer
gives the same outputs and states then.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from inspect import unwrap
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.kernels import recurrent as plain
from coserve.kernels.native import recurrent
from coserve.kernels.recurrent import StatePlaces
from coserve.kernels.triton import is_installed

# Relative difference of the experiment's results.
_NEAR: Final = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5}

Function = Callable[..., Any]


class AskedState(threading.local):
    """The recurrent state that the mixer under way on this thread has asked its cache for."""

    state: Any = None


asked: Final = AskedState()
# Of a mixer: its output and states, from states before.
Run = Callable[[Mapping[Any, Any]], tuple[Tensor, Mapping[Any, Tensor]]]


def _row_kernels(like: Tensor) -> ModuleType:
    """The kernels of a device for one row of each sequence, by the plain twins' names."""
    is_on_gpu = like.is_cuda and is_installed()
    return import_module("coserve.kernels.triton.recurrent") if is_on_gpu else recurrent


def has_row_kernels(x: Tensor) -> bool:
    """Tells whether a device has kernels for one row of each sequence, of this type, without a graph."""
    found: bool = _row_kernels(x).takes(x)
    return found


def _convolve(
    own: Function,
    hidden_states: Tensor,
    conv_state: Tensor | StatePlaces,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    if not isinstance(conv_state, StatePlaces):
        y: Tensor = own(hidden_states, conv_state, weight, bias, activation)
        return y
    x, kernels = hidden_states[..., 0], _row_kernels(hidden_states)
    if activation in (None, "silu") and kernels.takes_conv(x, weight, bias, conv_state):
        y = kernels.conv_update(x, weight, bias, activation is not None, conv_state)
        return y[..., None]
    states = conv_state.read()
    y = own(hidden_states, states, weight, bias, activation)  # writes in place
    conv_state.write(states)
    return y


def _convolve_rows(
    own: Function,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    is_plain = activation in (None, "silu") and all(value is None for value in kwargs.values())
    if is_plain and recurrent.takes_conv_rows(hidden_states, weight, bias):
        return recurrent.conv_rows(hidden_states, weight, bias, activation is not None)
    y: Tensor = own(hidden_states, weight, bias, activation, **kwargs)
    return y


def _learn(
    own: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | StatePlaces | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    given = partial(own, query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if not isinstance(initial_state, StatePlaces):
        found: tuple[Tensor, Any] = given(initial_state=initial_state, **kwargs)
        return found
    row = query[:, 0], key[:, 0], value[:, 0], g[:, 0].float(), beta[:, 0]
    kernels = _row_kernels(query)
    if kernels.takes_delta(*row, initial_state):
        return kernels.delta_update(*row, use_qk_l2norm_in_kernel, initial_state)[:, None], initial_state
    y, states = given(initial_state=initial_state.read(), **kwargs)
    initial_state.write(states)
    return y, initial_state


def _learn_rows(
    own: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As their own function for several rows computes with chunks of them, whatever their size."""
    rows = query, key, value, g.float(), beta
    if recurrent.takes_rows(*rows, initial_state):
        y, after = recurrent.delta_rows(*rows, use_qk_l2norm_in_kernel, initial_state)
        return y, after if output_final_state else None
    found: tuple[Tensor, Tensor | None] = own(
        query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
    )  # fmt: skip
    return found


def _select(
    own: Function,
    state: Tensor | StatePlaces,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba 2 has heads of several channels, whose time steps and decays are expanded to its channels and
    states; Mamba 1 has channels alone."""
    given = partial(own, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)
    if not isinstance(state, StatePlaces):
        y: Tensor = given(state, hidden_states, dt, A, B, C)
        return y
    if hidden_states.ndim == 2:
        x, one_z = hidden_states[..., None], None if z is None else z[..., None]
        places, step, decay, b, c = state._replace(held=state.held[:, :, None]), dt, A, B[:, None], C[:, None]
        ends, bias = D, dt_bias
    else:
        x, one_z, places, b, c = hidden_states, z, state, B, C
        step, decay, ends, bias = dt[..., 0], A[:, 0], _first(D), _first(dt_bias)
    if bias is not None:
        step = step + bias.to(step.dtype)
    step = (nn.functional.softplus(step) if dt_softplus else step).float()
    kernels = _row_kernels(x)
    if _is_expanded(x, dt, A, D, dt_bias) and kernels.takes_selective(x, step, decay, b, c, one_z, places):
        ends = None if ends is None else ends.float().contiguous()
        y = kernels.selective_update(x, step, decay, b, c, ends, one_z, places)
        return y.view_as(hidden_states)
    states = state.read()
    y = given(states, hidden_states, dt, A, B, C)  # writes in place
    state.write(states)
    return y


def _select_rows(
    own: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """As their own function for several rows computes with chunks of them."""
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (nn.functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    if not recurrent.takes_rows(C, B, hidden_states, A.float(), step, initial_states):
        return own(
            hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
            dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, **kwargs,
        )  # fmt: skip
    y, after = recurrent.selective_rows(hidden_states, step, A, B, C, initial_states)
    out = y.float() if D is None else y.float() + D[:, None] * hidden_states.float()
    return (out, after) if return_final_states else out


def _scan_rows(
    own: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Mamba 1's: x and dt [batch, channels, rows], B and C [batch, states, rows]."""
    state = asked.state
    if state is not None and state.shape != (len(hidden_states), *A.shape):
        raise TypeError("the state is one of several heads")
    step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    step = (nn.functional.softplus(step) if delta_softplus else step).float()
    rows = hidden_states.mT, step.mT, A, B.mT, C.mT
    rule = recurrent.scan_rows if recurrent.takes_scan(*rows, state) else plain.scan_rows
    y, after = rule(*rows, state)
    out = y.mT.to(hidden_states.dtype)
    out = out if D is None else out + hidden_states * D[:, None]
    out = out if z is None else out * nn.functional.silu(z)
    return (out, after) if return_last_state else out


def _first(x: Tensor | None) -> Tensor | None:
    """The number of each head's first channel."""
    return None if x is None else x[..., 0]


def _is_expanded(x: Tensor, dt: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None) -> bool:
    """Tells whether all channels of a head have the same time step, decay, D and bias."""
    if x.shape[2] == 1 or dt.ndim == 2:
        return True
    own = (one.stride(-1) == 0 for one in (dt, D, dt_bias) if one is not None)
    return all(own) and A.stride(1) == 0


_UPDATES: Final[Mapping[str, Function]] = {
    "causal_conv1d_update": _convolve,
    "causal_conv1d_fn": _convolve_rows,
    "torch_recurrent_gated_delta_rule": _learn,
    "torch_chunk_gated_delta_rule": _learn_rows,
    "recurrent_kimi_delta_attention": _learn,
    "chunk_kimi_delta_attention": _learn_rows,
    "mamba_selective_state_update": _select,
    "mamba2_selective_state_update": _select,
    "mamba2_chunk_scan": _select_rows,
    "mamba_selective_scan": _scan_rows,
}


@cache
def _with_updates(own: FunctionType) -> FunctionType | None:
    """A copy of a mixer's forward that calls these functions; None for one that calls none of them."""
    called = [name for name in own.__code__.co_names if name in _UPDATES and name in own.__globals__]
    if not called:
        return None
    names = own.__globals__ | {name: partial(_UPDATES[name], own.__globals__[name]) for name in called}
    copied = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copied.__kwdefaults__ = own.__kwdefaults__
    return copied


@torch.no_grad()
def updates_places(
    module: nn.Module,
    run: Run,
    run_several: Run,
    states: Mapping[Any, Tensor],
    run_exactly: Run,
) -> bool:
    """Gives a mixer the copy of its code, and tells whether it updates states where they lie: `run` gives its
    output for a row of each of two sequences, and their states, from given ones, `run_several` for several
    rows of one, and `run_exactly` does so with its own code. `states` are possible, of one."""
    own = unwrap(type(module).forward)
    if not isinstance(own, FunctionType) or "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
        return False
    like = next(module.parameters())
    if not has_row_kernels(like) or like.dtype not in _NEAR or (copied := _with_updates(own)) is None:
        return False
    both = {key: torch.cat((state, -0.5 * state)) for key, state in states.items()}
    wanted, after = run({key: state.clone() for key, state in both.items()})
    rows, left = run_exactly(states)
    before, behind = (torch.tensor(own, device=like.device) for own in ([3, 0], [2, 5]))
    places = {
        key: StatePlaces(state.new_zeros(6, *state.shape[1:]).index_copy_(0, before, state), before, behind)
        for key, state in both.items()
    }
    module.forward = MethodType(copied, module)
    try:
        found, _ = run(places)
        own_rows, own_left = run_several(states)
    except Exception:  # other functions have these states, or a GPU's compiler refuses a kernel
        del module.__dict__["forward"]
        return False
    near = _NEAR[like.dtype]
    pairs = [(found, wanted), *((places[key].held[behind], state) for key, state in after.items())]
    pairs += [(own_rows, rows), *((own_left[key], state) for key, state in left.items())]
    if all(float((one - two).norm()) <= near * float(two.norm()) for one, two in pairs):
        return True
    del module.__dict__["forward"]
    return False
