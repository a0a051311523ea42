"""Results that are made once, by one thread at a time, and looked up without waiting."""

import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Held while anything is traced, by all threads of the process: torch.fx replaces methods of `nn.Module` for
# the time of a trace, and a FakeTensorMode is in a state of its own in the middle of an operator. Reentrant:
# to trace a layer may need the model's sketch first.
TRACING: Final = threading.RLock()


class Once(Generic[K, V]):
    """What `make` gives, by what it was given; the newest `most` results are kept.

    A result that is there is returned at once, whatever other threads are making: whoever runs the steps
    waits for nobody's trace but its own.
    """

    def __init__(self, make: Callable[[K], V], most: int) -> None:
        self._make, self._most = make, most
        self._known: dict[K, V] = {}

    def __call__(self, key: K) -> V:
        try:
            return self._known[key]
        except KeyError:
            pass
        with TRACING:
            if key not in self._known:  # else another thread made it meanwhile
                made = self._make(key)
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = made
            return self._known[key]

    def clear(self) -> None:
        """Forgets everything."""
        with TRACING:
            self._known.clear()
