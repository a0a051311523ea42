"""Decoder layers that kernels compute: which are recognised, and that they give what the layer's own modules
give, for decode rows of the base bit for bit."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled import each_type, in_type, numbers, with_products  # noqa: F401  # fixtures
from coserve.adapters.bypass import Bypasses, SequentialBypass
from coserve.adapters.lora_batch import LoraBatch
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.adapters.methods.bottleneck import BottleneckBypass
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.adapters.replace import PrunedReplacement, fresh_replacements
from coserve.attention import batched
from coserve.attention.backend import CommonAttentionMetadata, InferenceRows
from coserve.attention.batched import BatchedBackend
from coserve.attention.store import Int8KVStore
from coserve.core.sequence import Direction
from coserve.errors import UnsupportedModel
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native.build import torch_only
from coserve.model import chain, native_layer
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Block
from coserve.model.layer_experiment import find_whole_layers
from coserve.model.load import load_base
from coserve.model.native_layer import NativeLayer
from coserve.model.placement import place_locally
from coserve.worker.inference import InferenceBatch
from models import PANELS, tiny

DRAWS = random.Random()
PAGES = 100


def base_of(name: str = "llama", **changes: Any) -> Base:
    return load_base(tiny(name, numbers.dtype, **{**PANELS, **changes}))


class Step:
    """A pass's rows: `least` decode rows or more, and the first tokens of a prompt in two chunks, the second
    of `chunk`; with pages of random keys and values. The same seed draws the same."""

    def __init__(self, base: Base, seed: int, chunk: int = 0, store: Any = None, least: int = 1) -> None:
        draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        size, batch = draws.choice([4, 16, 32]), draws.randint(least, 20)
        more = {} if store is None else {"store": store}
        device = torch.device("cpu")
        self.base = base
        self.backend = BatchedBackend(base.caches, PAGES, size, numbers.dtype, device, **more)
        for layer, cache in enumerate(base.caches):
            for page in range(PAGES):
                shape = cache.groups, size, cache.key
                k, v = (in_type(torch.randn(shape, generator=generator)) for _ in range(2))
                self.backend.fill(layer, [page], k, v)
        most = draws.choice([size, 4 * size])
        lengths = [draws.randint(1, most) for _ in range(batch)]
        rows, positions = [1] * batch, [length - 1 for length in lengths]
        if chunk:  # a whole prompt, and the end of another
            start = draws.randint(1, 4 * size - chunk)
            rows, lengths = [*rows, chunk, chunk], [*lengths, chunk, start + chunk]
            positions += [*range(chunk), *range(start, start + chunk)]
        order = draws.sample(range(PAGES), 4 * len(lengths))
        table = torch.tensor(order).view(len(lengths), 4)
        padding = draws.randint(0, 6)
        self.positions = torch.tensor(positions + [0] * padding)
        common = CommonAttentionMetadata(table, self.positions[: len(positions)], rows, lengths, batch)
        self.padding = slice(len(positions), len(self.positions))
        self.part = InferenceRows(self.backend, common, len(self.positions))
        self.hidden = in_type(torch.randn(1, len(self.positions), base.hidden_size, generator=generator))

    @torch.no_grad()
    def run(
        self, layer: int, shortcut: bool, lora: LoraBatch | None = None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output, keys and values, by the layer's modules or by its shortcut; None where there is no way."""
        block = self.base.chain.blocks[layer]
        _, calls = self.base.prologue(torch.zeros_like(self.positions), self.positions)
        kept, block.shortcut = block.shortcut, None
        try:
            rows = FusedRows([self.part], [] if lora is None else lora.rest, lora, padding=self.padding)
            with self.base.cell.set(rows), block.visit(Direction.INFER):
                run = kept if shortcut and kept is not None else block.run
                out = run(self.hidden, calls[layer])
        finally:
            block.shortcut = kept
        return None if out is None else (out, *self.backend.gather(layer, torch.arange(PAGES)))

    @torch.no_grad()
    def pass_through(self, lora: LoraBatch | None = None) -> list[Tensor]:
        """Output of the chain, and keys and values of each layer."""
        _, calls = self.base.prologue(torch.zeros_like(self.positions), self.positions)
        layers = range(len(self.base.chain))
        batch = InferenceBatch([], [], self.hidden, self.part, calls, [], layers)
        rows = FusedRows([self.part], [] if lora is None else lora.rest, lora, padding=self.padding)
        self.base.chain.forward([batch], compose=lambda _: (rows, calls))
        pages = [self.backend.gather(layer, torch.arange(PAGES)) for layer in layers]
        return [batch.hidden, *(tensor for pair in pages for tensor in pair)]


class Counted:
    """A chain's shortcut that notes how many layers it took at once."""

    def __init__(self, base: Base) -> None:
        assert base.chain.shortcut is not None
        self._shortcut, self.taken = base.chain.shortcut, list[int]()

    def __call__(self, blocks: Sequence[Block], hidden: Tensor, call: Any) -> Tensor | None:
        out = self._shortcut(blocks, hidden, call)
        if out is not None:
            self.taken.append(len(blocks))
        return out


def assert_close(found: Tensor, want: Tensor, wide: float = 1e-5) -> None:
    """To the rounding of sums in another order. One number of a softmax may be further off than all together:
    a score is rounded to 8 bits of its own size."""
    assert (found.float() - want.float()).norm() < (wide if numbers.is_wide else 0.02) * want.float().norm()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 64, "attention_bias": True}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {}),
    ],
)
def test_a_layer_gives_what_its_modules_give(name: str, changes: dict[str, Any]) -> None:
    base = base_of(name, **changes)
    for layer, block in enumerate(base.chain):
        assert block.shortcut is not None
        for _ in range(4):
            seed = DRAWS.randrange(1 << 30)
            own, short = (Step(base, seed).run(layer, shortcut) for shortcut in (False, True))
            assert own is not None and short is not None
            assert all(map(torch.equal, own, short))


@pytest.mark.parametrize(("layers", "at_once"), [(2, 8), (3, 8), (5, 2)])
def test_several_layers_in_one_call_give_what_they_give_one_by_one(
    layers: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_AT_ONCE", at_once)
    base = base_of("llama", num_hidden_layers=layers)
    base.chain.shortcut = counted = Counted(base)
    beats: list[int] = []
    base.chain.on_layer = lambda: beats.append(1)
    seed = DRAWS.randrange(1 << 30)
    together = Step(base, seed).pass_through()
    assert counted.taken == [at_once] * (layers // at_once) + [layers % at_once] * (layers % at_once > 1)
    assert len(beats) == -(-layers // at_once)
    base.chain.shortcut = None
    assert all(map(torch.equal, together, Step(base, seed).pass_through()))


def lora_of(base: Base, layer: int, rank: int, targets: list[str]) -> dict[str, Any]:
    """Random bypasses of some of a layer's linears."""
    found: dict[str, Any] = {}
    for path, linear in base.linears.items():
        if base.chain.blocks[layer].holds(path) and path.rsplit(".", 1)[1] in targets:
            a = torch.randn(rank, linear.in_features) / linear.in_features**0.5
            b = torch.randn(linear.out_features, rank) / rank**0.5
            found[path] = LoRABypass(in_type(a), in_type(b), DRAWS.uniform(0.1, 1.0))
    return found


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_rows_of_adapters_give_what_the_modules_give() -> None:
    """To the rounding of bfloat16: sums are of another order."""
    base = base_of("llama", attention_bias=True)
    for layer in range(len(base.chain)):
        seed = DRAWS.randrange(1 << 30)
        count = len(Step(base, seed).positions)
        cuts = sorted(DRAWS.choices(range(count + 1), k=6))
        adapters = []
        for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
            if start < stop:
                rank, targets = DRAWS.choice([1, 3, 8, 20]), DRAWS.sample(TARGETS, DRAWS.randint(1, 7))
                adapters.append((slice(start, stop), Bypasses({}, lora_of(base, layer, rank, targets))))
        own, short = (
            Step(base, seed).run(layer, shortcut, LoraBatch(adapters)) for shortcut in (False, True)
        )
        bare = Step(base, seed).run(layer, True)
        assert own is not None and short is not None and bare is not None
        for found, want in zip(short, own, strict=True):
            assert_close(found, want)
        if any(rows.start < len(Step(base, seed).part.metadata.slot_mapping) for rows, _ in adapters):
            assert not all(map(torch.equal, short, bare))


def other_bypass() -> SequentialBypass:
    """A bypass of several, which kernels do not read."""
    return SequentialBypass([IA3Bypass(torch.ones(1)), IA3Bypass(torch.ones(1))])


def full_of(base: Base, layer: int, modules: list[str]) -> dict[str, Any]:
    """Random weights of some of a layer's linears and norms, as full fine-tunes have them."""
    fresh = fresh_replacements([f"layers.{layer}.{module}" for module in modules], base)
    found: dict[str, Any] = {}
    for place, bypass in fresh.items():
        tuned = {
            name: weight + 0.5 * torch.randn(weight.shape) / weight.shape[-1] ** 0.5
            for name, weight in bypass.parameters().items()
        }
        found[place.path] = bypass.with_parameters(tuned).in_type(numbers.dtype)
    return found


MODULES = [*(f"self_attn.{name}" for name in TARGETS[:4]), *(f"mlp.{name}" for name in TARGETS[4:])]
NORMS = ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_full_fine_tunes_give_what_the_modules_give(bias: bool) -> None:
    """Beside the base's and LoRA's, in any order; to the rounding of bfloat16."""
    base = base_of("llama", attention_bias=bias)
    for layer in range(len(base.chain)):
        seed = DRAWS.randrange(1 << 30)
        count = Step(base, seed).padding.start
        cuts = [0, *sorted(DRAWS.choices(range(count + 1), k=5)), count]
        adapters = []
        for start, stop in pairwise(cuts):
            kind = DRAWS.choice(["base", "lora", "all", "some", "both"])
            own = lora_of(base, layer, 4, TARGETS[:3]) if kind in ("lora", "both") else {}
            if kind in ("all", "some", "both"):
                some = DRAWS.sample([*MODULES, *NORMS], 4)
                own |= full_of(base, layer, [*MODULES, *NORMS] if kind == "all" else some)
            if own and start < stop:
                adapters.append((slice(start, stop), Bypasses({}, own)))
        whole, short = (
            Step(base, seed).run(layer, shortcut, LoraBatch(adapters)) for shortcut in (False, True)
        )
        assert whole is not None and short is not None
        assert_close(short[0][:, :count], whole[0][:, :count])
        for found, want in zip(short[1:], whole[1:], strict=True):
            assert_close(found, want)


def scales(width: int) -> Tensor:
    """As IA3's: in float32."""
    return 1 + 0.3 * torch.randn(width)


def ia3_of(base: Base, layer: int) -> Bypasses:
    """Scales of outputs of some of a layer's linears, and of inputs that one linear alone reads."""
    block, outputs, inputs = base.chain.blocks[layer], dict[str, Any](), dict[str, Any]()
    for path, linear in base.linears.items():
        if block.holds(path) and DRAWS.random() < 0.7:
            outputs[path] = IA3Bypass(scales(linear.out_features))
        if block.holds(path) and path.endswith(("o_proj", "down_proj")):
            inputs[path] = IA3Bypass(scales(linear.in_features))
    return Bypasses(inputs, outputs)


def bitfit_of(base: Base, layer: int) -> Bypasses:
    """Biases of a layer's linears and norms."""
    block = base.chain.blocks[layer]
    widths = {path: linear.out_features for path, linear in base.linears.items() if block.holds(path)}
    widths |= dict.fromkeys((f"{block.path}.{norm}" for norm in NORMS), base.hidden_size)
    biases = {path: 0.3 * torch.randn(width) for path, width in widths.items()}
    return Bypasses({}, {path: BitFitBypass(bias, None) for path, bias in biases.items()})


def bottleneck(width: int, inside: int, activation: Any = "relu") -> BottleneckBypass:
    down, up = torch.randn(inside, width) / width**0.5, torch.randn(width, inside) / inside**0.5
    tensors = down, 0.3 * torch.randn(inside), up, 0.3 * torch.randn(width)
    return BottleneckBypass(*(in_type(tensor) for tensor in tensors), activation)


def bottlenecks_of(base: Base, layer: int) -> Bypasses:
    path, inside = base.chain.blocks[layer].path, DRAWS.choice([1, 7, 32])
    sublayers = DRAWS.choice([["mlp"], ["self_attn", "mlp"]])
    return Bypasses({}, {f"{path}.{name}": bottleneck(base.hidden_size, inside) for name in sublayers})


def pruned_of(base: Base, layer: int) -> Bypasses:
    """Weights of a layer's linears with some of their outputs and inputs."""
    found: dict[str, Any] = {}
    for path, linear in base.linears.items():
        if base.chain.blocks[layer].holds(path):
            outs, ins = linear.out_features, linear.in_features
            has_rows, has_columns = DRAWS.choice([(True, False), (False, True), (True, True)])
            rows = kept(outs, 4) if has_rows else None
            columns = kept(ins, 32) if has_columns else None
            size = outs if rows is None else len(rows), ins if columns is None else len(columns)
            weight = in_type(torch.randn(size) / size[1] ** 0.5)
            bias = in_type(torch.randn(size[0])) if linear.placement.bias is not None else None
            found[path] = PrunedReplacement(weight, bias, width=outs, inputs=ins, rows=rows, columns=columns)
    return Bypasses({}, found)


def kept(width: int, of: int) -> Tensor:
    """Indices of units that are kept: a multiple of `of`."""
    return torch.tensor(sorted(DRAWS.sample(range(width), of * DRAWS.randint(1, width // of - 1))))


def full_and_low_rank(base: Base, layer: int) -> Bypasses:
    low_rank = lora_of(base, layer, 3, TARGETS[:3])
    return Bypasses({}, low_rank | full_of(base, layer, [*MODULES[3:], *NORMS]))


KINDS: dict[str, Callable[[Base, int], Bypasses]] = {
    "base": lambda base, layer: Bypasses(),
    "rank 1": lambda base, layer: Bypasses({}, lora_of(base, layer, 1, TARGETS[:3])),
    "rank 20": lambda base, layer: Bypasses({}, lora_of(base, layer, 20, TARGETS)),
    "full": lambda base, layer: Bypasses({}, full_of(base, layer, [*MODULES, *NORMS])),
    "both": full_and_low_rank,
    "ia3": ia3_of,
    "bitfit": bitfit_of,
    "bottleneck": bottlenecks_of,
    "pruned": pruned_of,
}


def adapters_of(base: Base, rows: int) -> LoraBatch:
    """Adapters of every kind over ranges of rows, in any order."""
    adapters = []
    cuts = [0, *sorted(DRAWS.sample(range(1, rows), len(KINDS) - 1)), rows]
    for span, kind in zip(pairwise(cuts), DRAWS.sample([*KINDS], len(KINDS)), strict=True):
        layers = [KINDS[kind](base, layer) for layer in range(len(base.chain))]
        own = Bypasses(
            {path: bypass for each in layers for path, bypass in each.inputs.items()},
            {path: bypass for each in layers for path, bypass in each.outputs.items()},
        )
        if own.outputs:
            adapters.append((slice(*span), own))
    return LoraBatch(adapters)


@pytest.mark.parametrize("threads", [1, 2])
def test_several_layers_in_one_call_take_rows_of_every_kind(threads: int) -> None:
    """The base's and those of all kinds of adapters that the kernel reads, in any order: the bits are those
    of layers one by one, and to the rounding of bfloat16 what the modules give."""
    base = base_of("llama", num_hidden_layers=3, attention_bias=True)
    counted = Counted(base)
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for chunk in (0, 3, 7):
            seed = DRAWS.randrange(1 << 30)
            count = Step(base, seed, chunk, least=len(KINDS)).padding.start
            lora = adapters_of(base, count)
            base.chain.shortcut = counted
            together = Step(base, seed, chunk, least=len(KINDS)).pass_through(lora)
            base.chain.shortcut = None
            one_by_one = Step(base, seed, chunk, least=len(KINDS)).pass_through(lora)
            assert all(map(torch.equal, together, one_by_one))
            with torch_only():
                modules_own = Step(base, seed, chunk, least=len(KINDS)).pass_through(lora)
            assert_close(together[0][:, :count], modules_own[0][:, :count])
            for found, want in zip(together[1:], modules_own[1:], strict=True):
                assert_close(found, want)
    finally:
        torch.set_num_threads(kept)
    assert counted.taken == [len(base.chain)] * 3


@pytest.mark.parametrize("store", [None, Int8KVStore])
def test_other_rows_attend_between_a_layers_halves(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of long chunks, and of a cache in eight bits; also in several layers at once."""
    monkeypatch.setattr(batched, "_SHORT", 0)
    base = base_of("llama", num_hidden_layers=3)
    counted = Counted(base)
    for chunk in (0, 3, 7):
        seed = DRAWS.randrange(1 << 30)
        count = Step(base, seed, chunk, store, len(KINDS)).padding.start
        lora = adapters_of(base, count)
        base.chain.shortcut = counted
        found = Step(base, seed, chunk, store, len(KINDS)).pass_through(lora)
        with torch_only():
            want = Step(base, seed, chunk, store, len(KINDS)).pass_through(lora)
        wide = 1e-5 if store is None else 5e-3  # a number between two of eight bits may become the other one
        assert_close(found[0][:, :count], want[0][:, :count], wide)
        for one, same in zip(found[1:], want[1:], strict=True):
            assert_close(one, same, wide)
    assert counted.taken == [len(base.chain)] * 3


def test_a_long_sequence_beside_short_chunks_makes_no_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row would have a line as long as its pages."""
    part = Step(base_of(), DRAWS.randrange(1 << 30), chunk=3).part
    assert part.metadata.are_short(1)
    monkeypatch.setattr(batched, "_CELLS", part.metadata.cells - 1)
    assert not part.metadata.are_short(1) and "alone" not in vars(part.metadata)


def test_many_rows_are_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few adapters: with more full fine-tunes their calls take longer, which LoRA's do not."""
    base = base_of()
    seed = DRAWS.randrange(1 << 30)
    monkeypatch.setattr(native_layer, "MOST_ROWS", 0)
    rows = len(Step(base, seed).positions)
    work = rows * PANELS["hidden_size"] * PANELS["intermediate_size"]
    monkeypatch.setattr(native_layer, "_WORK", work // 5 - 1)
    assert Step(base, seed).run(0, True) is None
    for count, is_taken in ((1, False), (2, True)):
        own = [(slice(0, 0), Bypasses({}, full_of(base, 0, MODULES)))] * count
        own += [(slice(0, 0), Bypasses({}, lora_of(base, 0, 4, TARGETS)))] * 3
        assert (Step(base, seed).run(0, True, LoraBatch(own)) is not None) == is_taken


def test_rows_of_a_full_fine_tune_are_the_fine_tuned_layer() -> None:
    """Its own model's layer, with the same pages."""
    base, other = base_of(), base_of()
    own = full_of(base, 1, MODULES)
    for path, bypass in own.items():
        other.linears[path].placement = place_locally(bypass.weight, bypass.bias)
    for place, bypass in fresh_replacements([f"layers.1.{name}" for name in NORMS], base).items():
        doubled = 2 * bypass.parameters()["weight"]  # factors of two are rounded nowhere
        own[place.path] = bypass.with_parameters({"weight": doubled})
        other.model.get_submodule(place.path).weight = torch.nn.Parameter(in_type(doubled), False)
    for _ in range(3):
        seed = DRAWS.randrange(1 << 30)
        step = Step(base, seed)
        batch = step.padding.start
        found = step.run(1, True, LoraBatch([(slice(0, batch), Bypasses({}, own))]))
        want = Step(other, seed).run(1, True)
        assert found is not None and want is not None
        assert_close(found[0][:, :batch], want[0][:, :batch])
        for one, same in zip(found[1:], want[1:], strict=True):
            assert_close(one, same)


def test_what_other_layers_have_is_nothing_to_a_layer() -> None:
    base = base_of()
    seed, path = DRAWS.randrange(1 << 30), "model.layers.0.mlp.down_proj"
    own = LoraBatch([(slice(0, 1), Bypasses({path: other_bypass()}, full_of(base, 0, MODULES)))])
    assert Step(base, seed).run(0, True, own) is None
    found, bare = Step(base, seed).run(1, True, own), Step(base, seed).run(1, True)
    assert found is not None and bare is not None and all(map(torch.equal, found, bare))


def test_rows_of_other_adapters_take_no_shortcut() -> None:
    base = base_of()
    seed = DRAWS.randrange(1 << 30)
    plain = lora_of(base, 0, 4, TARGETS)
    assert Step(base, seed).run(0, True, LoraBatch([(slice(0, 1), Bypasses({}, plain))])) is not None
    path = next(iter(plain))
    layer, inner = "model.layers.0", PANELS["intermediate_size"]
    ones, entered = IA3Bypass(torch.ones(PANELS["hidden_size"])), IA3Bypass(torch.ones(inner))
    for own in (
        Bypasses({}, {**plain, path: other_bypass()}),
        Bypasses({path: ones}, {}),  # other linears read the same input
        Bypasses({f"{layer}.mlp": ones}, {}),
        Bypasses({}, {f"{layer}.mlp": ones}),
        Bypasses({}, {f"{layer}.mlp": bottleneck(PANELS["hidden_size"], 8, "gelu")}),
        Bypasses({f"{layer}.mlp.down_proj": SequentialBypass([entered, entered])}, {}),
    ):
        assert Step(base, seed).run(0, True, LoraBatch([(slice(0, 1), own)])) is None
    other = torch.bfloat16 if numbers.is_wide else torch.float32
    wide = {path: LoRABypass(one.a.to(other), one.b.to(other), 1.0) for path, one in plain.items()}
    assert Step(base, seed).run(0, True, LoraBatch([(slice(0, 1), Bypasses({}, wide))])) is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),  # its queries and keys are normalised
        ("gemma", {}),  # another activation
        ("llama", {"intermediate_size": 144}),  # no whole panels
        ("llama", {"head_dim": 8, "num_attention_heads": 2}),
    ],
)
def test_other_layers_have_no_shortcut(name: str, changes: dict[str, Any]) -> None:
    assert all(block.shortcut is None for block in base_of(name, **changes).chain)


@pytest.mark.parametrize(("kernel", "short"), [("decode_layers", batched._SHORT), ("layer_end", 0)])
def test_a_kernel_that_gives_something_else_refuses_the_base(
    kernel: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more rows than the experiment has: one of the proof's is another's."""
    own = getattr(native_layer, kernel)

    def mix(*args: Any) -> Tensor:
        out: Tensor = own(*args)
        if out.shape[1] > 8:
            out[:, 9] = out[:, 8]
        return out

    monkeypatch.setattr(native_layer, kernel, mix)
    monkeypatch.setattr(batched, "_SHORT", short)
    with pytest.raises(UnsupportedModel, match="1 of 11 rows of layer 0"):
        base_of()


def test_other_types_have_no_shortcut() -> None:
    base = load_base(tiny("llama", torch.float64, **PANELS))
    assert all(block.shortcut is None for block in base.chain)


@pytest.mark.parametrize("change", ["attention", "eps", "residual"])
def test_a_layer_that_does_something_else_is_not_recognised(change: str) -> None:
    base = base_of()
    block = base.chain.blocks[0]
    layer: Any = block.module
    if change == "attention":
        attention = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, **kwargs: (attention(*args, **kwargs)[0] / 2, None)
    elif change == "eps":
        layer.post_attention_layernorm.variance_epsilon = 1.0  # not what its kernel has
    else:
        own = block._forward
        block._forward = lambda hidden, *args, **kwargs: own(hidden, *args, **kwargs) + hidden
    find_whole_layers(base, NativeLayer)
    assert block.shortcut is None
    assert base.chain.blocks[1].shortcut is not None


class Training:
    """Rows that are no answers."""

    count, keeper = 0, None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise AssertionError("the kernel has none of these")


def test_answers_with_pages_in_two_backends_pass_together() -> None:
    """As those of a base and of a chain that has some of its layers do."""
    base = base_of()
    shortcut = base.chain.blocks[0].shortcut
    assert shortcut is not None
    steps = [Step(base, DRAWS.randrange(1 << 30)) for _ in range(2)]
    calls = [base.prologue(torch.zeros_like(step.positions), step.positions)[1] for step in steps]
    alone = []
    with torch.no_grad():
        for step, own in zip(steps, calls, strict=True):
            with base.cell.set(FusedRows([step.part], [], padding=step.padding)):
                alone.append(shortcut(step.hidden, own[0]))
        with base.cell.set(FusedRows([step.part for step in steps], [])):
            together = shortcut(
                torch.cat([step.hidden for step in steps], 1), base.arguments.concat(calls)[0]
            )
    assert together is not None
    parts = torch.split(together, [step.hidden.shape[1] for step in steps], 1)
    for step, expected, found in zip(steps, alone, parts, strict=True):
        assert expected is not None
        rows = slice(0, step.padding.start)
        torch.testing.assert_close(found[0, rows], expected[0, rows], atol=2e-2, rtol=2e-2)


def test_other_rows_take_no_shortcut() -> None:
    base = base_of()
    shortcut = base.chain.blocks[0].shortcut
    assert shortcut is not None
    seed = DRAWS.randrange(1 << 30)
    assert Step(base, seed).run(0, True) is not None
    with torch_only():
        assert Step(base, seed).run(0, True) is None
    step = Step(base, seed)
    _, calls = base.prologue(torch.zeros_like(step.positions), step.positions)
    assert shortcut(step.hidden, calls[0]) is None, "nobody's rows are in the cell"
    path = "model.layers.0.mlp"
    other = Bypasses({}, {path: other_bypass()})
    with torch.no_grad(), base.cell.set(FusedRows([step.part], [(slice(0, 1), other)])):
        assert shortcut(step.hidden, calls[0]) is None
    with torch.enable_grad(), base.cell.set(FusedRows([step.part], [])):
        assert shortcut(step.hidden, calls[0]) is None
    two = FusedRows([step.part, Training()], [])
    with torch.no_grad(), base.cell.set(two):
        assert shortcut(step.hidden, calls[0]) is None
    with torch.no_grad(), base.cell.set(FusedRows([step.part], [])):
        assert shortcut(step.hidden, calls[0]) is not None
        assert (
            shortcut(step.hidden.to(torch.bfloat16 if numbers.is_wide else torch.float32), calls[0]) is None
        )
        assert shortcut(step.hidden.repeat(1, 65, 1), calls[0]) is None
