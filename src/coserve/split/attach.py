"""Makes a transformers model, with PEFT's adapters or without, a client of a base executor:

    from coserve.split.attach import attach

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(...))
    attach(model, "unix:/run/base.sock")

Its frozen linears become virtual layers (Symbiosis, 3.2): products and gradients of inputs come from the
executor, all else stays in this process.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.errors import AdapterMismatch
from coserve.model.group import Group, GroupRows, Prepared
from coserve.model.placing import put
from coserve.split.absent import AbsentWeight, check_frozen, check_methods
from coserve.split.calls import Answer, Calls
from coserve.split.connection import call_of
from coserve.split.gather import Where, connect
from coserve.split.linears import find_linears, fingerprint_of_linears, shape_of
from coserve.split.messages import (
    ITEM_BYTES,
    BaseHello,
    Direction,
    GroupShape,
)
from coserve.split.payload import DTYPES
from coserve.split.privacy.modes import Privacy, private
from coserve.split.tls import ClientTls

_SHOWN: Final = 20  # paths in an error


def attach(
    model: nn.Module,
    address: Where,
    key: str | Sequence[str] = "",
    patience: float = 60.0,
    privacy: Privacy | None = None,
    *,
    shared_memory: bool = True,
    tls: ClientTls | Sequence[ClientTls] | None = None,
) -> Calls:
    """Replaces the model's linears that the executor at `address` has by virtual layers, and frees their
    weights; others stay as they are. `address` is the executor's, or a way to it that was made already; where several
    executors have a shard each, those of all, with one key and `tls` or one each.
    `patience` is how long a call waits for an executor that went away or gives no sign of life, in seconds.
    `privacy` is what the executor may see of rows: everything with None. At a unix socket tensors are in
    shared memory, where the executor gives some; `tls` says how the executor at a `tls:` address is known.

    These linears must have the content hash of the executor's; where the model was made on the meta device,
    only paths and widths are compared, and linears that the executor lacks must be loaded before. Parameters
    of virtual layers do not require a gradient and have no data. What reads, changes or trains them (DoRA,
    PiSSA, merging) gets NotOffered: here where its adapter is in the model already, else when it does so.
    Raises AdapterMismatch, ConfigError and Unreachable; WrongAnswer in a call.
    """
    found = find_linears(model)
    check_methods(model, {path: module for path, (_, module) in found.items()})
    source = connect(address, key, tls, patience, shared_memory)
    calls: Calls = source
    try:
        _check(source.base, {path: module for path, (_, module) in found.items()})
        if privacy is not None:
            calls = private(
                source,
                privacy,
                lambda other: connect(other.address, other.key, other.tls or tls, patience, shared_memory),
            )
    except BaseException:
        source.close()
        raise
    for shape in calls.base.groups:
        rows = _Siblings(RemoteGroup(calls, shape))
        for path in shape.outputs:
            place, module = found[path]
            put(model, place, _virtual(path, module, rows))
    weakref.finalize(model, calls.close)
    return calls


class RemoteGroup(Group):
    """Linears of a base executor with the same input."""

    def __init__(self, calls: Calls, shape: GroupShape) -> None:
        self._calls, self._inputs = calls, shape.inputs
        self.outputs = shape.outputs
        base = calls.base
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
        base, work = self._calls.base, "training" if is_training else "inference"
        like = given[0]
        rows = [self._rows(tensor) for tensor in given]
        parts: list[Sequence[Tensor]] = [[tensor] for tensor in rows] if len(rows[0]) else []
        if len(rows[0]) > self._most_rows:
            parts = [torch.split(tensor, self._most_rows) for tensor in rows]
        answers = [
            self._calls.submit(call_of(paths, part, base.dtype, direction=direction, work=work), part, widths)
            for part in zip(*parts, strict=True)
        ]
        return _Answer(answers, like, widths)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[..., width] to [rows, width], as it is sent."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        return flat.to("cpu", DTYPES[self._calls.base.dtype]).contiguous()


class _Answer:
    """Tensors [..., width] for each width, of the type and on the device of `like` [..., any]."""

    def __init__(self, answers: Sequence[Answer], like: Tensor, widths: Sequence[int]) -> None:
        self._answers, self._widths = answers, widths
        self._rows, self._dtype, self._device = like.shape[:-1], like.dtype, like.device

    def result(self) -> list[Tensor]:
        parts = [answer.result() for answer in self._answers]
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
    """A linear of a base executor; `weight` and `bias` are absent."""

    path: str
    siblings: _Siblings

    def forward(self, x: Tensor) -> Tensor:
        check_frozen(self.path, self)
        return self.siblings.product(self.path, x)


class _VirtualConv1D(Conv1D):  # type: ignore[misc]
    path: str
    siblings: _Siblings

    def forward(self, x: Tensor) -> Tensor:
        check_frozen(self.path, self)
        return self.siblings.product(self.path, x)


def _virtual(path: str, linear: nn.Module, siblings: _Siblings) -> nn.Module:
    """The module that replaces a linear: of the same class for libraries that ask, without its weights."""
    out, into = shape_of(linear)
    made: Any
    with torch.device("meta"):
        made = _VirtualConv1D(out, into) if isinstance(linear, Conv1D) else _VirtualLinear(into, out)
    made.path, made.siblings = path, siblings
    for name, old in linear.named_parameters(recurse=False):
        setattr(made, name, AbsentWeight.instead_of(old, f"{path}.{name}"))
    if linear.bias is None:
        made.bias = None
    made.train(linear.training)
    return made  # type: ignore[no-any-return]


def _check(base: BaseHello, own: Mapping[str, nn.Module]) -> None:
    """Raises AdapterMismatch where the executor has a linear that the model lacks or has in another shape or
    with other weights, and where the model has no weights for a linear that the executor lacks."""
    for group in base.groups:
        for path, out in group.outputs.items():
            shape = shape_of(own[path]) if path in own else None
            if shape != (out, group.inputs):
                shown = "x".join(map(str, shape)) if shape else "not in this model"
                raise AdapterMismatch(f"the executor's {path} is {out}x{group.inputs}, here it is {shown}")
    offered = {path for group in base.groups for path in group.outputs}
    mark = fingerprint_of_linears({path: own[path] for path in offered})
    if mark is not None and mark != base.fingerprint:
        raise AdapterMismatch(f"the client's base is {mark}, the executor's {base.fingerprint}")
    kept = {path: module for path, module in own.items() if path not in offered}
    missing = [path for path, module in kept.items() if any(p.is_meta for p in module.parameters(False))]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + f" and {len(missing) - _SHOWN} more" * (len(missing) > _SHOWN)
        raise AdapterMismatch(
            f"the executor does not have {shown}: load their weights, which are on the meta device, before"
        )
