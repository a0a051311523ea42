"""Makes a transformers model, with PEFT's adapters or without, a client of a base executor:

    from coserve.split.attach import attach

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(...))
    attach(model, "unix:/run/base.sock")

Its frozen linears become virtual layers (Symbiosis, 3.2): products and gradients of inputs come from the
executor, all else stays in this process.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.errors import AdapterMismatch
from coserve.model.group import Group, GroupRows, Pending, Prepared
from coserve.model.placing import put
from coserve.split.address import Address
from coserve.split.connection import ExecutorConnection, Rows, call_of
from coserve.split.linears import find_linears, fingerprint_of_linears, shape_of
from coserve.split.messages import (
    ITEM_BYTES,
    VERSION,
    BaseHello,
    ClientHello,
    Direction,
    GroupShape,
    LinearCall,
)
from coserve.split.payload import DTYPES


def attach(model: nn.Module, address: str, key: str = "", patience: float = 60.0) -> ExecutorConnection:
    """Replaces the model's linears that the executor at `address` has by virtual layers, and frees their
    weights. `patience` is how long a call waits for an executor that went away, in seconds.

    The executor's base must have the content hash of the model's linears; where the model was made on the
    meta device, only paths and widths are compared. Parameters of these linears do not require a gradient
    afterwards and have no data: merging, and methods that read them (DoRA, PiSSA), do not work. Raises
    AdapterMismatch, ConfigError and Unreachable.
    """
    where = Address.parse(address)
    found = find_linears(model)
    own = fingerprint_of_linears({path: module for path, (_, module) in found.items()})
    hello = ClientHello(VERSION, f"{os.uname().nodename}/{os.getpid()}"[:512], own or "", key)
    connection = ExecutorConnection(where, hello, patience)
    try:
        _check(connection.base.groups, {path: shape_of(module) for path, (_, module) in found.items()})
    except AdapterMismatch:
        connection.close()
        raise
    for shape in connection.base.groups:
        rows = _Siblings(RemoteGroup(connection, shape))
        for path in shape.outputs:
            place, module = found[path]
            put(model, place, _virtual(path, module, rows))
    weakref.finalize(model, connection.close)
    return connection


class Calls(Protocol):
    """Takes calls to a base executor, such as `ExecutorConnection`."""

    base: BaseHello

    def submit(self, call: LinearCall, rows: Rows, widths: Sequence[int]) -> Pending[list[Tensor]]:
        """Sends a call, whose number is replaced; the answer's tensors are [rows, width]."""
        ...


class RemoteGroup(Group):
    """Linears of a base executor with the same input."""

    def __init__(self, connection: Calls, shape: GroupShape) -> None:
        self._connection, self._inputs = connection, shape.inputs
        self.outputs = shape.outputs
        base = connection.base
        widest = max(shape.inputs, sum(shape.outputs.values())) * ITEM_BYTES[base.dtype]
        self._most_rows = max(1, min(base.limits.rows, base.limits.payload // widest))

    def launch(self, x: Tensor, paths: Sequence[str], is_training: bool = False) -> "_Answer":
        widths = [self.outputs[path] for path in paths]
        return self._launch("forward", [x], paths, widths, is_training)

    def launch_backward(self, grads: Mapping[str, Tensor]) -> "_First":
        answer = self._launch("backward", list(grads.values()), list(grads), [self._inputs], is_training=True)
        return _First(answer)

    def _launch(
        self,
        direction: Direction,
        given: Sequence[Tensor],
        paths: Sequence[str],
        widths: Sequence[int],
        is_training: bool,
    ) -> "_Answer":
        base, work = self._connection.base, "training" if is_training else "inference"
        like = given[0]
        rows = [self._rows(tensor) for tensor in given]
        parts: list[Sequence[Tensor]] = [[tensor] for tensor in rows] if len(rows[0]) else []
        if len(rows[0]) > self._most_rows:
            parts = [torch.split(tensor, self._most_rows) for tensor in rows]
        futures = [
            self._connection.submit(
                call_of(paths, part, base.dtype, direction=direction, work=work), part, widths
            )
            for part in zip(*parts, strict=True)
        ]
        return _Answer(futures, like, widths)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[..., width] to [rows, width], as it is sent."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        return flat.to("cpu", DTYPES[self._connection.base.dtype]).contiguous()


class _Answer:
    """Tensors [..., width] for each width, of the type and on the device of `like` [..., any]."""

    def __init__(self, futures: Sequence[Pending[list[Tensor]]], like: Tensor, widths: Sequence[int]) -> None:
        self._futures, self._widths = futures, widths
        self._rows, self._dtype, self._device = like.shape[:-1], like.dtype, like.device

    def result(self) -> list[Tensor]:
        parts = [future.result() for future in self._futures]
        if not parts:  # no rows
            return [
                torch.empty(*self._rows, width, dtype=self._dtype, device=self._device)
                for width in self._widths
            ]
        whole = parts[0] if len(parts) == 1 else [torch.cat(part) for part in zip(*parts, strict=True)]
        return [tensor.to(self._device, self._dtype).view(*self._rows, -1) for tensor in whole]


class _First:
    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    def result(self) -> Tensor:
        return self._answer.result()[0]


class _Siblings(GroupRows):
    """The linears of one group in a model that nobody drives: the first that is called asks for all."""

    def __init__(self, group: RemoteGroup) -> None:
        super().__init__()
        self._group = group

    @property
    def is_training(self) -> bool:
        """Tells whether a graph is recorded."""
        return torch.is_grad_enabled()

    def product(self, path: str, x: Tensor) -> Tensor:
        """The linear's product, in the current graph."""
        return self._ask(path, self._group, x)[0]

    def _is_changed(self, path: str) -> bool:
        return False

    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        return None, lambda: None


class _VirtualLinear(nn.Linear):
    """A linear of a base executor; `weight` has the linear's shape, and no data but NaN."""

    path: str
    siblings: _Siblings

    def forward(self, x: Tensor) -> Tensor:
        return self.siblings.product(self.path, x)


class _VirtualConv1D(Conv1D):  # type: ignore[misc]
    path: str
    siblings: _Siblings

    def forward(self, x: Tensor) -> Tensor:
        return self.siblings.product(self.path, x)


def _virtual(path: str, linear: nn.Module, siblings: _Siblings) -> nn.Module:
    """What replaces a linear: of the same class for libraries that ask, without its weights."""
    out, into = shape_of(linear)
    made: Any
    with torch.device("meta"):
        made = _VirtualConv1D(out, into) if isinstance(linear, Conv1D) else _VirtualLinear(into, out)
    made.path, made.siblings = path, siblings
    for name, old in linear.named_parameters(recurse=False):
        device = "cpu" if old.is_meta else old.device
        nothing = torch.full((), torch.nan, dtype=old.dtype, device=device).expand(old.shape)
        setattr(made, name, nn.Parameter(nothing, requires_grad=False))
    if linear.bias is None:
        made.bias = None
    made.train(linear.training)
    return made  # type: ignore[no-any-return]


def _check(groups: Sequence[GroupShape], own: Mapping[str, tuple[int, int]]) -> None:
    """Raises AdapterMismatch where the executor has a linear that the model lacks or has in another shape."""
    for group in groups:
        for path, out in group.outputs.items():
            if own.get(path) != (out, group.inputs):
                shown = "x".join(map(str, own[path])) if path in own else "not in this model"
                raise AdapterMismatch(f"the executor's {path} is {out}x{group.inputs}, here it is {shown}")
