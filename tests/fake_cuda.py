"""A GPU that is not there: tensors without data that say they are on `cuda:0`, and refuse the processor's.

torch's fake tensors know devices, and mixing two of them is an error as on a GPU. A build for processors
lacks three things, which `install` adds for the whole process, so it needs one of its own: a device guard
(that of torch's backends in Python), an engine for backward (a walk over the graph, as torch's wants
streams), and launches of Triton's kernels (which only compare their tensors' devices).

Streams have vector clocks: a stream, an event and a thread of the host know how far each stream had come when
they last waited. Memory remembers the streams that wrote and read it, so that a use on another stream
without a wait in between is found, and so is memory that is freed while another stream may use it.
"""

import ctypes
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coserve.memory.fake_tensors import fake_tensors

DEVICE = "cuda:0"  # with its number: the guard that stands in for CUDA's would give another device's
_CUDA, _PYTHON, _KINDS = 1, 20, 22  # places in torch's table of device guards
_MEMORY = 1 << 37  # bytes, for budgets
_WAITING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"})
_COPIES = {"aten::_to_copy": 0, "aten::copy_": 1}  # and where their source is among the arguments
_BLANK = ("aten::empty", "aten::new_empty")  # nothing is written yet
_UNREAD = (*_BLANK, "aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::set_")
_BESIDE = 2  # times that a thread's work is said not to be done

Clock = dict[int, int]  # by stream, how much of its work is known to be done


def _merge(clock: Clock, other: Clock) -> None:
    for stream, done in other.items():
        clock[stream] = max(clock.get(stream, 0), done)


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.clock: Clock = {}
        self.stream: Stream | None = None
        self._is_timed = enable_timing

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = stream or GPU.current
        self.clock = {**self.stream.clock}

    def elapsed_time(self, later: "Event") -> float:
        """A millisecond for each operation of their stream in between, which the host has waited for."""
        assert self._is_timed and later._is_timed, "both are events with a time"
        assert self.stream is later.stream is not None, "both are of one stream"
        number = self.stream.number
        ended = later.clock.get(number, 0)
        assert GPU.host.get(number, 0) >= ended, "the host knows that both have happened"
        return float(ended - self.clock.get(number, 0))

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or GPU.current).wait_event(self)

    def synchronize(self) -> None:
        GPU.waits.append(_own_line())
        _merge(GPU.host, self.clock)

    def query(self) -> bool:
        return True


class Stream:
    """Stands in for `torch.cuda.Stream`: knows its own work, and that of others up to what it waited for."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.number, self.priority = len(GPU.streams), priority
        self.clock: Clock = {}
        GPU.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        _merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        GPU.waits.append(_own_line())
        _merge(GPU.host, self.clock)


@dataclass
class Memory:
    """One storage: the stream that it was made on, and when each stream last wrote and read it."""

    maker: Stream
    is_blank: bool
    wrote: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # streams named by `record_stream`


class Gpu:
    """The streams and the memory of the device, and what the running thread of the host knows."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.memory: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.waits_for_all: list[str] = []
        self.kernels: list[str] = []  # operations and launches, by their names
        self.waits: list[str] = []  # for a stream or an event
        self.arriving: dict[int, Clock] = {}  # memory of the host, with the copy to it that nobody waited for

    def begin(self) -> None:
        """Forgets all; there is a default stream."""
        self.__init__()  # type: ignore[misc]
        self.current = Stream()

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Stands in for `torch.cuda.stream`."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_: object) -> None:
        """Stands in for `torch.cuda.synchronize`."""
        self.waits_for_all.append(_own_line())
        for stream in self.streams:
            stream.synchronize()

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """Stands in for `Tensor.record_stream`."""
        self._of(x).recorded.add(stream.number)

    def use(self, reads: Iterable[Tensor], writes: Iterable[Tensor], name: str) -> None:
        """Notes an operation on the current stream, and faults it where another stream's use of the same
        memory was not waited for."""
        stream = self.current
        _merge(stream.clock, self.host)
        now = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for memory in map(self._of, tensors):
                for uses, did in ((memory.wrote, "wrote"), (memory.read if is_write else {}, "read")):
                    for other, when in uses.items():
                        if stream.clock.get(other, 0) < when:
                            verb = "writes" if is_write else "reads"
                            self._fault(f"{name} on stream {stream.number} {verb} what stream {other} {did}")
                if is_write:
                    memory.wrote, memory.read, memory.is_blank = {stream.number: now}, {}, False
                else:
                    memory.read[stream.number] = now

    def make(self, x: Tensor, name: str) -> None:
        """Notes an operation's result on the current stream, unless it is memory that was known before."""
        if x.untyped_storage()._cdata not in self.memory:
            self.use((), [x], name)
            self._of(x).is_blank = name.startswith(_BLANK)

    def arrives(self, x: Tensor) -> None:
        """Notes a tensor of the host that the current stream copies to, while the host goes on."""
        storage = x.untyped_storage()
        self.arriving[storage._cdata] = {**self.current.clock}
        weakref.finalize(storage, self.arriving.pop, storage._cdata, None)

    def reads(self, x: Tensor, name: str) -> None:
        """Faults a use of a tensor of the host whose copy was not waited for."""
        for stream, when in self.arriving.get(x.untyped_storage()._cdata, {}).items():
            if self.host.get(stream, 0) < when:
                self._fault(f"{name} reads on the host what stream {stream} has not copied yet")

    def launch(self, tensors: Sequence[Tensor], name: str) -> None:
        """Notes a kernel, which writes what nothing was written into yet."""
        self.kernels.append(name)
        self.use(tensors, [x for x in tensors if self._of(x).is_blank], name)

    def _of(self, x: Tensor) -> Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(self.current, False)
            weakref.finalize(storage, self._freed, self.memory, key)
        return self.memory[key]

    def _freed(self, where: dict[int, Memory], key: int) -> None:
        memory = where.pop(key)
        if where is not self.memory:
            return
        for uses in (memory.wrote, memory.read):
            for other, when in uses.items():
                known = max(memory.maker.clock.get(other, 0), self.host.get(other, 0))
                if other not in {memory.maker.number, *memory.recorded} and known < when:
                    self._fault(f"memory of stream {memory.maker.number} is freed that stream {other} uses")

    def _fault(self, what: str) -> None:
        self.faults.append(f"{what}, at {_own_line()}")


GPU = Gpu()


class HostThread:
    """Stands in for a `ThreadPoolExecutor` of one thread. Its work runs at once, and knows what its caller
    knew; its caller knows what it has waited for from `result` on."""

    def __init__(self, *_: object) -> None:
        self._knows: Clock = {}

    def submit(self, work: Callable[..., Any], *args: Any) -> "HostFuture":
        before = GPU.host
        _merge(self._knows, before)
        GPU.host = self._knows
        try:
            with GPU.on(GPU.streams[0]):
                return HostFuture(work(*args), {**self._knows}, (work, args))
        finally:
            GPU.host = before


class HostFuture:
    """The result of a `HostThread`'s work, which is not done when it is first asked."""

    def __init__(self, value: Any, clock: Clock, work: object) -> None:
        self._value, self._clock, self._asked = value, clock, 0
        self._work = work  # what it has is freed on the thread, which knows what it has waited for

    def done(self) -> bool:
        self._asked += 1
        return self._asked > _BESIDE

    def result(self) -> Any:
        _merge(GPU.host, self._clock)
        self._work = None
        return self._value

    def cancel(self) -> bool:
        return False

    cancelled = cancel

    def exception(self, timeout: float | None = None) -> None:
        return None

    def add_done_callback(self, call: Callable[["HostFuture"], object]) -> None:
        self._asked = _BESIDE  # done by now, as who is told may take it to be
        call(self)


class Runtime:
    """Stands in for `torch.cuda.cudart`: pins all memory that it is asked to."""

    def cudaHostRegister(self, *_: int) -> int:
        return 0

    cudaHostUnregister = cudaHostRegister


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
        "synchronize": GPU.synchronize,
        "current_stream": lambda *_: GPU.current,
        "Stream": Stream,
        "Event": Event,
        "stream": GPU.on,
        "cudart": Runtime,
        "get_device_name": lambda *_: "no GPU",
        "get_device_capability": lambda *_: (9, 0),
    }
    for name, stand_in in given.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.record_stream = lambda x, stream: GPU.record_stream(x, stream)  # type: ignore[method-assign]


def stub_triton(launched: Counter[str]) -> None:
    """Kernels compute nothing, and count as launched if all their tensors are on the device."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        devices = {str(x.device) for x in tensors}
        GPU.launch(tensors, self.fn.__name__)
        assert devices == {DEVICE}, f"{self.fn.__name__} is given tensors on {devices}"
        launched[self.fn.__name__] += 1

    JITFunction.run = run


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits for the device: numbers and tensors that come to the
    processor, tensors that go to the device unless the copy does not block, and results whose shapes depend
    on values. Tells the device's streams of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        name = func.name()
        reads, writes = _operands(func, args, kwargs or {})
        is_use = not (func.is_view or name.startswith("aten::set_"))
        if is_use and (reads or writes):
            GPU.use(() if name.startswith(_UNREAD) else reads, writes, name)
        if GPU.arriving:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, FakeTensor) and x.fake_device.type == "cpu":
                    GPU.reads(x, name)
        out = func(*args, **(kwargs or {}))
        on_device = _tensors_on_device(tree_leaves(out))
        for made in on_device:
            GPU.make(made, name)
        if is_use and (writes or on_device) and not name.startswith((*_BLANK, "aten::_unsafe_view")):
            GPU.kernels.append(name)
        source = args[_COPIES[name]] if name in _COPIES else None
        if source is not None and _blocks(source, out, args[2:], kwargs or {}):
            self.lines.append(f"{name} at {_own_line()}")
        first = next((x for x in args if isinstance(x, FakeTensor)), None)
        if first is not None and first.fake_device.type == "cuda":
            leaves = isinstance(out, Tensor) and out.device.type == "cpu"
            if leaves and (kwargs or {}).get("non_blocking"):
                GPU.arrives(out)
            elif leaves or name in _WAITING:
                self.lines.append(f"{name} at {_own_line()}")
                GPU.current.synchronize()
        return out


def _blocks(source: Any, out: Any, others: Sequence[Any], named: dict[str, Any]) -> bool:
    """Tells whether a copy goes from the processor to the device and blocks; numbers go as arguments."""
    is_there = source.device.type == "cpu" and out.device.type == "cuda" and source.ndim > 0
    return bool(is_there and not named.get("non_blocking") and True not in others)


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors on the device that an operation reads, and that it writes."""
    reads, writes = list[Tensor](), list[Tensor]()
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if value is not None:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(_tensors_on_device(tree_leaves(value)))
    return reads, writes


def _tensors_on_device(values: Iterable[Any]) -> list[Tensor]:
    return [x for x in values if isinstance(x, FakeTensor) and x.fake_device.type == "cuda"]


def _own_line() -> str:
    """The innermost line of coserve or transformers."""
    frames = traceback.extract_stack()
    own = [f for f in frames if "/coserve/" in f.filename or "/transformers/" in f.filename]
    own = [f for f in own if not f.filename.endswith("fake_tensors.py")] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


@contextmanager
def on_fake_cuda() -> Iterator[Waits]:
    """Runs the block on tensors without data; gives the waits for the device. Fails where streams use each
    other's memory without a wait, or the host waits for the whole device."""
    GPU.begin()
    with fake_tensors(), Waits() as waits:
        yield waits
    faults = [*GPU.faults, *(f"waits for the whole device at {line}" for line in GPU.waits_for_all)]
    assert not faults, "\n".join(dict.fromkeys(faults))


def found(case: Callable[[], None]) -> str:
    """The faults of a case on tensors without data; an empty text where it has none."""
    try:
        with on_fake_cuda():
            case()
    except AssertionError as error:
        return str(error)
    return ""


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
