"""A GPU that is not there: tensors without data that say they are on `cuda:0`, and refuse the processor's.

torch's fake tensors know devices, and mixing two of them is an error as on a GPU. A build for processors
lacks three things, which `install` adds for the whole process, so it needs one of its own: a device guard
(that of torch's backends in Python), an engine for backward (a walk over the graph, as torch's wants
streams), and launches of Triton's kernels (which only compare their tensors' devices).
"""

import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.memory.fake_tensors import fake_tensors

DEVICE = "cuda:0"  # with its number: the guard that stands in for CUDA's would give another device's
_CUDA, _PYTHON, _KINDS = 1, 20, 22  # places in torch's table of device guards
_MEMORY = 1 << 37  # bytes, for budgets
_WAITING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"})


def install() -> None:
    """Makes fake tensors on `DEVICE` possible in this process."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _KINDS).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert not torch.cuda.is_available() and not guards[_CUDA], "there is a GPU"
    backend_registration._setup_privateuseone_for_python_backend("fakecuda")
    guards[_CUDA] = guards[_PYTHON]
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment,method-assign]
    torch.autograd.grad = grad  # type: ignore[assignment]
    given: dict[str, Any] = {
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "memory_allocated": lambda *_: 0,
        "synchronize": lambda *_: None,
        "current_stream": mock.MagicMock(),
        "Stream": mock.MagicMock(),
        "stream": lambda _: nullcontext(),
        "get_device_name": lambda *_: "no GPU",
        "get_device_capability": lambda *_: (9, 0),
    }
    for name, stand_in in given.items():
        setattr(torch.cuda, name, stand_in)


def stub_triton(launched: Counter[str]) -> None:
    """Kernels compute nothing, and count as launched if all their tensors are on the device."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        devices = {str(x.device) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        assert devices == {DEVICE}, f"{self.fn.__name__} is given tensors on {devices}"
        launched[self.fn.__name__] += 1

    JITFunction.run = run


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits for the device: numbers and tensors that come to the
    processor, and results whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        first = next((x for x in args if isinstance(x, FakeTensor)), None)
        name = func.name()
        if first is not None and first.fake_device.type == "cuda":
            leaves = isinstance(out, Tensor) and out.device.type == "cpu"
            if leaves or name in _WAITING:
                self.lines.append(f"{name} at {_own_line()}")
        return out


def _own_line() -> str:
    """The innermost line of coserve or transformers."""
    frames = traceback.extract_stack()
    own = [f for f in frames if "/coserve/" in f.filename or "/transformers/" in f.filename]
    own = [f for f in own if not f.filename.endswith("fake_tensors.py")] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


@contextmanager
def on_fake_cuda() -> Iterator[Waits]:
    """Runs the block on tensors without data; gives the waits for the device."""
    with fake_tensors(), Waits() as waits:
        yield waits


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, node by node, on the caller's thread."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [torch.ones_like(output) for output in outputs]
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    found: list[Tensor | None] = [None] * len(inputs)
    asked: dict[tuple[Node, int], list[int]] = {}
    for number, x in enumerate(inputs):
        edge = get_gradient_edge(x)
        asked.setdefault((edge.node, edge.output_nr), []).append(number)
    pending: dict[Node, dict[int, Tensor]] = {}
    for output, gradient in zip(outputs, given, strict=True):
        assert (output.device, output.shape, output.dtype) == (
            gradient.device,
            gradient.shape,
            gradient.dtype,
        )
        edge = get_gradient_edge(output)
        _add(pending, edge.node, edge.output_nr, gradient)
    with torch.no_grad():
        for node in _in_order(list(pending)):
            got = pending.pop(node, {})
            for number, gradient in got.items():
                for place in asked.get((node, number), ()):
                    found[place] = gradient
            if got and node.next_functions:
                _back(pending, node, [got.get(i) for i in range(max(got) + 1)])
    return tuple(found)


def _back(pending: dict[Node, dict[int, Tensor]], node: Any, gradients: Sequence[Tensor | None]) -> None:
    """Passes a node's gradients on to those that it came from."""
    gradients = [*gradients, *[None] * (len(getattr(node, "_input_metadata", ())) - len(gradients))]
    edges = node.next_functions
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # its results are of all its arguments
        out = node.apply(*gradients)
        passed = [gradient for gradient, needs in zip(out, node.needs_input_grad, strict=True) if needs]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        out = node(*gradients)
        passed = list(out) if isinstance(out, tuple) else [out]
    for (after, number), gradient in zip(edges, passed, strict=True):
        if after is not None and gradient is not None:
            wanted = after._input_metadata[number]  # type: ignore[attr-defined]
            assert gradient.device == wanted.device, f"{node.name()}: a gradient is on {gradient.device}"
            _add(pending, after, number, gradient.sum_to_size(wanted.shape).to(wanted.dtype))


def _add(pending: dict[Node, dict[int, Tensor]], node: Node, number: int, gradient: Tensor) -> None:
    at = pending.setdefault(node, {})
    at[number] = at[number] + gradient if number in at else gradient


def _in_order(roots: Sequence[Node]) -> list[Node]:
    """All nodes from the roots on, each after those that lead to it."""
    seen, ended = set[Node](), list[Node]()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            ended.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
    return ended[::-1]
