"""A base executor in the test's process, which notes its calls, and engines whose linears it computes."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.split.address import Address
from coserve.split.executor import BaseExecutor, BaseLinears
from coserve.split.messages import BaseHello, LinearCall, SpanShape
from coserve.split.service import SplitService
from coserve.split.shard import Shard
from models import VOCABULARY

Call = tuple[str, tuple[str, ...]]  # direction, and paths of linears
DOWN: Final = "model.layers.0.mlp.down_proj"  # [64, 96] of the tiny llama


def call(rows: int = 2, **fields: Any) -> LinearCall:
    """A call of `DOWN` for rows of float32, unless the fields say otherwise."""
    fields = {"nbytes": rows * 96 * 4, "dtype": "float32", "work": "inference", "number": 1, **fields}
    return LinearCall(paths=(DOWN,), direction="forward", rows=rows, **fields)


def spans_of(hello: BaseHello, cuts: str) -> list[SpanShape]:
    """The spans between such cuts that an executor offers."""
    return [span for span in hello.spans if span.cuts == cuts]


class ServedBase:
    """An executor of a model, and its calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        socket: Path,
        offers: Callable[[str], bool] | None = None,
        shard: Shard | None = None,
        cuts: Collection[str] = ("module", "attention", "layer"),
    ) -> None:
        """`offers` tells which linears are offered; all where it is None. Spans are offered between these
        `cuts`."""
        self.linears = BaseLinears(model, shard=shard)
        offers = offers or (lambda _: True)
        hello = self.linears.hello
        groups = tuple(group for group in hello.groups if all(map(offers, group.outputs)))
        spans = tuple(span for span in hello.spans if span.cuts in cuts and all(map(offers, span.linears)))
        self.linears.hello = msgspec.structs.replace(hello, groups=groups, spans=spans)
        self.calls: list[Call] = []
        self.work: Counter[str] = Counter()  # of calls, by their class
        self.types: list[str] = []  # of their rows
        self.plain: list[Tensor] | None = None  # rows that are no elements of the field; where it is a list
        compute = self.linears.compute

        def noted(call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
            self.calls.append((call.direction, call.paths))
            self.work[call.work] += 1
            self.types.append(call.dtype)
            if call.dtype != "field" and self.plain is not None:
                self.plain += [tensor.clone() for tensor in tensors]
            return compute(call, tensors)

        self.linears.compute = noted  # type: ignore[method-assign]
        self._socket = socket
        self.start()

    def start(self) -> None:
        self.executor = BaseExecutor(self.linears)
        self.service = SplitService(self.executor, Address(path=str(self._socket)))
        self.address = str(self.service.address)

    def stop(self) -> None:
        """As if it had died: calls under way have no answers."""
        self.service.close()
        self.executor.close()


@contextmanager
def serving(model: PreTrainedModel, folder: Path, **options: Any) -> Iterator[ServedBase]:
    served = ServedBase(model, folder / "base.sock", **options)
    try:
        yield served
    finally:
        served.stop()


def differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor's numbers, relative to those beyond one."""
    assert found.keys() == wanted.keys()
    return {
        name: float(((found[name] - x).abs() / x.abs().clamp_min(1.0)).max()) for name, x in wanted.items()
    }


def drawn_ids(rows: int, length: int) -> Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(1, VOCABULARY, (rows, length))


def results(model: nn.Module, ids: Tensor, **given: Any) -> dict[str, Tensor]:
    """A causal model's `logits` of `ids`, and the gradients of its loss on them, by parameter."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, **given)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The gradients of `results`."""
    return {name: tensor for name, tensor in results(model, ids).items() if name != "logits"}


class Mixing(nn.Module):
    """A feed-forward layer whose rows are not alone."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x.mean(1, keepdim=True)  # type: ignore[no-any-return]
