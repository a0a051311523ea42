"""Layers of an engine's base that are one call each in steps where no row has an adapter inside.

The engine attends with its own keys and values, so a layer cannot be one call as a whole; the slice from its
attention to the next layer's can. A layer's own modules run up to the linear where attention ends. There the
slice is called, the rest of the layer is left out, and the next layer's first linears find their products
computed. An adapter at these adds its part here: their input is computed here too.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from coserve.adapters.sites import Kind, Sites
from coserve.errors import AdapterMismatch, UnsupportedModel
from coserve.kernels.native import ops
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Block, Call
from coserve.model.layer_experiment import LayerExperiment
from coserve.model.linear import FrozenLinear
from coserve.model.placement import Placement
from coserve.split.calls import Source
from coserve.split.messages import SliceShape
from coserve.split.native_slices import NativeAttention
from coserve.split.remote_group import RemoteSlice
from coserve.split.slices import digest_beside
from coserve.split.span_calls import TOLERANCE
from coserve.split.spans import is_close

_log = logging.getLogger(__name__)


def put_slices(base: Base, offered: Sequence[tuple[Source, SliceShape]]) -> None:
    """Has the base's layers be one call each, where sources offer what lies between them. Raises
    AdapterMismatch for what cannot lie between layers of this base."""
    linears, blocks = base.linears, {block.path: number for number, block in enumerate(base.chain)}
    run, sliced, following = LayerRun(), dict[int, SlicedLayer](), dict[int, list[_Following]]()
    for source, shape in offered:
        if shape.layer not in blocks or not _fits(shape, base):
            raise AdapterMismatch(f"the slice {shape.path} of {source.address} is none of this base")
        number = blocks[shape.layer]
        block, both = base.chain.blocks[number], base.chain.blocks[number : number + len(shape.digests)]
        if block.shortcut is not None or shape.digests != tuple(digest_beside(own.module) for own in both):
            continue
        inside, unchanged = _inside(base.sites, shape), tuple(shape.following)
        own = SlicedLayer(block, RemoteSlice(source, shape), inside, unchanged, base, run)
        block.shortcut = sliced[number] = own
        _replace(linears[shape.output], _Output(linears[shape.output], own, run))
        following[number + 1] = [_Following(linears[path], own, run) for path in shape.following]
        for path, follower in zip(shape.following, following[number + 1], strict=True):
            _replace(linears[path], follower)
    for number in sliced.keys() & following.keys():
        sliced[number].entering = following[number]
    _find_attention(base, sliced)


@torch.no_grad()
def _find_attention(base: Base, sliced: Mapping[int, "SlicedLayer"]) -> None:
    """Has kernels attend in those layers whose attention they compute."""
    if not any(ops.takes(parameter) for parameter in base.model.parameters()):
        return
    experiment = LayerExperiment(base)
    for number, own in sliced.items():
        if own.entering:
            own.attention = NativeAttention.find(experiment, base, number, own.try_attention)


def _fits(shape: SliceShape, base: Base) -> bool:
    """Tells whether its linears are the base's and have these widths."""
    if not {shape.output, *shape.linears, *shape.following} <= base.linears.keys():
        return False
    ends = base.hidden_size, base.linears[shape.output].in_features
    widths = {path: base.linears[path].out_features for path in shape.following}
    return (shape.width, shape.inputs) == ends and shape.following == widths


def _replace(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _inside(sites: Sites, shape: SliceShape) -> tuple[str, ...]:
    """Paths at which an adapter would change the slice's results: its linears, and all sites that are no
    linears in the layer and in the next."""
    stage = sites[shape.output].stage
    stages = {stage, stage + 1} if shape.following else {stage}
    others = (path for path, site in sites.items() if site.kind is not Kind.LINEAR and site.stage in stages)
    return (*shape.linears, *others)


class LayerRun(threading.local):
    """The run of a layer under way on this thread.

    `cut` is the layer whose run ends where its attention does; one that is only watched goes on, and `seen`
    is what attention gave. `products` are those of this layer's first linears that came with the slice before
    it, random ones in a trial; `ahead` the same for the layer whose input is `output`.
    """

    cut: "SlicedLayer | None" = None
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


class SlicedLayer:
    """A block's shortcut: the layer up to the end of its attention, and its slice.

    The first rows go both ways: where a result differs (another activation), the layer goes its own way from
    then on. `is_same` tells what was found, None before. `entering` are the linears with which its attention
    begins, where another slice computes them; `attention` is a faster way from their products to the end of
    attention.
    """

    def __init__(
        self,
        block: Block,
        remote: RemoteSlice,
        inside: tuple[str, ...],
        unchanged: tuple[str, ...],
        base: Base,
        run: LayerRun,
    ) -> None:
        """`inside` are paths of modules where no row may have a bypass, `unchanged` those of linears whose
        inputs none may change."""
        self._block, self._remote, self._run = block, remote, run
        self._inside, self._unchanged, self._cell = inside, unchanged, base.cell
        self.is_same: bool | None = None
        self.entering: Sequence[_Following] = ()
        self.attention: NativeAttention | None = None

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where a row has an adapter inside, outputs are
        to be kept, or the slice is not the layer's."""
        self._run.begin(hidden)
        rows = self._cell.rows
        if self.is_same is False or not isinstance(rows, FusedRows):
            return None
        if not rows.is_bare(self._inside, self._unchanged):
            return None
        if not self.is_same:
            return self._watched(hidden, call)
        attended = None
        if self.attention is not None and all(linear.is_same for linear in self.entering):
            attended = self.attention(self._run.products, rows, call)
        return self._sliced(hidden, self._attended(hidden, call) if attended is None else attended)

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
        """Has the layer computed without slices from now on."""
        self.is_same = False
        _log.info("%s is no slice here: its linears are called one by one", self._remote.shape.path)

    def _sliced(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, given its input and what attention gives to its last linear; keeps what came
        for the next layer."""
        run, rows = self._run, self._cell.rows
        is_training = isinstance(rows, FusedRows) and rows.is_training
        y, *products = self._remote.forward(hidden, attended, is_training)
        run.output, run.ahead = y, dict(zip(self._unchanged, products, strict=True))
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
        """The layer's own output, after which the slice's is compared."""
        run = self._run
        run.cut, run.is_watched, run.seen = self, True, None
        try:
            y = self._block.own(hidden, call)
            if run.seen is None:
                self.refuse()
            elif y.numel() and bool(y.isfinite().all()):
                self.is_same = is_close(self._sliced(hidden, run.seen), y, TOLERANCE[y.dtype])
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

    def __init__(self, linear: FrozenLinear, own: SlicedLayer, run: LayerRun) -> None:
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
    """The forward of a linear with which a layer's attention begins, after the slice of the layer before."""

    def __init__(self, linear: FrozenLinear, before: SlicedLayer, run: LayerRun) -> None:
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
