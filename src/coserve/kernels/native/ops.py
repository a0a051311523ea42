"""The kernels of `kernels.c`, `attention.c` and `linear.c` on tensors in bfloat16 or float32 on a CPU,
without a graph.

Each has a plain twin in torch: the model's own norms, rotary embedding and activations, and `attend_decode`
over gathered pages. Kernels do not round what torch writes to memory between two of its operations, such as
scores.
"""

from collections.abc import Iterator
from ctypes import CDLL, c_int64
from typing import Any, Final

import torch
from torch import Tensor, nn

from coserve.kernels.native.build import NUMBERS, kernels

GRAIN: Final = 32768  # numbers: fewer are not worth a second thread
_WIDE: Final = 4  # outputs of another weight that are computed together
_LANES: Final = 32  # inputs of it that are read together
_FEW: Final = 32  # rows of it; with twice as many torch's product is as fast, unless there are tile registers
_COLUMNS: Final = 64  # of a weight that are unpacked together, and multiples of them
_CACHED: Final = 1 << 20  # bytes of them: half of a core's second cache
_TILE_PANEL: Final = 32  # outputs of a packed weight that lie together where there are
_SAME: Final = 1e-2  # relative difference of two products with the same weight; each rounds to 8 bits


def takes(*tensors: Tensor) -> bool:
    """Tells whether there are kernels for these tensors of one type, whose last dimension must be dense, and
    which have data and need no graph."""
    return not torch.is_grad_enabled() and fit(*tensors) and kernels(tensors[0].dtype) is not None


def fit(*tensors: Tensor) -> bool:
    """Tells whether kernels can read all these tensors, which must be of one type."""
    dtype = tensors[0].dtype
    return all(x.dtype is dtype and fits(x) for x in tensors)


def fits(x: Tensor) -> bool:
    """Tells whether kernels can read this tensor."""
    return (
        x.dtype in NUMBERS
        and (type(x) is Tensor or type(x) is nn.Parameter)
        and x.is_cpu  # makes no device, which would take three times as long
        and x.stride(-1) == 1
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """x [..., width] over its root mean square, times `weight` [width], or where `centred` times 1 + weight.
    Rounded before the weight is applied, unless `centred`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    loaded(x).rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps, centred,
        threads(x.numel()),
    )  # fmt: skip
    return y


def rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """The gradient for x of `rms_norm`, of that for its result."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    found, width = torch.empty_like(x), x.shape[-1]
    loaded(x).rms_norm_back(
        grad.data_ptr(), x.data_ptr(), weight.data_ptr(), found.data_ptr(), x.numel() // width, width, eps,
        centred, threads(x.numel()),
    )  # fmt: skip
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [1, heads, rows, width] by cos and sin [1, rows, width], whose second half
    rotates with the first (Llama's `apply_rotary_pos_emb`), bit for bit. Rows are outermost in memory."""
    _, heads, rows, width = x.shape
    y, cos, sin = x.new_empty(1, rows, heads, width), cos.contiguous(), sin.contiguous()
    loaded(x).rotate(
        x.data_ptr(), x.stride(2), x.stride(1), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads,
        width, threads(x.numel()),
    )  # fmt: skip
    return y.transpose(1, 2)


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient for x of `rotate`, of that for its result, [1, heads, rows, width]."""
    grad, cos, sin = grad if grad.stride(-1) == 1 else grad.contiguous(), cos.contiguous(), sin.contiguous()
    _, heads, rows, width = grad.shape
    found = grad.new_empty(1, rows, heads, width)
    loaded(grad).rotate_back(
        grad.data_ptr(), grad.stride(2), grad.stride(1), cos.data_ptr(), sin.data_ptr(), found.data_ptr(),
        rows, heads, width, threads(grad.numel()),
    )  # fmt: skip
    return found.transpose(1, 2)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    loaded(gate).silu_mul(gate.data_ptr(), up.data_ptr(), y.data_ptr(), y.numel(), threads(y.numel()))
    return y


def silu_mul_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients for both arguments of `silu_mul`, of that for its result."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    loaded(gate).silu_mul_back(
        grad.data_ptr(), gate.data_ptr(), up.data_ptr(), of_gate.data_ptr(), of_up.data_ptr(), gate.numel(),
        threads(gate.numel()),
    )  # fmt: skip
    return of_gate, of_up


def linear(x: Tensor, address: int, outputs: int, bias: Tensor | None) -> Tensor:
    """The product of x [..., in] with the weight at `address` (of `packed_address` or `unpacked_address`),
    plus bias [out]: [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty(*x.shape[:-1], outputs)
    loaded(x).linear(
        rows.data_ptr(), rows.stride(0), address, None if bias is None else bias.data_ptr(), y.data_ptr(),
        len(rows), rows.shape[1], outputs, torch.get_num_threads(),
    )  # fmt: skip
    return y


def linear_unpacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of x [rows, in] with a weight [out, in] that `reads` accepts, plus bias [out]: [rows, out].
    In one pass over the weight: torch's packs it in every call."""
    y = x.new_empty(len(x), len(weight))
    loaded(x).linear_unpacked(
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        len(x), *reversed(weight.shape), torch.get_num_threads(),
    )  # fmt: skip
    return y


def times_packed(x: Tensor, address: int, inputs: int) -> Tensor:
    """The product of x [..., out] with the packed weight [out, in] at `address` (of `packed_address`), not
    its transpose: [..., in]. Some columns at a time are unpacked into a cache, and multiplied by torch."""
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty(len(rows), inputs)
    outputs, step = rows.shape[1], _columns(rows.shape[1], inputs)
    columns = x.new_empty(outputs * step)
    for begin in range(0, inputs, step):
        count = min(step, inputs - begin)
        block = columns[: outputs * count].view(outputs, count)
        unpack_columns(address, block, inputs, loaded(x).panel_outputs(), begin)
        torch.mm(rows, block, out=y[:, begin : begin + count])
    return y.view(*x.shape[:-1], inputs)


def unpacked_nbytes(outputs: int, inputs: int) -> int:
    """Bytes that `times_packed` allocates and frees for a weight [out, in]."""
    return 2 * outputs * _columns(outputs, inputs)


def _columns(outputs: int, inputs: int) -> int:
    """Columns of a weight [out, in] that are unpacked together."""
    return min(inputs, max(_COLUMNS, _CACHED // (2 * outputs) // _COLUMNS * _COLUMNS))


def unpack_columns(address: int, block: Tensor, inputs: int, panel: int, begin: int) -> None:
    """Fills block [out, count] with columns from `begin` on of a weight [out, in] that lies at `address` in
    panels of so many outputs; `begin` and `count` are even."""
    outputs, count = block.shape
    loaded(block).unpack_columns(
        address, block.data_ptr(), outputs, inputs, panel, begin, count, threads(block.numel())
    )


def is_fast_unpacked(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Tells whether `linear_unpacked` reads this weight and bias, where `takes` holds for them, and is faster
    than torch's product with so many rows."""
    if not reads(weight, bias):
        return False
    panel = loaded(weight).panel_outputs()
    return rows <= _FEW or (panel == _TILE_PANEL and len(weight) % panel == 0)


def reads(weight: Tensor, bias: Tensor | None) -> bool:
    """Tells whether `linear_unpacked` reads this weight and bias, where `takes` holds for them."""
    outputs, inputs = weight.shape
    if outputs % _WIDE or inputs % _LANES or not fits(weight) or not weight.is_contiguous():
        return False
    return bool(loaded(weight).panel_outputs()) and (bias is None or (fits(bias) and bias.is_contiguous()))


@torch.no_grad()
def packed_address(packed: Tensor, weight: Tensor) -> int | None:
    """The address of oneDNN's packed form of a weight [out, in], where `linear` reads it; None where there
    is no such kernel, or the layout is another one. Which one oneDNN chooses it does not tell: a product of
    each does."""
    outputs, inputs = weight.shape
    found = kernels()
    panel = 0 if found is None else found.panel_outputs()
    if not panel or weight.dtype is not torch.bfloat16 or not fits(weight):
        return None
    # Inputs that do not fill a register are padded, which the bytes show.
    if outputs % panel or inputs % 2 or torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    x = torch.randn(2, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "").float()
    difference = linear(x, address, outputs, None).float() - want
    return address if bool(difference.norm() <= _SAME * want.norm()) else None


def unpacked_address(weight: Tensor, bias: Tensor | None) -> int | None:
    """The address of a weight [out, in] as it was loaded, where `linear` reads it so: in float32."""
    if weight.dtype is not torch.float32 or kernels(weight.dtype) is None or not reads(weight, bias):
        return None
    return weight.data_ptr()


def write_slots(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Writes x [groups, rows, width] into slots [rows] of pool [groups, places, width]."""
    groups, rows, width = x.shape
    slots = slots.contiguous()
    loaded(x).write_slots(
        x.data_ptr(), x.stride(0), x.stride(1), slots.data_ptr(), pool.data_ptr(), pool.shape[1], groups,
        rows, width, threads(x.numel()),
    )  # fmt: skip


def argmax(x: Tensor) -> Tensor:
    """The first of the largest of each row of x [rows, n], as `x.float().argmax(-1)`: [rows]. NaN is larger
    than all numbers. -1 where the largest is no finite number."""
    x = x.contiguous()
    rows, count = x.shape
    found = torch.empty(rows, dtype=torch.long)
    loaded(x).argmax(x.data_ptr(), found.data_ptr(), rows, count, threads(x.numel()))
    return found


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    page_size: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query per sequence: q [batch, heads, dk] over keys and values [groups, slots, dk and dv] in the
    pages of `block_table` [batch, n], of which each sequence has `lengths` [batch] positions and attends to
    the last `window`. Returns [batch, heads, dv]."""
    batch, heads, _ = q.shape
    groups, slots, width = values.shape
    out = q.new_empty(batch, heads, width)
    table, ends = block_table.contiguous(), lengths.contiguous()
    loaded(q).attend_pages(
        q.data_ptr(), q.stride(0), q.stride(1), keys.data_ptr(), values.data_ptr(), slots, table.data_ptr(),
        table.shape[1], page_size, ends.data_ptr(), window or 0, batch, heads, groups, q.shape[2], width,
        scale, out.data_ptr(), threads(table.numel() * page_size * heads * width),
    )  # fmt: skip
    return out


def attends_chunks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tells whether `attend_chunks` takes these."""
    return (
        takes(q, k, v)
        and q.dtype is torch.bfloat16
        and bool(loaded(q).attends_chunks(q.shape[-1], v.shape[-1]))
    )


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """As `blocked.forward`, by tile registers. Scores are rounded as a product of matrices is; sums of
    weights and values are not."""
    batch, heads, rows, key_width = q.shape
    groups, length, width = v.shape[1:]
    out = q.new_empty(batch, rows, heads, width)
    lse = torch.empty(q.shape[:3] if with_lse else 0, dtype=torch.float32)
    loaded(q).attend_chunks(
        *_placed(q, k, v), batch, heads, groups, rows, length, key_width, width, scale, window or 0,
        out.data_ptr(), lse.data_ptr() if with_lse else None, threads(batch * heads * rows * length),
    )  # fmt: skip
    return out.transpose(1, 2), lse


def goes_back_chunks(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
    """Tells whether `attend_chunks_back` takes these."""
    if q.dtype is not torch.bfloat16 or not takes(grad, q, k, v, out):
        return False
    return bool(loaded(q).goes_back_chunks(q.shape[-1], v.shape[-1]))


def attend_chunks_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `blocked.backward`, by tile registers, for the output and log-sum-exp of `attend_chunks`."""
    batch, heads, rows, key_width = q.shape
    groups, length, width = v.shape[1:]
    dq, lse = q.new_empty(batch, rows, heads, key_width), lse.contiguous()
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    loaded(q).attend_chunks_back(
        *_placed(grad, q, k, v, out), lse.data_ptr(), batch, heads, groups, rows, length, key_width, width,
        scale, window or 0, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        threads(batch * heads * rows * length),
    )  # fmt: skip
    return dq.transpose(1, 2), dk, dv


def _placed(*tensors: Tensor) -> Iterator[Any]:
    """The address of each tensor of four dimensions, and its three outer strides."""
    for x in tensors:
        yield x.data_ptr()
        yield (c_int64 * 3)(*x.stride()[:3])


def loaded(like: Tensor) -> CDLL:
    """The kernels for a tensor's type, where `takes` holds."""
    found = kernels(like.dtype)
    assert found is not None, "without a library nothing is taken"
    return found


def threads(numbers: int) -> int:
    """Threads for a pass over so many numbers."""
    return torch.get_num_threads() if numbers >= GRAIN else 1
