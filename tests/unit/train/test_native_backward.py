"""The way back through a layer by kernels gives the gradients that the layer's modules give under autograd;
weights, examples, cuts and gradients are drawn anew in every run."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Bypasses
from coserve.adapters.lowrank import DroppingLoRA, LoRABypass
from coserve.adapters.methods.ia3 import IA3Bypass
from coserve.core.sequence import Span
from coserve.kernels.dropout import Mask
from coserve.kernels.native.build import library, torch_only
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.load import load_base
from coserve.train import backward, native_backward
from coserve.train.activations import ActivationStore
from coserve.train.backward import Backward, BackwardWindow, LayerGradients, layer_gradients
from coserve.train.pause import LayerAbandoned
from coserve.train.save_policy import Fate, Fates
from coserve.train.window_group import ForwardWindow, KeptRows
from models import PANELS, VOCABULARY, tiny

DRAWS = random.Random()
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

found_library = library(torch.float32)
if found_library is None or not found_library.panel_outputs():
    pytest.skip("there is no kernel of products", allow_module_level=True)


@cache
def base_of(name: str = "llama", dtype: torch.dtype = torch.float32) -> Base:
    return load_base(tiny(name, dtype, **PANELS))


def lora_of(base: Base, rank: int, targets: Collection[str], layers: range) -> dict[str, Bypass]:
    """Random bypasses whose matrices train."""
    found: dict[str, Bypass] = {}
    for path, site in base.sites.items():
        if path.split(".")[-1] in targets and site.stage in layers:
            a, b = torch.randn(rank, site.inputs) / site.inputs**0.5, torch.randn(site.outputs, rank)
            matrices = (x.to(base.dtype).requires_grad_() for x in (a, 0.3 * b / rank**0.5))
            found[path] = LoRABypass(*matrices, DRAWS.uniform(0.2, 1.0))
    return found


@dataclass
class Job:
    """A job's micro-batch of examples of these lengths after its forward pass, on its way back in windows cut
    at these rows; the gradient of the last layer's output is random, and zero in some rows."""

    base: Base
    bypasses: Bypasses
    lengths: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    fates: Fates = field(default_factory=Fates)

    def __post_init__(self) -> None:
        rows, base = sum(self.lengths), self.base
        tokens = torch.randint(1, VOCABULARY, (rows,))
        self.store = ActivationStore(base, self.lengths, tokens, tokens.roll(-1), self.fates)
        leaves: dict[int, tuple[Tensor, ...]] = {}
        for path, bypass in self.bypasses.outputs.items():
            stage = base.sites[path].stage
            leaves[stage] = (*leaves.get(stage, ()), *bypass.parameters().values())
        self.backward = Backward(self.store, leaves, lambda leaf, gradient: None)
        borders = [0, *self.cuts, rows]
        windows = [self.store.window(a, b - a) for a, b in pairwise(borders)]
        with torch.no_grad():
            for window in windows:
                parts = FusedRows([KeptRows([(self.store, window)])], [(slice(window.rows), self.bypasses)])
                calls = self.store.calls_for(window)
                going = ForwardWindow(range(base.depth), self.store, window, self.bypasses, calls)
                base.chain.forward([going], compose=lambda _, own=(parts, calls): own)  # type: ignore[misc]
        gradient = torch.randn(rows, base.hidden_size, dtype=base.dtype)
        gradient[torch.rand(rows) < 0.2] = 0
        whole = self.store.window(0, rows)
        self.store.hidden.save(base.depth - 1, whole, gradient)
        span = Span(0, base.depth)
        self.windows = [self.backward.start(window, span, self.bypasses) for window in windows]


def drawn_job(base: Base, layers: range | None = None, **fields: object) -> Job:
    lengths = tuple(DRAWS.choice([1, 2, 5, 16, 16, 33]) for _ in range(DRAWS.randint(1, 4)))
    cuts = tuple(sorted(DRAWS.sample(range(1, sum(lengths)), DRAWS.randint(0, min(2, sum(lengths) - 1)))))
    # A row that attends to itself alone has nothing but rounding for gradients of queries and keys.
    targets = {DRAWS.choice(LINEARS[2:]), *DRAWS.sample(LINEARS, DRAWS.randint(0, 7))}
    own = lora_of(base, DRAWS.choice([1, 3, 8, 17]), targets, layers or range(base.depth))
    return Job(base, Bypasses({}, own), lengths, cuts, **fields)  # type: ignore[arg-type]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each pass through a layer, whether it was by kernels."""
    found: list[bool] = []
    real = backward.native_gradients

    def noting(*given: object) -> list[Tensor] | None:
        gradients = real(*given)  # type: ignore[arg-type]
        found.append(gradients is not None)
        return gradients

    monkeypatch.setattr(backward, "native_gradients", noting)
    return found


def by_modules(
    monkeypatch: pytest.MonkeyPatch, layer: int, group: Sequence[BackwardWindow]
) -> list[LayerGradients]:
    with monkeypatch.context() as patch:
        patch.setattr(backward, "recognised", lambda *_: None)
        return layer_gradients(layer, group)


def tensors(found: LayerGradients) -> Iterator[Tensor | None]:
    yield from (*found.leaves, *found.past, found.input)


def expect_close(found: Sequence[LayerGradients], wanted: Sequence[LayerGradients]) -> None:
    """Relative to the largest number of a window's matrices, or of the gradient itself: those of queries that
    have nothing to choose are zero but for rounding."""
    for own, want in zip(found, wanted, strict=True):
        least = max((float(b.abs().max()) for b in want.leaves if b is not None), default=0.0)
        for a, b in zip(tensors(own), tensors(want), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.shape == b.shape and a.dtype is b.dtype
                assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), least)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("jobs", "most"), [(1, 0), (1, 500), (4, 0), (4, 500)])
def test_gradients_are_those_of_the_modules(
    name: str, jobs: int, most: int, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window by window from the right, so that keys and values of each have gradients from later ones; in all
    layers, of which the lowest that trains needs none for its input."""
    monkeypatch.setattr(native_backward, "MOST_ROWS", most)  # that pass in three calls
    base = base_of(name)
    for _ in range(3):
        group = [drawn_job(base) for _ in range(jobs)]
        passes = 0
        while windows := [job.windows.pop() for job in group if job.windows]:
            for layer in reversed(range(base.depth)):
                together = [w for w in windows if w.needs_input_grad(layer) is (layer > 0)]
                wanted = by_modules(monkeypatch, layer, together)
                found = layer_gradients(layer, together)
                passes += 1
                expect_close(found, wanted)
                for window, gradients in zip(together, found, strict=True):
                    window.accumulate(layer, gradients)
        assert taken == [True] * passes and passes
        taken.clear()


@pytest.mark.parametrize("kept", [Fate.KEPT, Fate.SUM])
def test_kept_outputs_are_read_and_not_computed_again(
    kept: Fate, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of()
    fates = Fates(dict.fromkeys(base.linears, kept), dict.fromkeys(range(base.depth), Fate.KEPT))
    job = drawn_job(base, fates=fates)
    wanted = by_modules(monkeypatch, 1, job.windows[-1:])
    placement = base.linears["model.layers.1.mlp.up_proj"].placement
    with monkeypatch.context() as patch:
        patch.setattr(type(placement), "forward", None)
        found = layer_gradients(1, job.windows[-1:])
    expect_close(found, wanted)
    assert taken == [True]


def test_a_layer_without_bypasses_passes_gradients_on(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above one that has some."""
    job = drawn_job(base_of(), range(1))
    wanted = by_modules(monkeypatch, 1, job.windows[-1:])
    expect_close(layer_gradients(1, job.windows[-1:]), wanted)
    assert taken == [True]


def other_bypasses(base: Base) -> dict[str, dict[str, Bypass]]:
    """Bypasses of layer 1 with which it goes back through its modules."""
    path = "model.layers.1.mlp.up_proj"
    lora = lora_of(base, 4, ["up_proj"], range(1, 2))[path]
    assert isinstance(lora, LoRABypass)
    width = base.sites[path].outputs
    return {
        "dropout": {path: DroppingLoRA(lora, Mask(0.5, "drawn", 0))},
        "a bias": {path: replace(lora, bias=torch.randn(width).requires_grad_())},
        "a scale": {path: IA3Bypass(torch.randn(width).requires_grad_())},
        "a norm's": {"model.layers.1.input_layernorm": IA3Bypass(torch.randn(128).requires_grad_())},
    }


@pytest.mark.parametrize("kind", ["dropout", "a bias", "a scale", "a norm's"])
def test_other_bypasses_go_back_through_modules(kind: str, taken: list[bool]) -> None:
    """Also beside a job whose bypasses kernels take; in other layers they keep nobody from it."""
    base = base_of()
    job = Job(base, Bypasses({}, other_bypasses(base)[kind]), (20,))
    plain = drawn_job(base, range(1, 2))
    layer_gradients(1, [plain.windows[-1], job.windows[-1]])
    assert not taken
    layer_gradients(2, [plain.windows[-1], job.windows[-1]])
    assert taken == [True]


def test_changed_inputs_go_back_through_modules(taken: list[bool]) -> None:
    base, path = base_of(), "model.layers.1.mlp.down_proj"
    scale = IA3Bypass(torch.randn(base.sites[path].inputs).requires_grad_())
    lora = lora_of(base, 4, ["q_proj"], range(base.depth))
    job = Job(base, Bypasses({path: scale}, lora), (20,))
    layer_gradients(1, job.windows)
    assert not taken


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float64), ("gemma2", torch.float32)])
def test_other_layers_go_back_through_modules(name: str, dtype: torch.dtype, taken: list[bool]) -> None:
    layer_gradients(1, drawn_job(base_of(name, dtype)).windows[-1:])
    assert not taken


def test_without_kernels_layers_go_back_through_modules(taken: list[bool]) -> None:
    job = drawn_job(base_of())
    with torch_only():
        layer_gradients(1, job.windows[-1:])
    assert True not in taken


@pytest.mark.parametrize("by_products", [True, False])
def test_an_arrival_can_abandon_the_layer_between_any_two_products(
    by_products: bool, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the windows can go back through it after that."""
    monkeypatch.setattr(native_backward, "MOST_ROWS", 0 if by_products else 64)
    job, calls = Job(base := base_of(), Bypasses({}, lora_of(base, 3, LINEARS, range(3))), (20, 7)), []
    wanted = layer_gradients(1, job.windows[-1:], lambda: calls.append(1))
    # Of linears keys and values are stored, and down's output is not needed.
    assert len(calls) == (4 + 7 + 3 if by_products else 3)
    for last in range(len(calls)):
        left = iter(range(last))

        def check(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise LayerAbandoned

        with pytest.raises(LayerAbandoned):
            layer_gradients(1, job.windows[-1:], check)
    taken.clear()
    expect_close(layer_gradients(1, job.windows[-1:]), wanted)
    assert taken == [True]
