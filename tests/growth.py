"""Counts of what a process holds: lengths of all containers within an object, and live objects by type."""

import ctypes
import gc
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OURS = "coserve."


def containers(root: object) -> Counter[str]:
    """Lengths of the containers that can be reached from `root` through objects of coserve, by the attribute
    that holds them. Containers within a library's objects are not counted, nor are bounded deques."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        where, thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, deque) and thing.maxlen is not None:
            continue
        if isinstance(thing, _CONTAINERS):
            found[where] += len(thing)
            inside = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else list(thing)
            todo += [(where, each) for each in inside if not isinstance(each, str | bytes | int | float)]
        elif type(thing).__module__.startswith(_OURS):
            todo += [(f"{type(thing).__name__}.{name}", value) for name, value in _attributes(thing)]
    return found


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    names = [*getattr(thing, "__dict__", ())]
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for name in names:
        if (value := getattr(thing, name, None)) is not None and not isinstance(value, weakref.ref):
            yield name, value


def objects() -> Counter[str]:
    """Live objects of coserve's own types, and tensors with their bytes."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
            found["bytes of tensors"] += 0 if thing.is_meta else thing.nbytes
        elif str(kind.__module__).startswith(_OURS):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


class _Heap(ctypes.Structure):
    """The fields of glibc's `mallinfo2`, in its order; `uordblks` are bytes in use."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip


def heap_in_use() -> int:
    """Bytes of the C library's heap that somebody holds: where a library's leak shows that is no object of
    Python. What is freed and kept does not count."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Heap
    return int(mallinfo().uordblks)


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The counts that are larger than before, and by how much."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
