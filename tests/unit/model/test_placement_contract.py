"""The contract of placements: a new one is added to `MAKERS`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from coserve.core.sequence import Direction
from coserve.errors import NotOffered
from coserve.model.batch import BatchCell
from coserve.model.block import Block
from coserve.model.linear import FrozenLinear, frozen
from coserve.model.placement import Offer, PackedPlacement, Placement, PlainPlacement, place_locally
from coserve.model.quantized.int8 import Int8Placement
from coserve.model.quantized.nf4 import NF4Placement, place_in_nf4
from coserve.model.sharded.placement import RowShard
from coserve.parallel.ranks import ALONE
from coserve.split.address import Address
from coserve.split.endpoint import Endpoint
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import VERSION, BaseHello, Dtype, GroupShape
from coserve.split.placement import RemotePlacement
from coserve.split.service import SplitService
from coserve.streamed.ring import Ring, Streamed
from coserve.streamed.scratch import ScratchFile
from coserve.streamed.stored import ReadBuffer, store
from later import Elsewhere, LaterPlacement

OUT, IN = 96, 128
VISITS = ExitStack()


def later(weight: Tensor, bias: Tensor | None) -> Placement:
    """Alone in its group."""
    return LaterPlacement(Elsewhere(), "own", PlainPlacement(weight, bias))


def sibling(weight: Tensor, bias: Tensor | None) -> Placement:
    """One of three that are asked in one call."""
    place = Elsewhere()
    others = [
        LaterPlacement(place, path, PlainPlacement(weight[:n], None)) for path, n in (("a", 3), ("b", 8))
    ]
    own = LaterPlacement(place, "own", Int8Placement(weight, bias))
    joined = others[0].group.joined([own.group, others[1].group])
    assert joined is not None and list(joined.outputs) == ["a", "own", "b"]
    for placement in (own, *others):
        placement.group = joined
    return own


def streamed(weight: Tensor, bias: Tensor | None) -> Placement:
    """Its tensors are in a buffer, read from a file, for a visit that ends with the test."""
    placement, layer = place_locally(weight, bias), nn.Module()
    layer.up = FrozenLinear("up", placement, (OUT, IN), BatchCell())
    block = Block("layers.0", layer)
    block.stream(Streamed(Ring({0: store(block, ReadBuffer(0), [], ScratchFile(""))}, 2), 0))
    VISITS.enter_context(block.visit(Direction.INFER))
    return placement


class _Linears(BaseLinears):
    """Linears of an executor that are given as placements."""

    def __init__(self, placements: Mapping[str, PlainPlacement]) -> None:
        self._placements, self.device = dict(placements), torch.device("cpu")
        weights = {path: own.weight() for path, own in placements.items()}
        dtype = str(weights["own"].dtype).removeprefix("torch.")
        shape = GroupShape(IN, {path: len(weight) for path, weight in weights.items()})
        self.hello = BaseHello(VERSION, "own", cast(Dtype, dtype), (shape,))


def asked(placements: Mapping[str, PlainPlacement]) -> dict[str, RemotePlacement]:
    """Placements that ask an executor over a socket, until the test ends."""
    executor = BaseExecutor(_Linears(placements))
    folder = VISITS.enter_context(TemporaryDirectory())
    service = SplitService(executor, Address(path=f"{folder}/base.sock"))
    endpoint = Endpoint(str(service.address))
    for close in (executor.close, service.close, endpoint.close):
        VISITS.callback(close)
    (shape,) = endpoint.base.groups
    return {
        path: RemotePlacement(endpoint, shape, path, placement.bias is not None)
        for path, placement in placements.items()
    }


def remote(weight: Tensor, bias: Tensor | None) -> Placement:
    own = asked({"own": PlainPlacement(weight, bias)})["own"]
    own.hidden_weight = lambda: weight  # type: ignore[attr-defined]
    return own


def remote_sibling(weight: Tensor, bias: Tensor | None) -> Placement:
    """One of three that an executor is asked for in one call."""
    placements = {path: PlainPlacement(weight[:n], None) for path, n in (("a", 3), ("b", 8))}
    found = asked({**placements, "own": PlainPlacement(weight, bias)})
    joined = found["a"].group.joined([found["own"].group, found["b"].group])
    assert joined is not None and list(joined.outputs) == ["a", "own", "b"]
    for placement in found.values():
        placement.group = joined
    found["own"].hidden_weight = lambda: weight  # type: ignore[attr-defined]
    return found["own"]


@pytest.fixture(autouse=True)
def end_visits() -> Iterator[None]:
    yield
    VISITS.close()


def cut(weight: Tensor, bias: Tensor | None) -> Placement:
    """All of it, as the part of a rank that is alone."""
    placement = RowShard(PlainPlacement(weight, bias), ALONE)
    placement.hidden_weight = placement._own.weight  # type: ignore[attr-defined]
    return placement


MAKERS: Mapping[str, Callable[[Tensor, Tensor | None], Placement]] = {
    "plain": PlainPlacement,
    "local": place_locally,  # packed, where the processor multiplies bfloat16
    "8bit": Int8Placement,
    "4bit": place_in_nf4,
    "4bit, plain order": NF4Placement,
    "streamed": streamed,
    "later": later,
    "sibling": sibling,
    "remote": remote,
    "remote sibling": remote_sibling,
    "cut": cut,
}
MOST = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}  # relative error of a product

kinds = pytest.mark.parametrize("kind", MAKERS)
dtypes = pytest.mark.parametrize("dtype", MOST, ids=str)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(kind: str, dtype: torch.dtype, bias: bool = True) -> tuple[Placement, Tensor, Tensor | None]:
    """A placement, the weight it was given, and its bias."""
    if kind.startswith("remote") and dtype == torch.float64:
        pytest.skip("executors have no float64")
    weight, offset = drawn(0, OUT, IN, dtype=dtype), drawn(1, OUT, dtype=dtype) if bias else None
    return MAKERS[kind](weight.clone(), offset), weight, offset


def dense_of(placement: Placement) -> Tensor:
    """The weight that it multiplies by, whether it offers that or not."""
    return placement.weight() if Offer.WEIGHT in placement.offers else placement.hidden_weight()  # type: ignore[attr-defined]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@kinds
@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (17,), (2, 3, 4), (1, 65)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_those_of_the_dense_weight(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    """By each of the ways that few and many rows take. The oracle is autograd of the dense weight."""
    placement, _, offset = made(kind, dtype, bias)
    dense = dense_of(placement)
    x, grad = drawn(2, *shape, IN, dtype=dtype), drawn(3, *shape, OUT, dtype=dtype)
    given = x.double().clone().requires_grad_()
    wanted = torch.nn.functional.linear(given, dense.double(), None if offset is None else offset.double())
    (wanted_back,) = torch.autograd.grad(wanted, given, grad.double())
    y = placement.forward(x)
    assert y.shape == (*shape, OUT) and y.dtype == dtype and not y.requires_grad
    assert error(y, wanted.detach()) < MOST[dtype]
    back = placement.backward(grad)
    (in_graph,) = torch.autograd.grad(frozen(leaf := x.clone().requires_grad_(), placement), leaf, grad)
    assert back.shape == x.shape and back.dtype == dtype and torch.equal(back, in_graph)
    assert error(back, wanted_back) < MOST[dtype]


@kinds
def test_inputs_stay_as_they_are(kind: str) -> None:
    """Products scale and shift in place, but not what they were given; strided rows are rows like others."""
    placement, _, _ = made(kind, torch.float32)
    for rows in (2, 40):
        x, grad = drawn(2, rows, 2 * IN)[:, ::2], drawn(3, rows, OUT)
        before = x.clone(), grad.clone()
        y = placement.forward(x)
        placement.backward(grad)
        assert torch.equal(x, before[0]) and torch.equal(grad, before[1])
        assert error(y, placement.forward(x.contiguous())) < 1e-6


@kinds
@dtypes
def test_row_norms(kind: str, dtype: torch.dtype) -> None:
    placement, _, _ = made(kind, dtype)
    if Offer.ROW_NORMS not in placement.offers:
        pytest.skip("norms of rows are not offered")
    norms = placement.row_norms()
    assert norms.shape == (OUT,) and norms.dtype == torch.promote_types(dtype, torch.float32)
    assert error(norms, dense_of(placement).double().norm(dim=1)) < (2e-3 if dtype.itemsize == 2 else 1e-6)


@kinds
@dtypes
def test_weights_are_what_was_given_as_the_placement_holds_it(kind: str, dtype: torch.dtype) -> None:
    placement, weight, offset = made(kind, dtype)
    held = dense_of(placement)
    assert held.shape == weight.shape and held.dtype == dtype
    assert error(held, weight) < 0.1
    assert Offer.WEIGHT not in placement.offers or torch.equal(placement.rounded(weight), held)
    assert placement.bias is None if offset is None else torch.equal(placement.bias, offset)


@kinds
@dtypes
def test_bytes_are_those_of_its_tensors_and_the_way_back_keeps_none(kind: str, dtype: torch.dtype) -> None:
    placement, weight, offset = made(kind, dtype)
    assert offset is not None
    before = placement.nbytes
    assert before == sum(tensor.nbytes for tensor in placement.tensors().values())
    if placement.group is not None:
        assert before == 0
    elif isinstance(placement, Int8Placement | NF4Placement):
        assert OUT * IN // 2 < before < OUT * IN * 2
    else:
        assert before == weight.nbytes + offset.nbytes
    placement.backward(drawn(3, 2, OUT, dtype=dtype))
    assert placement.nbytes == before
    assert (placement.backward_nbytes > 0) == isinstance(placement, PackedPlacement)


@kinds
def test_what_is_offered_is_there(kind: str) -> None:
    placement, _, _ = made(kind, torch.float32)
    asked: dict[Offer, Callable[[], Tensor]] = {
        Offer.BACKWARD: lambda: placement.backward(torch.ones(1, OUT)),
        Offer.ROW_NORMS: placement.row_norms,
        Offer.WEIGHT: placement.weight,
    }
    assert asked.keys() == set(Offer)
    for offer, ask in asked.items():
        if offer in placement.offers:
            placement.expect(offer, "up")
            assert isinstance(ask(), Tensor)
        else:
            with pytest.raises(NotOffered, match=f"up .*{offer.value}"):
                placement.expect(offer, "up")
            with pytest.raises(NotOffered, match=offer.value):
                ask()


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        *((kind, ("own",)) for kind in ("later", "remote")),
        *(
            (kind, paths)
            for kind in ("sibling", "remote sibling")
            for paths in (("own",), ("b", "a"), ("a", "own", "b"))
        ),
    ],
)
@dtypes
def test_groups_answer_for_those_that_are_asked(
    kind: str, paths: tuple[str, ...], dtype: torch.dtype
) -> None:
    """In the order in which they are asked, in tensors of the caller's own; gradients add up."""
    group = made(kind, dtype)[0].group
    assert group is not None
    x = drawn(2, 1, 5, IN, dtype=dtype)
    products = group.launch(x, paths).result()
    alone = [group.launch(x, [path]).result()[0] for path in paths]
    for path, product, own in zip(paths, products, alone, strict=True):
        assert product.shape == (1, 5, group.outputs[path]) and product.is_contiguous()
        assert torch.equal(product, own)
        product.zero_()
    assert all(torch.equal(*pair) for pair in zip(group.launch(x, paths).result(), alone, strict=True))
    grads = {path: drawn(3, 1, 5, group.outputs[path], dtype=dtype) for path in paths}
    found = group.launch_backward(grads).result()
    parts = [group.launch_backward({path: grad}).result() for path, grad in grads.items()]
    assert found.shape == x.shape and found.dtype == dtype
    assert error(found, sum(parts, start=torch.zeros_like(x))) < MOST[dtype]


@pytest.mark.parametrize("kind", ["later", "sibling"])
def test_groups_raise_what_kept_an_answer_from_coming(kind: str) -> None:
    group = made(kind, torch.float32)[0].group
    assert group is not None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        group.launch(drawn(0, 1, 2, IN + 1), ["own"]).result()
