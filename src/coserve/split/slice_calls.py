"""Layers of an engine's base that are one call each in steps where no row has an adapter inside.

The engine attends with its own keys and values, so a layer cannot be one call as a whole; the slice from its
attention to the next layer's can. A layer's own modules run up to the linear where attention ends. There the
slice is called, the rest of the layer is left out, and the next layer's first linears find their products
computed. An adapter at these adds its part here: their input is computed here too.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from coserve.adapters.sites import Kind, Sites
from coserve.errors import AdapterMismatch
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Block, Call
from coserve.model.linear import FrozenLinear
from coserve.model.placement import Placement
from coserve.split.calls import Source
from coserve.split.messages import SliceShape
from coserve.split.remote_group import RemoteSlice
from coserve.split.slices import digest_beside
from coserve.split.span_calls import TOLERANCE
from coserve.split.spans import is_close

_log = logging.getLogger(__name__)


def put_slices(base: Base, offered: Sequence[tuple[Source, SliceShape]]) -> None:
    """Has the base's layers be one call each, where sources offer what lies between them. Raises
    AdapterMismatch for what cannot lie between layers of this base."""
    linears, blocks = base.linears, {block.path: number for number, block in enumerate(base.chain)}
    run = LayerRun()
    for source, shape in offered:
        if shape.layer not in blocks or not _fits(shape, base):
            raise AdapterMismatch(f"the slice {shape.path} of {source.address} is none of this base")
        number = blocks[shape.layer]
        block, both = base.chain.blocks[number], base.chain.blocks[number : number + len(shape.digests)]
        if block.shortcut is not None or shape.digests != tuple(digest_beside(own.module) for own in both):
            continue
        inside, unchanged = _inside(base.sites, shape), tuple(shape.following)
        own = SlicedLayer(block, RemoteSlice(source, shape), inside, unchanged, base, run)
        block.shortcut = own
        _replace(linears[shape.output], _Output(linears[shape.output], own, run))
        for path in shape.following:
            _replace(linears[path], _Following(linears[path], own, run))


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

    `cut` is the layer whose run ends where its attention does, and `hidden` its input; `seen` is what
    attention gave in a run that is only watched. `products` are those of this layer's first linears that came
    with the slice before it, and `ahead` the same for the layer whose input is `output`.
    """

    cut: "SlicedLayer | None" = None
    hidden: Tensor | None = None
    is_watched: bool = False
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
    then on. `is_same` tells what was found, None before.
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

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where a row has an adapter inside, outputs are
        to be kept, or the slice is not the layer's."""
        self._run.begin(hidden)
        rows = self._cell.rows
        if self.is_same is False or not isinstance(rows, FusedRows):
            return None
        if not rows.is_bare(self._inside, self._unchanged):
            return None
        return self._cut(hidden, call) if self.is_same else self._watched(hidden, call)

    def call(self, attended: Tensor) -> Tensor:
        """The layer's output, given what attention gives to its last linear; keeps what came for the next
        layer."""
        run, rows = self._run, self._cell.rows
        assert run.hidden is not None, "the layer is under way"
        is_training = isinstance(rows, FusedRows) and rows.is_training
        y, *products = self._remote.forward(run.hidden, attended, is_training)
        run.output, run.ahead = y, dict(zip(self._unchanged, products, strict=True))
        return y

    def refuse(self) -> None:
        """Has the layer computed without slices from now on."""
        self.is_same = False
        _log.info("%s is no slice here: its linears are called one by one", self._remote.shape.path)

    def _cut(self, hidden: Tensor, call: Call) -> Tensor:
        run = self._run
        run.cut, run.hidden = self, hidden
        try:
            return self._block.own(hidden, call)
        except _Passed as passed:
            return passed.output
        finally:
            run.cut = run.hidden = None

    def _watched(self, hidden: Tensor, call: Call) -> Tensor:
        """The layer's own output, after which the slice's is compared."""
        run = self._run
        run.cut, run.hidden, run.is_watched, run.seen = self, hidden, True, None
        try:
            y = self._block.own(hidden, call)
            if run.seen is None:
                self.refuse()
            elif y.numel() and bool(y.isfinite().all()):
                self.is_same = is_close(self.call(run.seen), y, TOLERANCE[y.dtype])
                run.output = y
                if not self.is_same:
                    self.refuse()
            return y
        finally:
            run.cut = run.hidden = run.seen = None
            run.is_watched = False


class _Passed(Exception):
    """The rest of a layer is computed already."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Output:
    """The forward of the linear where a layer's attention ends."""

    def __init__(self, linear: FrozenLinear, own: SlicedLayer, run: LayerRun) -> None:
        self._forward, self._own, self._run = linear.forward, own, run

    def __call__(self, x: Tensor) -> Tensor:
        run = self._run
        if run.cut is not self._own:
            return self._forward(x)
        if not run.is_watched:
            raise _Passed(self._own.call(x))
        run.seen = x
        return self._forward(x)


class _Following:
    """The forward of a linear with which a layer's attention begins, after the slice of the layer before."""

    def __init__(self, linear: FrozenLinear, before: SlicedLayer, run: LayerRun) -> None:
        self._linear, self._forward = linear, linear.forward
        self._before, self._run = before, run
        self._is_same = False

    def __call__(self, x: Tensor) -> Tensor:
        product = self._run.products.pop(self._linear.path, None)
        rows = self._linear.cell.rows
        if product is None or rows is None or not (self._is_same or self._compare(x, product)):
            return self._forward(x)
        return rows.linear(self._linear.path, _Computed(product), x)

    def _compare(self, x: Tensor, product: Tensor) -> bool:
        """Tells whether this is the linear's product with x; nothing is found where it is not finite."""
        own = self._linear.placement.forward(x)
        if not bool(own.isfinite().all()):
            return False
        self._is_same = is_close(product, own, TOLERANCE[own.dtype])
        if not self._is_same:
            self._before.refuse()
        return self._is_same


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
