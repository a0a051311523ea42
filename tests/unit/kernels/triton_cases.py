"""Run by `test_triton.py`, with Triton's interpreter or on a GPU: each kernel on each layout, in each
type. An argument names the one of `PARTS` to run; without one all run."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from coserve import Engine, EngineConfig, SamplingParams
from coserve.kernels import recurrent as plain
from coserve.kernels import reference
from coserve.kernels.attention import AttentionSpec, causal_mask
from coserve.kernels.lora.backend import LoraWeights, TrainingLoraBackend
from coserve.kernels.lora.layout import Layout
from coserve.kernels.lora.slots import GatheredSlots, PlainSlots, SlotTables
from coserve.kernels.native.build import torch_only
from coserve.kernels.recurrent import StatePlaces
from coserve.kernels.row_tiles import RowTiles, list_tiles, most_tiles
from coserve.kernels.triton import blocksparse, elementwise, recurrent, segmented
from coserve.kernels.triton import pages as decode
from coserve.kernels.triton.backends import TritonBlockSparse, TritonSegmented
from coserve.kernels.triton.blocksparse import Topology
from coserve.kernels.triton.rotary_pages import rotate_into_pages
from coserve.kernels.triton.slots import TritonSlots
from coserve.kernels.triton.tiles import Tiles
from coserve.model import native_mixer
from recurrent import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 wrongly, without a word.
TYPES = {torch.float32: 2e-6, torch.float16: 2e-3} | ({torch.bfloat16: 1.6e-2} if DEVICE == "cuda" else {})
INSIDE, OUTSIDE = 70, 130
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
SINKS = torch.linspace(-1, 1, 6)
SPECS = (
    AttentionSpec(0.2),
    AttentionSpec(2.0, window=5),
    AttentionSpec(0.2, window=67, softcap=2.0, sinks=SINKS),
    AttentionSpec(0.2, sinks=SINKS),
)

LAYOUTS = {
    "decode rows": Layout.of([(slice(0, 1), 0), (slice(1, 3), 2), (slice(4, 5), 1)], [8, 1, 37]),
    "long segments": Layout.of([(slice(2, 22), 1), (slice(22, 55), 0)], [5, 16]),
    "an adapter twice": Layout.of([(slice(0, 2), 1), (slice(2, 3), 0), (slice(3, 40), 1)], [64, 20, 9]),
    "nobody": Layout.of([], [4]),
}


def main(*names: str) -> None:
    for name in names or PARTS:
        PARTS[name]()
    print("equal")


def _low_rank() -> None:
    draws = torch.Generator().manual_seed(0)
    for name, layout in LAYOUTS.items():
        rows = max((r.stop for r in layout.rows), default=2) + 1
        for dtype, tolerance in TYPES.items():
            sizes = {
                "x": (rows, INSIDE), "y": (rows, OUTSIDE), "a": (layout.total_ranks, INSIDE),
                "b": (layout.total_ranks, OUTSIDE), "grad": (rows, OUTSIDE),
            }  # fmt: skip
            given = {
                key: torch.randn(size, generator=draws).to(DEVICE, dtype) / size[-1] ** 0.5
                for key, size in sizes.items()
            }
            device = given["x"].device
            for backend in (TritonSegmented.of(layout, device), TritonBlockSparse.of(layout, device)):
                what = f"{type(backend).__name__}, {name}, {dtype}"
                _forward_and_back(what, backend, layout, given, tolerance)
    _keeps_what_is_not_a_number()


def _rows() -> None:
    _slots()
    for dtype, tolerance in TYPES.items():
        _elementwise(dtype, tolerance)
        _rotary_pages(dtype)
        _slot_tiles(dtype, tolerance)


def _attention() -> None:
    for dtype, tolerance in TYPES.items():
        for spec in SPECS:
            _pages(spec, dtype, 5 * tolerance)
            _tiles(spec, dtype, 5 * tolerance)


def _forward_and_back(
    what: str, backend: TrainingLoraBackend, layout: Layout, given: dict[str, Tensor], tolerance: float
) -> None:
    x, y, a, b, grad = (given[key] for key in ("x", "y", "a", "b", "grad"))
    spans = layout.ranks
    weights = LoraWeights([a[span] for span in spans], [b[span].t() for span in spans], [1.0] * len(spans))
    out, of_x = y.clone(), torch.zeros_like(x)
    backend.expand_(backend.shrink(x, weights), weights, out)
    of_a, of_b = backend.backward(grad, x, weights, of_x)
    found = out, of_x, torch.cat(list(of_a)), torch.cat([one.t() for one in of_b])
    _compare(what, layout, given, found, tolerance)


def _compare(
    what: str, layout: Layout, given: dict[str, Tensor], found: tuple[Tensor, ...], tolerance: float
) -> None:
    exact = {key: tensor.double() for key, tensor in given.items()}
    x, y, a, b, grad = (exact[key] for key in ("x", "y", "a", "b", "grad"))
    wanted = (
        reference.multi_lora(x, y, a, b, layout),
        *reference.multi_lora_backward(grad, x, a, b, layout),
    )
    for name, got, expected in zip(("y", "gradient of x", "of a", "of b"), found, wanted, strict=True):
        error = float((got.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        assert error <= tolerance, f"{what}: {name} is off by {error:.2g}"


def _keeps_what_is_not_a_number() -> None:
    """An adapter that is broken spoils its own rows, and an outlier in a row nobody else's."""
    layout = Layout.of([(slice(0, 2), 0), (slice(2, 20), 1), (slice(20, 21), 2)], [3, 4, 5])
    x, y = torch.randn(21, INSIDE, device=DEVICE), torch.randn(21, OUTSIDE, device=DEVICE)
    a, b = torch.randn(12, INSIDE, device=DEVICE), torch.randn(12, OUTSIDE, device=DEVICE)
    a[4], b[5] = float("nan"), float("inf")
    tiles, topology = Tiles.of(layout, x.device), Topology.of(layout, x.device)
    ours, other = y.clone(), y.clone()
    segmented.expand_(segmented.shrink(x, a, tiles), b, ours, tiles)
    blocksparse.sdd_(blocksparse.dds(x, a, topology), b, other, topology)
    for got in (ours, other):
        assert got[:2].isfinite().all() and got[20:].isfinite().all(), "a neighbour is spoilt"
        assert not got[2:20].isfinite().any(), "what is broken shows"


def _slots() -> None:
    """A GPU's slots give what a CPU's do: two linears, ranks below the tables', rows of slots in any order,
    and rows of nobody."""
    draws = torch.Generator().manual_seed(2)
    sizes = (3, 8, INSIDE, (OUTSIDE, 20))
    like = torch.zeros((), device=DEVICE)
    ours = SlotTables(*sizes, like, inputs_first=False)
    twin = SlotTables(*sizes, torch.zeros((), dtype=torch.float64), inputs_first=True)
    for slot, rank in enumerate((8, 3, 1)):
        for linear, width in enumerate(sizes[3]):
            a, b = torch.randn(rank, INSIDE, generator=draws), torch.randn(width, rank, generator=draws)
            ours.put(slot, linear, a.to(DEVICE), b.to(DEVICE), 1.5 + slot)
            twin.put(slot, linear, a.double(), b.double(), 1.5 + slot)
    segments = [(slice(1, 2), 2), (slice(2, 3), 0), (slice(4, 6), 1), (slice(6, 7), 0)]
    own = torch.tensor([-1, 2, 0, -1, 1, 1, 0, -1], dtype=torch.int32)
    backend, plain = TritonSlots(own.to(DEVICE)), GatheredSlots(segments, torch.device("cpu"))
    by_rows = PlainSlots(own)
    x = torch.randn(8, INSIDE, generator=draws)
    h = backend.shrink(x.to(DEVICE), ours.weights(0))
    wanted_h, alone = plain.shrink(x.double(), twin.weights(0)), list[tuple[Tensor, Tensor]]()
    for linear, width in enumerate(sizes[3]):
        y = torch.randn(8, width, generator=draws)
        got, wanted, other = y.to(DEVICE), y.double(), y.double()
        alone.append((y.clone().to(DEVICE), got))
        backend.expand_(h, ours.weights(linear), got)
        plain.expand_(wanted_h, twin.weights(linear), wanted)
        by_rows.expand_(by_rows.shrink(x.double(), twin.weights(0)), twin.weights(linear), other)
        assert torch.allclose(other, wanted), f"{linear}"
        assert torch.allclose(got.double().cpu(), wanted, rtol=1e-5, atol=1e-4), f"{linear}"
    both = [ours.weights(linear) for linear in range(2)]
    backend.expand_siblings_(h, both, [y for y, _ in alone])
    assert all(torch.equal(y, got) for y, got in alone), "siblings in one launch"
    assert 2 * ours.slot_nbytes == twin.slot_nbytes


def _elementwise(dtype: torch.dtype, tolerance: float) -> None:
    """Norms, rotary embedding and gated activation, both ways, against autograd in float64; rows of odd
    widths, heads in no order of memory, and rotations bit for bit those of torch."""
    draws = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).to(DEVICE, dtype)

    for width, rows in ((7, 3), (70, 5), (2049, 2)):
        x, weight, grad = drawn(1, rows, width), drawn(width), drawn(1, rows, width)
        for centred, eps in ((False, 1e-5), (True, 1e-2)):
            exact = x.double().requires_grad_()
            norm = exact * (exact.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + centred)
            (of_x,) = torch.autograd.grad(norm, exact, grad.double())
            _near(elementwise.rms_norm(x, weight, eps, centred), norm, tolerance, "norm")
            _near(elementwise.rms_norm_back(grad, x, weight, eps, centred), of_x, 4 * tolerance, "norm, back")
            total, normed = elementwise.add_rms_norm(x, grad, weight, eps, centred)
            assert torch.equal(total, x + grad), f"sum, {dtype}"
            assert torch.equal(normed, elementwise.rms_norm(total, weight, eps, centred)), (
                f"its norm, {dtype}"
            )
    for heads, rows, half in ((1, 1, 1), (11, 4, 12), (8, 3, 64)):
        x, grad = (
            drawn(1, rows, heads + 2, 2 * half)[:, :, :heads].transpose(1, 2),
            drawn(1, heads, rows, 2 * half),
        )
        cos, sin = drawn(1, rows, 2 * half), drawn(1, rows, 2 * half)
        own = x.clone().requires_grad_()
        turned = own * cos + torch.cat((-own[..., half:], own[..., :half]), -1) * sin
        (of_x,) = torch.autograd.grad(turned, own, grad)
        assert torch.equal(elementwise.rotate(x, cos, sin), turned), f"rotation, {dtype}"
        _near(elementwise.rotate_back(grad, cos, sin), of_x, tolerance, "rotation, back")
    for count in (1, 1024, 2500):
        gate, up, grad = 3 * drawn(count), drawn(count), drawn(count)
        leaves = [each.double().requires_grad_() for each in (gate, up)]
        gated = torch.nn.functional.silu(leaves[0]) * leaves[1]
        found = elementwise.silu_mul(gate, up), *elementwise.silu_mul_back(grad, gate, up)
        wanted = gated, *torch.autograd.grad(gated, leaves, grad.double())
        for got, expected in zip(found, wanted, strict=True):
            _near(got, expected, tolerance, "gated activation")


def _rotary_pages(dtype: torch.dtype) -> None:
    """Queries and keys as by the rotation alone, and keys and values in their slots, bit for bit; other slots
    keep what they have, and rows beyond the slots get none. Values may have a width of their own."""
    draws = torch.Generator().manual_seed(6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).to(DEVICE, dtype)

    for heads, groups, rows, padding, width, deep in ((11, 3, 4, 2, 24, 24), (8, 8, 3, 0, 128, 40)):
        q, k, v = (
            drawn(1, rows + padding, n, size).transpose(1, 2)
            for n, size in ((heads, width), (groups, width), (groups, deep))
        )
        cos, sin = (drawn(1, rows + padding, width) for _ in range(2))
        slots = torch.randperm(40, generator=draws)[:rows].to(DEVICE)
        keys, values = drawn(groups, 40, width), drawn(groups, 40, deep)
        wanted_keys = keys.index_copy(1, slots, elementwise.rotate(k, cos, sin)[0, :, :rows])
        wanted_values = values.index_copy(1, slots, v[0, :, :rows])
        found = rotate_into_pages(q, k, v, cos, sin, slots, keys, values)
        assert torch.equal(found, elementwise.rotate(q, cos, sin)[0].transpose(0, 1)[:rows]), f"q, {dtype}"
        assert torch.equal(keys, wanted_keys) and torch.equal(values, wanted_values), f"pages, {dtype}"


def _near(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    exact = wanted.detach().double()
    error = float((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-3))
    assert got.shape == wanted.shape and error <= tolerance, f"{what}, {got.dtype}: off by {error:.2g}"


def _pages(spec: AttentionSpec, dtype: torch.dtype, tolerance: float) -> None:
    """Sequences of one token, of a page and of more than one block of keys, in pages anywhere; what is in
    other slots is no number. Widths are no powers of two, and one key's weight is nearly all."""
    draws = torch.Generator().manual_seed(3)
    lengths, size, groups, heads, dk, dv = [1, 16, 70, 131], 16, 2, 6, 24, 40
    count = -(-max(lengths) // size)
    pages = torch.randperm(4 * count + 3, generator=draws)[: 4 * count].view(4, count)
    slots = (4 * count + 3) * size
    keys, values = (torch.full((groups, slots, width), torch.nan, dtype=dtype) for width in (dk, dv))
    q = torch.randn(heads, 4, dk, generator=draws).to(dtype).transpose(0, 1)
    sinks = None if spec.sinks is None else spec.sinks.to(dtype)
    wanted = []
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        at = pages[row][positions // size] * size + positions % size
        keys[:, at], values[:, at] = (
            torch.randn(groups, length, width, generator=draws).to(dtype) for width in (dk, dv)
        )
        allowed = causal_mask(1, length, spec.window, torch.device("cpu"))
        own = (x[None, :, at].double() for x in (keys, values))
        exact = None if sinks is None else sinks.double()
        query = q[row][None, :, None].double()
        found = reference.attention(query, *own, spec.scale, allowed, spec.softcap, exact)
        wanted.append(found[0, :, 0])
    there = replace(spec, sinks=None if sinks is None else sinks.to(DEVICE))
    given = [x.to(DEVICE) for x in (q, keys, values, pages, torch.tensor(lengths))]
    found = []
    for split in (512, 64):  # all in one part, and the longest sequence in three
        with mock.patch.object(decode, "_SPLIT", split):
            found.append(decode.attend_pages(*given, size, there))
        error = float((found[-1].double().cpu() - torch.stack(wanted)).abs().max().nan_to_num(torch.inf))
        assert error <= tolerance, f"pages, {spec}, {dtype}, {split} positions: off by {error:.2g}"
    one_part = torch.tensor(lengths) <= 64
    assert torch.equal(*(x.cpu()[one_part] for x in found)), "what others need changes nothing"


def _tiles(spec: AttentionSpec, dtype: torch.dtype, tolerance: float) -> None:
    """Rows of several sequences side by side: single ones, chunks that begin anywhere in a page and end
    anywhere in a tile, and padding at the end, which gets zeros. Each is what it is as a decode row."""
    draws = torch.Generator().manual_seed(4)
    spans = [(0, 17), (5, 1), (9, 40), (130, 16), (63, 15), (70, 1)]  # (positions before, rows)
    size, groups, heads, dk, dv, padding = 16, 2, 12, 24, 40, 7
    count = -(-max(start + rows for start, rows in spans) // size)
    pages = torch.randperm(len(spans) * count, generator=draws).view(len(spans), count)
    keys, values = (torch.full((groups, pages.numel() * size, n), torch.nan, dtype=dtype) for n in (dk, dv))
    lines, lengths = list[int](), list[int]()
    for line, (start, rows) in enumerate(spans):
        positions = torch.arange(start + rows)
        at = pages[line][positions // size] * size + positions % size
        for x in (keys, values):
            x[:, at] = torch.randn(groups, len(at), x.shape[-1], generator=draws).to(dtype)
        lines += [line] * rows
        lengths += range(start + 1, start + rows + 1)
    starts, counts = list_tiles([rows for _, rows in spans])
    empty = [0] * (most_tiles(len(lines), len(spans)) - len(starts))
    given = [torch.tensor(column + empty, dtype=torch.int32) for column in (starts, counts)]
    of_rows = torch.tensor(lines + [0] * padding)
    tiles = RowTiles(*(x.to(DEVICE) for x in (*given, of_rows)))
    rows = len(lines)
    q = torch.randn(rows + padding, heads, dk, generator=draws).to(dtype).to(DEVICE)
    ends = torch.tensor(lengths + [1] * padding).to(DEVICE)
    there = replace(spec, sinks=None if spec.sinks is None else spec.sinks.repeat(2).to(dtype).to(DEVICE))
    held = [x.to(DEVICE) for x in (keys, values)]
    found = decode.attend_pages(q, *held, pages.to(DEVICE), ends, size, there, tiles)
    alone = pages[of_rows[:rows]].to(DEVICE)
    wanted = decode.attend_pages(q[:rows], *held, alone, ends[:rows], size, there)
    error = float((found[:rows].double() - wanted.double()).abs().max().nan_to_num(torch.inf))
    assert error <= tolerance, f"tiles, {spec}, {dtype}: off by {error:.2g}"
    assert not found[rows:].any(), "padding"


def _slot_tiles(dtype: torch.dtype, tolerance: float) -> None:
    """Rows of a prompt in tiles are multiplied as each alone."""
    draws = torch.Generator().manual_seed(5)
    counts, own = [1, 33, 16, 2, 20], [2, 0, -1, 3, 0]
    tables = SlotTables(4, 8, INSIDE, [OUTSIDE], torch.zeros((), dtype=dtype, device=DEVICE), False)
    for slot, rank in enumerate((8, 3, 5, 1)):
        a, b = (torch.randn(*shape, generator=draws) for shape in ((rank, INSIDE), (OUTSIDE, rank)))
        tables.put(slot, 0, a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE), 0.5)
    slots = torch.tensor([slot for slot, n in zip(own, counts, strict=True) for _ in range(n)] + [-1] * 3)
    x, y = (torch.randn(len(slots), width, generator=draws).to(dtype) for width in (INSIDE, OUTSIDE))
    starts, sizes = (torch.tensor([*column, 0, 0], dtype=torch.int32) for column in list_tiles(counts))
    slots = slots.to(torch.int32).to(DEVICE)
    tiles = RowTiles(starts.to(DEVICE), sizes.to(DEVICE), slots)
    found = []
    for backend in (PlainSlots(slots), TritonSlots(slots, tiles)):
        out = y.to(DEVICE).clone()
        weights = tables.weights(0)
        backend.expand_(backend.shrink(x.to(DEVICE), weights), weights, out)
        found.append(out.double())
    error = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    assert error <= tolerance, f"slots in tiles, {dtype}: off by {error:.2g}"


def _states() -> None:
    """One row of each of three sequences, whose states are anywhere among others that stay; widths are no
    powers of two, and heads share keys."""
    draws = torch.Generator().manual_seed(6)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=draws).to(dtype).to(DEVICE)

    for dtype, tolerance in TYPES.items():
        for by_key, with_ends in ((False, True), (True, False)):
            q, k = (drawn(3, 2, 24, dtype=dtype) for _ in range(2))
            decay = -drawn(3, 4, *([24] if by_key else [])).exp()
            row = q, k, drawn(3, 4, 40, dtype=dtype), decay, drawn(3, 4, dtype=dtype).sigmoid(), with_ends
            _updates(
                f"delta {by_key}", recurrent.delta_update, plain.delta_update, row, (4, 24, 40), tolerance
            )
            heads, width = (4, 40) if by_key else (70, 1)
            x, b, c = (drawn(3, *own, dtype=dtype) for own in ((heads, width), (2, 24), (2, 24)))
            dt, a = drawn(3, heads).exp(), -drawn(heads, 1).exp().expand(heads, 24)
            d, z = (drawn(heads), drawn(3, heads, width, dtype=dtype)) if with_ends else (None, None)
            mamba = x, dt, a, b, c, d, z
            wide = heads, width, 24
            _updates("selective", recurrent.selective_update, plain.selective_update, mamba, wide, tolerance)
            weight, bias = drawn(70, 4, dtype=dtype), drawn(70, dtype=dtype) if by_key else None
            conv = drawn(3, 70, dtype=dtype), weight, bias, by_key
            held = (70, 4)
            _updates("conv", recurrent.conv_update, plain.conv_update, conv, held, 2 * tolerance, dtype)


def _updates(
    what: str, kernel: Callable[..., Tensor], twin: Callable[..., Tensor], row: tuple[object, ...],
    shape: tuple[int, ...], tolerance: float, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    held = torch.randn(7, *shape, generator=torch.Generator().manual_seed(7)).to(dtype).to(DEVICE)
    before, after = torch.tensor([3, 0, 6]).to(DEVICE), torch.tensor([2, 5, 1]).to(DEVICE)
    found, wanted = (StatePlaces(held.clone(), before, after) for _ in range(2))
    _near(kernel(*row, found), twin(*row, wanted), tolerance, what)
    _near(found.held, wanted.held, tolerance, f"{what}: states")
    assert torch.equal(found.held[[0, 3, 4, 6]], held[[0, 3, 4, 6]]), f"{what}: other states"


def _mixers() -> None:
    """Models with recurrent layers answer as without kernels, and each decoded row goes by these: as on a
    device where the C kernels of a CPU read nothing."""
    names = "conv_update", "delta_update", "selective_update"
    spies = {name: mock.Mock(wraps=getattr(recurrent, name)) for name in names}
    wanted = {"qwen3_next": ["conv_update", "delta_update"], "lfm2": ["conv_update"]}
    for model in ("qwen3_next", "granitemoehybrid", "mamba", "lfm2"):
        with torch_only():
            plain_tokens = _decoded(model)
            with (
                mock.patch.object(native_mixer, "_row_kernels", lambda like: recurrent),
                mock.patch.object(recurrent, "takes", lambda *tensors: not torch.is_grad_enabled()),
                mock.patch.multiple(recurrent, **spies),
            ):
                tokens = _decoded(model, spies.values())
        called = [name for name in names if spies[name].called]
        assert called == wanted.get(model, ["conv_update", "selective_update"]), (model, called)
        assert tokens == plain_tokens, model


def _decoded(model: str, spies: Iterable[mock.Mock] = ()) -> list[list[int]]:
    """Greedy answers to two prompts; calls of the load are forgotten by `spies`."""
    config = EngineConfig(calibrate=False, cache_tokens=64, page_size=8)
    engine = Engine(build(model).to(DEVICE), config)
    for spy in spies:
        spy.reset_mock()
    answers = [engine.generate(prompt, sampling=GREEDY) for prompt in ([5, 9, 2], [7, 3, 8, 4, 6])]
    return [answer.result().tokens for answer in answers]


PARTS: Mapping[str, Callable[[], None]] = {
    "low rank": _low_rank, "rows": _rows, "attention": _attention, "states": _states,
    "mixers": _mixers,
}  # fmt: skip

if __name__ == "__main__":
    main(*sys.argv[1:])
