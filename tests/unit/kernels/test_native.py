"""Compiled kernels against their plain twins, on fresh random inputs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from compiled import each_type, in_type, numbers  # noqa: F401  # a fixture
from coserve.kernels import blocked, reference
from coserve.kernels.attention import causal_mask
from coserve.kernels.cpu import multiplies_bfloat16
from coserve.kernels.native import ops
from coserve.kernels.native.build import library, torch_only
from coserve.model.placement import PackedPlacement

DRAWS = random.Random()
TILED = 4  # rows from which on products of unpacked weights are by tiles, where a processor has these
MANY_ROWS = 64, 640, 1200  # outputs, inputs, rows: more than pass a weight at once
# Numbers that another order of a sum may round to a neighbour in bfloat16 (8 bits), twice at most; in float32
# any of them.
NEIGHBOURS = {torch.bfloat16: (2 * 2**-7, 0.02), torch.float32: (1e-5, 1.0)}
LEAST = 1e-30  # exp(x) below -87 is 0 here
# Of sums in float32 of up to 768 products of size 1, in another order: some 1e-6 where they come to almost 0.
SUMS = 1e-4
# Of attention: 8 bits of each score up to 5, of each weight and of the result, relative to values of size 1.
ATTENTION = {torch.bfloat16: 3e-2, torch.float32: 1e-5}


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return in_type(torch.randn(shape) * scale)


@pytest.fixture(autouse=True)
def _without_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_rounded_alike(got: Tensor, want: Tensor, least: float = LEAST) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    neighbour, often = NEIGHBOURS[numbers.dtype]
    torch.testing.assert_close(got, want, rtol=neighbour, atol=least)
    assert (got != want).float().mean() <= often


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_is_the_models_own(centred: bool) -> None:
    for _ in range(10):
        rows, width = DRAWS.randint(1, 70), DRAWS.choice([1, 7, 64, 1000, 2048])
        eps = DRAWS.choice([1e-6, 1e-2])
        own = (GemmaRMSNorm if centred else LlamaRMSNorm)(width, eps).to(numbers.dtype)
        own.weight.copy_(drawn(width))
        x = drawn(1, rows, width, scale=DRAWS.choice([1e-3, 1.0, 100.0]))
        assert_rounded_alike(ops.rms_norm(x, own.weight, eps, centred), own(x))


def test_rotary_embedding_is_bit_for_bit_the_models() -> None:
    for _ in range(10):
        rows, heads, width = DRAWS.randint(1, 300), DRAWS.randint(1, 9), 2 * DRAWS.randint(1, 64)
        whole = drawn(1, rows, heads + 3, width).transpose(1, 2)
        x, other = whole[:, :heads], drawn(1, rows, 1, width).transpose(1, 2)
        cos, sin = drawn(1, rows, width), drawn(1, rows, width)
        found, want = ops.rotate(x, cos, sin), apply_rotary_pos_emb(x, other, cos, sin)[0]
        if numbers.is_wide:  # a product and a sum are one operation, which rounds once
            torch.testing.assert_close(found, want, rtol=0.0, atol=2e-6)
        else:
            assert torch.equal(found, want)


def test_a_gated_activation_is_torchs() -> None:
    for _ in range(10):
        shape = DRAWS.randint(1, 40), DRAWS.randint(1, 3000)
        gate, up = drawn(*shape, scale=DRAWS.choice([1.0, 30.0])), drawn(*shape)
        assert_rounded_alike(ops.silu_mul(gate, up), F.silu(gate) * up)


def test_extreme_activations_are_torchs() -> None:
    gate = in_type(torch.tensor([0.0, -0.0, 1e30, -1e30, -80.0, 80.0, torch.inf, torch.nan]))
    found, own = ops.silu_mul(gate, torch.ones_like(gate)), F.silu(gate)
    torch.testing.assert_close(found, own, rtol=NEIGHBOURS[numbers.dtype][0], atol=LEAST, equal_nan=True)


def test_numbers_of_a_vector_have_the_bits_that_they_have_alone() -> None:
    """15 are less than a vector; one of 256 products of 16 bits lies between two numbers of 8."""
    bits = [DRAWS.randrange(-(1 << 15), 1 << 15) for _ in range(77)]
    odd = in_type(torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16))
    gate, up = torch.cat([odd, drawn(6000)]), drawn(6077)
    parts = zip(gate.split(15), up.split(15), strict=True)
    alone = torch.cat([ops.silu_mul(*part) for part in parts])
    assert torch.equal(ops.silu_mul(gate, up).view(torch.uint8), alone.view(torch.uint8))


def test_the_first_of_the_largest_is_torchs() -> None:
    for _ in range(20):
        rows, count = DRAWS.randint(1, 40), DRAWS.choice([1, 2, 255, 256, 257, DRAWS.randint(3, 9000)])
        few = in_type(torch.randint(-2, 3, (rows, count))) * -0.5  # equal ones, and both zeros
        size, integer = (31, torch.int32) if numbers.is_wide else (15, torch.int16)
        any_bits = (
            torch.randint(-(2**size), 2**size, (rows, count)).to(integer).view(numbers.dtype)
        )  # NaN too
        none = in_type(torch.full((rows, count), DRAWS.choice([-torch.inf, torch.nan])))
        for x in (drawn(rows, count), few, any_bits, none, drawn(rows, count + 3)[:, :count]):
            first = x.float().argmax(-1)
            largest = x.float().gather(1, first[:, None])[:, 0]
            assert torch.equal(ops.argmax(x), first.where(largest.isfinite(), -1))


def test_rows_are_written_into_their_slots_alone() -> None:
    for _ in range(10):
        groups, rows, width = DRAWS.randint(1, 4), DRAWS.randint(0, 90), DRAWS.randint(1, 80)
        pool, x = drawn(groups, 100, width), drawn(1, rows, groups + 1, width).transpose(1, 2)[0, :groups]
        slots = torch.randperm(100)[:rows]
        want = pool.index_copy(1, slots, x)
        ops.write_slots(pool, slots, x)
        assert torch.equal(pool, want)


packed_alone = pytest.mark.skipif(
    not multiplies_bfloat16(torch.zeros(1).bfloat16()), reason="oneDNN packs no bfloat16 weights here"
)


@pytest.fixture
def in_bfloat16() -> None:
    if numbers.is_wide:
        pytest.skip("weights in float32 are not packed")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Queries of sequences whose pages lie anywhere in pools with NaN elsewhere; `slots` are of each row."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    page_size: int
    window: int | None
    slots: list[Tensor]

    def attend(self, rows: slice = slice(None)) -> Tensor:
        q, table, lengths, scale = (
            self.q[rows],
            self.table[rows],
            self.lengths[rows],
            self.q.shape[-1] ** -0.5,
        )
        return ops.attend_pages(
            q, self.keys, self.values, table, lengths, self.page_size, scale, self.window
        )  # fmt: skip

    def exact(self, row: int) -> Tensor:
        """The result of a row in float64."""
        own = self.slots[row]
        k, v = self.keys[None, :, own].double(), self.values[None, :, own].double()
        seen = causal_mask(1, len(own), self.window, self.q.device)
        query = self.q[row][None, :, None].double()
        return reference.attention(query, k, v, query.shape[-1] ** -0.5, seen)[0, :, 0]


def drawn_decoding(size: int, width: int, value_width: int, share: int) -> Decoding:
    groups, batch, window = DRAWS.randint(1, 4), DRAWS.randint(1, 6), DRAWS.choice([None, 1, 7, 40])
    lengths = [DRAWS.randint(1, 90) for _ in range(batch)]
    pages = [-(-length // size) for length in lengths]
    keys, values = drawn(groups, 200 * size, width), drawn(groups, 200 * size, value_width)
    q = drawn(groups * share, batch, width).transpose(0, 1)
    order = DRAWS.sample(range(200), sum(pages))
    table = torch.zeros(batch, max(pages), dtype=torch.long)
    unused = torch.ones(200 * size, dtype=torch.bool)
    slots = []
    for row, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        own, order = order[:count], order[count:]
        table[row, :count] = torch.tensor(own)
        slots.append(torch.tensor([page * size + slot for page in own for slot in range(size)][:length]))
        unused[slots[-1]] = False
    keys[:, unused] = values[:, unused] = torch.nan
    return Decoding(q, keys, values, table, torch.tensor(lengths), size, window, slots)


def drawn_shape(whole: bool) -> tuple[int, int, int, int]:
    """Page size, widths of keys and values, and queries of a group; `whole`: in whole blocks and vectors."""
    if whole:
        widths = DRAWS.choice([32, 64, 96, 128]), DRAWS.choice([32, 64, 96, 128])
        return DRAWS.choice([16, 32, 48]), *widths, DRAWS.randint(1, 9)
    width = DRAWS.randint(1, 80)
    return 4, width, width + 1, DRAWS.randint(1, 4)


@pytest.mark.parametrize("whole", [False, True])
def test_decode_rows_attend_to_their_pages_alone(whole: bool) -> None:
    for _ in range(20):
        decoding = drawn_decoding(*drawn_shape(whole))
        got = decoding.attend()
        for row in range(len(got)):
            torch.testing.assert_close(
                got[row].double(),
                decoding.exact(row),
                rtol=ATTENTION[numbers.dtype],
                atol=ATTENTION[numbers.dtype],
            )


@pytest.mark.parametrize("whole", [False, True])
def test_a_decode_row_has_the_same_bits_alone(whole: bool) -> None:
    for _ in range(5):
        decoding = drawn_decoding(*drawn_shape(whole))
        got = decoding.attend()
        for row in range(len(got)):
            assert torch.equal(decoding.attend(slice(row, row + 1))[0], got[row])


@pytest.mark.parametrize("whole", [False, True])
def test_a_nan_is_its_own_rows_alone(whole: bool) -> None:
    decoding = drawn_decoding(*drawn_shape(whole))
    decoding.q[0, 0, 0] = torch.nan
    got = decoding.attend()
    assert got[0, 0].isnan().all()
    assert not got[1:].isnan().any() and not got[0, 1:].isnan().any()


def test_a_chunk_attends_to_what_came_before() -> None:
    for _ in range(10):
        groups, share, width = DRAWS.randint(1, 4), DRAWS.randint(1, 3), DRAWS.randint(1, 80)
        t, before = DRAWS.randint(1, 300), DRAWS.choice([0, 0, DRAWS.randint(1, 100)])
        q = drawn(1, t, groups * share, width).transpose(1, 2)
        k, v = drawn(1, groups, before + t, width), drawn(1, groups, before + t, width + 1)
        got = blocked.attention(q, k, v, width**-0.5, None)
        want = reference.attention(
            q.double(), k.double(), v.double(), width**-0.5, causal_mask(t, before + t, None, q.device)
        )
        torch.testing.assert_close(
            got.double(), want, rtol=ATTENTION[numbers.dtype], atol=ATTENTION[numbers.dtype]
        )


@packed_alone
def test_products_of_packed_weights_are_onednns(in_bfloat16: None) -> None:
    panel = ops.loaded(drawn(1)).panel_outputs()  # 64 outputs with vectors, 32 with tile registers
    shapes = [
        (panel * DRAWS.randint(1, 5), 32 * DRAWS.randint(1, 24), DRAWS.randint(1, 70)) for _ in range(10)
    ]
    for outputs, inputs, rows in [*shapes, MANY_ROWS]:
        bias = drawn(outputs) if DRAWS.random() < 0.5 else None
        placement = PackedPlacement(drawn(outputs, inputs), bias)
        x = drawn(1, rows, inputs + 3)[..., :inputs]
        assert placement.native is not None
        got = ops.linear(x, placement.native.address, outputs, bias)
        with torch_only():
            assert_rounded_alike(got, placement.forward(x), SUMS)
        assert torch.equal(placement.forward(x[:, :1]), got[:, :1])


def test_columns_of_packed_weights_are_unpacked(in_bfloat16: None) -> None:
    """Panels are laid out here as oneDNN lays them out, so that any processor with a compiler runs this."""
    for _ in range(40):
        panel = DRAWS.choice([32, 64])
        outputs, pairs = panel * DRAWS.randint(1, 4), DRAWS.randint(1, 90)
        weight = drawn(outputs, 2 * pairs)
        packed = weight.view(outputs // panel, panel, pairs, 2).transpose(1, 2).contiguous()
        begin = 2 * DRAWS.randrange(pairs)
        block = torch.full((outputs, 2 * DRAWS.randint(1, pairs - begin // 2)), -1.0).bfloat16()
        ops.unpack_columns(packed.data_ptr(), block, 2 * pairs, panel, begin)
        assert torch.equal(block, weight[:, begin : begin + block.shape[1]])


@packed_alone
def test_products_with_the_transpose_read_the_packed_weight(in_bfloat16: None) -> None:
    panel = ops.loaded(drawn(1)).panel_outputs()
    for outputs, inputs, rows in [
        (panel * DRAWS.randint(1, 5), 32 * DRAWS.randint(1, 24), DRAWS.randint(1, 70)) for _ in range(10)
    ] + [(8192, 320, 40)]:  # more than one block of columns
        weight = drawn(outputs, inputs)
        placement = PackedPlacement(weight, None)
        grad = drawn(1, rows, outputs)
        assert placement.native is not None
        got = placement.backward(grad)
        assert got.shape == (1, rows, inputs)
        assert_rounded_alike(got, grad @ weight, SUMS)
        with torch_only():
            assert torch.equal(placement.backward(grad), grad @ weight)


def test_products_of_weights_as_loaded_are_torchs() -> None:
    found_library = library(numbers.dtype)
    if found_library is None or not found_library.panel_outputs():
        pytest.skip("there is no kernel of products")
    shapes = [
        (DRAWS.choice([4, 32]) * DRAWS.randint(1, 10), 32 * DRAWS.randint(1, 20), DRAWS.randint(1, 130))
        for _ in range(20)
    ]
    for outputs, inputs, rows in [*shapes, MANY_ROWS]:
        weight, bias = drawn(outputs, inputs), drawn(outputs) if DRAWS.random() < 0.5 else None
        x = drawn(rows, inputs + 3)[:, :inputs]
        assert ops.reads(weight, bias)
        got = ops.linear_unpacked(x, weight, bias)
        want = in_type(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))
        assert_rounded_alike(got, want, 1e-4 if numbers.is_wide else 1e-2)
        first = DRAWS.randrange(rows)
        if (rows - first < TILED) == (rows < TILED):  # fewer are multiplied by vectors
            assert torch.equal(ops.linear_unpacked(x[first:], weight, bias), got[first:])
    weight = drawn(8, 64)
    assert ops.reads(weight, drawn(8)) and not ops.reads(weight, drawn(16)[::2])
    for other in (drawn(6, 64), drawn(8, 48), drawn(64, 8).t(), weight.double(), drawn(8, 128)[:, ::2]):
        assert not ops.reads(other, None)
    wide = drawn(64, 64)
    is_tiled = found_library.panel_outputs() == 32
    assert ops.is_fast_unpacked(32, weight, None) and ops.is_fast_unpacked(33, wide, None) == is_tiled
    assert not ops.is_fast_unpacked(33, weight, None) and not ops.is_fast_unpacked(1, weight.double(), None)
    for each, rows in ((weight, 3), (wide, 3), (wide, 23)):
        broken = each.clone()
        broken[5] = float("nan")
        x = drawn(rows, 64)
        is_broken = ops.linear_unpacked(x, broken, None).isnan().any(0).tolist()
        assert is_broken == [output == 5 for output in range(len(each))]
        x[1] = float("inf")
        is_finite = ops.linear_unpacked(x, each, None).isfinite().all(1).tolist()
        assert is_finite == [row != 1 for row in range(rows)]


@packed_alone
def test_only_packed_panels_are_read(in_bfloat16: None) -> None:
    found_library = library()
    assert found_library is not None
    for outputs, inputs in ((64, 64), (100, 64), (64, 63)):
        weight = drawn(outputs, inputs)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        found = ops.packed_address(packed, weight)
        assert (found is not None) == (bool(found_library.panel_outputs()) and (outputs, inputs) == (64, 64))
        with torch_only():
            assert ops.packed_address(packed, weight) is None


def test_a_row_has_the_same_bits_among_any_others() -> None:
    x, weight = drawn(1, 130, 512), drawn(512)
    norms = ops.rms_norm(x, weight, 1e-6, False)
    gates = ops.silu_mul(x, x)
    for first, last in ((0, 1), (3, 20), (65, 130)):
        own = x[:, first:last]
        assert torch.equal(ops.rms_norm(own, weight, 1e-6, False), norms[:, first:last])
        assert torch.equal(ops.silu_mul(own, own), gates[:, first:last])


def test_only_what_kernels_can_read_is_taken() -> None:
    x = drawn(3, 4)
    assert ops.takes(x)
    other = x.to(torch.bfloat16 if numbers.is_wide else torch.float32)
    assert (
        not ops.takes(x, other)
        and not ops.takes(x.double())
        and not ops.takes(x.t())
        and not ops.takes(x.to("meta"))
    )
    with torch.enable_grad():
        assert not ops.takes(x)
    with torch_only():
        assert not ops.takes(x)
    assert ops.takes(x)
