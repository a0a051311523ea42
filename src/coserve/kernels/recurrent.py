"""State updates of recurrent layers for one row of each of some sequences, and for several rows of each: the
plain twins of `native/recurrent.py`, in any type of numbers."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class StatePlaces(NamedTuple):
    """States of n sequences among those that lie in `held` [places, ...]: at `before` [n] those to read, at
    `after` [n], all of them other places, those to write. int64."""

    held: Tensor
    before: Tensor
    after: Tensor

    def read(self) -> Tensor:
        """Copies of the states [n, ...]."""
        return self.held.index_select(0, self.before)

    def to(self, dtype: torch.dtype) -> "StatePlaces":
        """Itself: Kimi's mixer has the state that a function returns in float32, which these are."""
        return self

    def write(self, states: Tensor) -> None:
        """Writes the states [n, ...] after the row."""
        self.held.index_copy_(0, self.after, states.to(self.held.dtype))


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool, places: StatePlaces
) -> Tensor:
    """A causal convolution of each channel by itself, of x [n, channels]; its states are the last columns
    [channels, width]. weight [channels, width], bias [channels]. Returns [n, channels]."""
    columns = torch.cat((places.read()[..., 1:], x[..., None].to(places.held.dtype)), -1)
    places.write(columns)
    y = (columns * weight).sum(-1)
    y = y if bias is None else y + bias
    return F.silu(y) if with_silu else y


def conv_rows(x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool) -> Tensor:
    """The convolution of `rows` rows of n sequences, x [n, channels, rows], before which there are zeros;
    weight and bias as those of `conv_update`. Returns [n, channels, rows]. Has gradients."""
    columns = F.pad(x, (weight.shape[1] - 1, 0)).unfold(-1, weight.shape[1], 1)
    y = (columns * weight[:, None]).sum(-1)
    y = y if bias is None else y + bias[:, None]
    return F.silu(y) if with_silu else y


def delta_update(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, is_normed: bool, places: StatePlaces
) -> Tensor:
    """The gated delta rule: q and k [n, key heads, keys], v [n, heads, values], log_decay and beta [n,
    heads]; states [heads, keys, values]. Kimi's has a decay for each key, [n, heads, keys]. q and k have
    length 1 where `is_normed`. Returns [n, heads, values]."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1).to(places.held.dtype) for x in (q, k))
    if is_normed:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    decay = (log_decay if log_decay.ndim == 3 else log_decay[..., None]).exp()
    state = places.read() * decay[..., None]
    learned = (v - torch.einsum("nhk,nhkv->nhv", k, state)) * beta[..., None]
    state = state + k[..., None] * learned[..., None, :]
    places.write(state)
    y: Tensor = torch.einsum("nhk,nhkv->nhv", q, state) * q.shape[-1] ** -0.5
    return y.to(v.dtype)


def delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    is_normed: bool,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of `rows` rows of n sequences, one after the other: arguments as those of
    `delta_update`, each [n, rows, ...], and the states [n, heads, keys, values] before, or zeros. Returns [n,
    rows, heads, values], and the states after. Has gradients."""
    (count, length, heads, values), keys = v.shape, k.shape[-1]
    held = log_decay.new_zeros(count, heads, keys, values) if state is None else state
    here, there = torch.arange(count), torch.arange(count, 2 * count)
    outputs = []
    for row in range(length):
        places = StatePlaces(torch.cat((held, torch.zeros_like(held))), here, there)
        own = log_decay[:, row], beta[:, row], is_normed, places
        outputs.append(delta_update(q[:, row], k[:, row], v[:, row], *own))
        held = places.held[count:]
    return torch.stack(outputs, 1), held


def selective_update(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    places: StatePlaces,
) -> Tensor:
    """Mamba's recurrence: x [n, heads, width], time steps dt [n, heads], a [heads, states], b and c [n,
    groups, states], d [heads], the gate z [n, heads, width]; states [heads, width, states]. Mamba 1 has a
    head for each channel, of width 1. Returns [n, heads, width]."""
    b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1).to(places.held.dtype) for y in (b, c))
    decay = (dt[..., None] * a).exp()[:, :, None]
    state = places.read() * decay + (dt[..., None] * x)[..., None] * b[:, :, None]
    places.write(state)
    y = torch.einsum("nhps,nhs->nhp", state, c)
    y = y if d is None else y + x * d[:, None]
    return (y if z is None else y * F.silu(z)).to(x.dtype)


def selective_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mamba 2's recurrence of `rows` rows of n sequences, one after the other: x [n, rows, heads, width], dt
    [n, rows, heads], a [heads], b and c [n, rows, groups, states], and the states [n, heads, width, states]
    before, or zeros. Returns [n, rows, heads, width], and the states after. Has gradients."""
    (count, length, heads, width), states = x.shape, b.shape[-1]
    held = x.new_zeros(count, heads, width, states) if state is None else state
    here, there = torch.arange(count), torch.arange(count, 2 * count)
    outputs = []
    for row in range(length):
        places = StatePlaces(torch.cat((held, torch.zeros_like(held))), here, there)
        own = x[:, row], dt[:, row], a[:, None], b[:, row], c[:, row]
        outputs.append(selective_update(*own, None, None, places))
        held = places.held[count:]
    return torch.stack(outputs, 1), held


def scan_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mamba 1's recurrence of `rows` rows of n sequences, one after the other: x and time steps dt [n, rows,
    channels], a [channels, states], b and c [n, rows, states], and the states [n, channels, states] before,
    or zeros. Returns [n, rows, channels], and the states after. Has gradients, but for a."""
    held = x.new_zeros(len(x), *a.shape) if state is None else state
    outputs = []
    for row in range(x.shape[1]):
        step = dt[:, row, :, None]
        held = held * (step * a).exp() + step * x[:, row, :, None] * b[:, row, None]
        outputs.append(torch.einsum("ncs,ns->nc", held, c[:, row]))
    return torch.stack(outputs, 1), held
