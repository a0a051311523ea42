"""Results that are made once, by one thread at a time, and looked up without waiting."""

import threading
from collections.abc import Callable, Hashable
from typing import Concatenate, Final, Generic, ParamSpec, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode

K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
V = TypeVar("V")

# Held while anything is traced, by all threads of the process: torch.fx replaces methods of `nn.Module` for
# the time of a trace, and a FakeTensorMode is in a state of its own in the middle of an operator. Reentrant:
# to trace a layer may need the model's sketch first.
TRACING: Final = threading.RLock()

# Answers of fake tensors that torch remembers for the process, some 3 KB each, and nothing bounds them: one
# for each operator and its shapes, some hundred for a layer that is traced with a new rank.
_DISPATCHES: Final = 1024


class Once(Generic[K, P, V]):
    """What `make` gives, by the key it was given first; the newest `most` results are kept. What else making
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
