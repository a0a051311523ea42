"""Results that are made once, by one thread at a time, and looked up without waiting."""

import threading
from collections.abc import Callable, Hashable
from typing import Concatenate, Final, Generic, ParamSpec, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode

K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
V = TypeVar("V")

_BEAT_SECONDS: Final = 0.25  # between two beats of a loop that waits for another thread's trace


class TracingLock:
    """Held while anything is traced, by all threads of the process: torch.fx replaces methods of `nn.Module`
    for the time of a trace, and a FakeTensorMode is in a state of its own in the middle of an operator.
    Reentrant: to trace a layer may need the model's sketch first.

    `on_progress` is called again and again while the main thread waits for the lock, and by `progress` while
    it traces: on a machine with ten other processes a trace has taken 8 s. Other threads' traces do not call
    it: they go on beside a loop that hangs.
    """

    def __init__(self) -> None:
        self.on_progress: Callable[[], object] = int  # nothing
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=_BEAT_SECONDS):
            self.progress()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def progress(self) -> None:
        """Tells that the calling thread is alive."""
        if threading.current_thread() is threading.main_thread():
            self.on_progress()


TRACING: Final = TracingLock()

# Answers of fake tensors that torch remembers for the process, some 3 KB each, and nothing bounds them: one
# for each operator and its shapes, some hundred for a layer that is traced with a new rank.
_DISPATCHES: Final = 1024


class Once(Generic[K, P, V]):
    """Caches results of `make` by its first argument; the newest `most` results are kept. What else making
    takes is passed on and forgotten: tensors of the job that asked first would stay in memory with the key.

    A result that is there is returned at once, whatever other threads are making: whoever runs the steps
    waits for nobody's trace but its own.
    """

    def __init__(self, make: Callable[Concatenate[K, P], V], most: int) -> None:
        self._make, self._most = make, most
        self._known: dict[K, V] = {}

    def __call__(self, key: K, *args: P.args, **kwargs: P.kwargs) -> V:
        try:
            return self._known[key]
        except KeyError:
            pass
        with TRACING:
            if key not in self._known:  # else another thread made it meanwhile
                made = self._make(key, *args, **kwargs)
                _forget_dispatches()
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = made
            return self._known[key]

    def clear(self) -> None:
        """Forgets everything."""
        with TRACING:
            self._known.clear()


def _forget_dispatches() -> None:
    if len(FakeTensorMode.cache) > _DISPATCHES:
        FakeTensorMode.cache_clear()
