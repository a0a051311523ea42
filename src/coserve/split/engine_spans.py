"""Spans in an engine's base, which are one call each in steps where no row has an adapter inside.

The engine attends with its own keys and values, so a layer cannot be one call as a whole; what lies between
its attention and the next layer's can. A layer's own modules run up to the linear where attention ends. There
the span is called, the rest of the layer is left out, and the next layer's first linears find their products
computed. An adapter at these adds its part here: their input is computed here too.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import Kind, Sites
from coserve.errors import AdapterMismatch, UnsupportedModel
from coserve.kernels.native import ops
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block, Call
from coserve.model.layer_experiment import LayerExperiment
from coserve.model.linear import FrozenLinear
from coserve.model.placement import Placement
from coserve.split.calls import Source
from coserve.split.messages import SpanShape
from coserve.split.native_spans import NativeAttention
from coserve.split.remote_group import RemoteSpan
from coserve.split.span_calls import TOLERANCE, SpanCall
from coserve.split.spans import digest_beside, is_close

_log = logging.getLogger(__name__)
Offers = Sequence[tuple[Source, SpanShape]]


def put_module_spans(model: PreTrainedModel, offered: Offers, sites: Sequence[str], cell: BatchCell) -> None:
    """Makes one call of each module that sources offer; `sites` are paths where adapters may be."""
    for source, shape in offered:
        module = model.get_submodule(shape.path)
        if "forward" not in vars(module):
            inside = {*shape.linears, *(path for path in sites if path.startswith(f"{shape.path}."))}
            module.forward = EngineModule(module, RemoteSpan(source, shape), sorted(inside), cell)


class EngineModule(SpanCall):
    """The call of a module such as a feed-forward layer, where the rows of a run have no adapter inside, and
    no outputs are to be kept."""

    def __init__(self, module: nn.Module, remote: RemoteSpan, inside: Sequence[str], cell: BatchCell) -> None:
        """`inside` are paths of modules where adapters may be."""
        super().__init__(module, remote)
        self._inside, self._cell = tuple(inside), cell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, module = self._cell.rows, self.module
        if kwargs or len(args) != 1 or not isinstance(rows, FusedRows) or not rows.is_bare(self._inside):
            return self.own(module, *args, **kwargs)
        return self.answer(
            args[0],
            lambda: self.own(module, *args),
            lambda x: self.remote.forward([x], rows.is_training)[0],
        )


def put_attention_spans(base: Base, offered: Offers) -> None:
    """Has the base's layers be one call each, where sources offer what lies between their attention. Raises
    AdapterMismatch for what cannot lie between layers of this base."""
    linears, blocks = base.linears, {block.path: number for number, block in enumerate(base.chain)}
    run, cut, following = LayerRun(), dict[int, CutLayer](), dict[int, list[_Following]]()
    for source, shape in offered:
        number = blocks.get(next(iter(shape.layers), ""))
        both = [] if number is None else base.chain.blocks[number : number + len(shape.layers)]
        if number is None or [own.path for own in both] != [*shape.layers] or not _fits(shape, base):
            raise AdapterMismatch(f"the span {shape.path} of {source.address} is none of this base")
        block, first = both[0], linears[shape.linears[0]]
        if block.shortcut is not None or any(
            shape.layers[own.path] != digest_beside(own.module) for own in both
        ):
            continue
        own = CutLayer(block, RemoteSpan(source, shape), _inside(base.sites, shape), base, run)
        block.shortcut = cut[number] = own
        _replace(first, _Output(first, own, run))
        following[number + 1] = [_Following(linears[path], own, run) for path in shape.following]
        for path, follower in zip(shape.following, following[number + 1], strict=True):
            _replace(linears[path], follower)
    for number in cut.keys() & following.keys():
        cut[number].entering = following[number]
    _find_attention(base, cut)


@torch.no_grad()
def _find_attention(base: Base, cut: Mapping[int, "CutLayer"]) -> None:
    """Has kernels attend in those layers whose attention they compute."""
    if base.dtype is torch.float32 or not any(map(ops.takes, base.model.parameters())):
        return
    experiment = LayerExperiment(base)
    for number, own in cut.items():
        if own.entering:
            own.attention = NativeAttention.find(experiment, base, number, own.try_attention)


def _fits(shape: SpanShape, base: Base) -> bool:
    """Tells whether its linears are the base's and have these widths."""
    linears, width = base.linears, base.hidden_size
    if not {*shape.linears} <= linears.keys():
        return False
    products = [linears[path].out_features for path in shape.following]
    inputs = (width, linears[shape.linears[0]].in_features)
    return shape.inputs == inputs and shape.outputs == (width, *products)


def _replace(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _inside(sites: Sites, shape: SpanShape) -> tuple[str, ...]:
    """Paths at which an adapter would change the span's results: its linears but for those that follow, and
    all sites that are no linears in its layers."""
    own = shape.linears[: len(shape.linears) - len(shape.following)]
    stage = sites[own[0]].stage
    stages = range(stage, stage + len(shape.layers))
    others = (path for path, site in sites.items() if site.kind is not Kind.LINEAR and site.stage in stages)
    return (*own, *others)


class LayerRun(threading.local):
    """The run of a layer under way on this thread.

    `cut` is the layer whose run ends where its attention does; one that is only watched goes on, and `seen`
    is what attention gave. `products` are those of this layer's first linears that came with the span before
    it, random ones in a trial; `ahead` the same for the layer whose input is `output`.
    """

    cut: "CutLayer | None" = None
    is_watched: bool = False
    is_trial: bool = False
    seen: Tensor | None = None
    output: Tensor | None = None
    ahead: Mapping[str, Tensor] = {}

    def __init__(self) -> None:
        self.products: dict[str, Tensor] = {}

    def begin(self, hidden: Tensor) -> None:
        """A layer begins with this input: products that were computed for another one are of no use."""
        self.products = dict(self.ahead) if self.output is hidden else {}
        self.output, self.ahead = None, {}


class CutLayer:
    """A block's shortcut: the layer up to the end of its attention, and the span after.

    The first rows go both ways: where a result differs (another activation), the layer goes its own way from
    then on. `is_same` tells what was found, None before. `entering` are the linears with which its attention
    begins, where another span computes them; `attention` is a faster way from their products to the end of
    attention.
    """

    def __init__(
        self,
        block: Block,
        remote: RemoteSpan,
        inside: tuple[str, ...],
        base: Base,
        run: LayerRun,
    ) -> None:
        """`inside` are paths of modules where no row may have a bypass."""
        self._block, self._remote, self._run = block, remote, run
        self._inside, self._cell = inside, base.cell
        self._following = remote.shape.following  # linears whose inputs no row may change
        self.is_same: bool | None = None
        self.entering: Sequence[_Following] = ()
        self.attention: NativeAttention | None = None

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where a row has an adapter inside, outputs are
        to be kept, or the span is not the layer's."""
        self._run.begin(hidden)
        rows = self._cell.rows
        if self.is_same is False or not isinstance(rows, FusedRows):
            return None
        if not rows.is_bare(self._inside, self._following):
            return None
        if not self.is_same:
            return self._watched(hidden, call)
        attended = None
        if self.attention is not None and all(linear.is_same for linear in self.entering):
            attended = self.attention(self._run.products, rows, call)
        return self._called(hidden, self._attended(hidden, call) if attended is None else attended)

    def try_attention(self, products: Mapping[str, Tensor], hidden: Tensor, call: Call) -> Tensor:
        """The input of the last linear of the layer's attention by its modules, if these are the products of
        its first ones."""
        run = self._run
        run.products, run.is_trial = dict(products), True
        try:
            return self._attended(hidden, call)
        finally:
            run.products, run.is_trial = {}, False

    def refuse(self) -> None:
        """Has the layer computed without spans from now on."""
        self.is_same = False
        _log.info("%s is no span here: its linears are called one by one", self._remote.shape.path)

    def _called(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, given its input and what attention gives to its last linear; keeps what came
        for the next layer."""
        run, rows = self._run, self._cell.rows
        is_training = isinstance(rows, FusedRows) and rows.is_training
        y, *products = self._remote.forward([hidden, attended], is_training)
        run.output, run.ahead = y, dict(zip(self._following, products, strict=True))
        return y

    def _attended(self, hidden: Tensor, call: Call) -> Tensor:
        run = self._run
        run.cut = self
        try:
            self._block.own(hidden, call)
        except _Attended as reached:
            return reached.rows
        finally:
            run.cut = None
        raise UnsupportedModel(f"{self._block.path} does not call the last linear of its attention")

    def _watched(self, hidden: Tensor, call: Call) -> Tensor:
        """The layer's own output, after which the span's is compared."""
        run = self._run
        run.cut, run.is_watched, run.seen = self, True, None
        try:
            y = self._block.own(hidden, call)
            if run.seen is None:
                self.refuse()
            elif y.numel() and bool(y.isfinite().all()):
                self.is_same = is_close(self._called(hidden, run.seen), y, TOLERANCE[y.dtype])
                run.output = y
                if not self.is_same:
                    self.refuse()
            return y
        finally:
            run.cut = run.seen = None
            run.is_watched = False


class _Attended(Exception):
    """A layer has come to the last linear of its attention, with these rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class _Output:
    """The forward of the linear where a layer's attention ends."""

    def __init__(self, linear: FrozenLinear, own: CutLayer, run: LayerRun) -> None:
        self._forward, self._own, self._run = linear.forward, own, run

    def __call__(self, x: Tensor) -> Tensor:
        run = self._run
        if run.cut is not self._own:
            return self._forward(x)
        if not run.is_watched:
            raise _Attended(x)
        run.seen = x
        return self._forward(x)


class _Following:
    """The forward of a linear with which a layer's attention begins, after the span of the layer before."""

    def __init__(self, linear: FrozenLinear, before: CutLayer, run: LayerRun) -> None:
        self._linear, self._forward = linear, linear.forward
        self._before, self._run = before, run
        self.is_same = False

    def __call__(self, x: Tensor) -> Tensor:
        product = self._run.products.pop(self._linear.path, None)
        rows = self._linear.cell.rows
        if product is None or rows is None:
            return self._forward(x)
        if not (self.is_same or self._run.is_trial or self._compare(x, product)):
            return self._forward(x)
        return rows.linear(self._linear.path, _Computed(product), x)

    def _compare(self, x: Tensor, product: Tensor) -> bool:
        """Tells whether this is the linear's product with x; nothing is found where it is not finite."""
        own = self._linear.placement.forward(x)
        if not bool(own.isfinite().all()):
            return False
        self.is_same = is_close(product, own, TOLERANCE[own.dtype])
        if not self.is_same:
            self._before.refuse()
        return self.is_same


class _Computed(Placement):
    """A linear whose product is there."""

    bias = None
    computes_rows = False

    def __init__(self, product: Tensor) -> None:
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        return self._product

    def tensors(self) -> Mapping[str, Tensor]:
        return {}
