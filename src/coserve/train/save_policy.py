"""Save policies: which activations of a layer are kept, and how backward gets the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coserve.core.ranges import MOST_COUNT, shown
from coserve.errors import ConfigError


class SavePolicy(Enum):
    """INPUTS keeps layer inputs and recomputes the rest. PRUNED keeps outputs that the adapter's gradients
    need and that are expensive to recompute. EVERYTHING keeps all outputs of frozen linears and attention.

    What is computed elsewhere and needed for a gradient is kept by all of them, so that it is asked for once.
    """

    INPUTS = "inputs"
    PRUNED = "pruned"
    EVERYTHING = "everything"


SavePolicySetting = (
    SavePolicy | int
)  # bytes for a micro-batch's activations, spent on the most expensive to recompute


class Fate(Enum):
    """Fate of an activation. KEPT, or COMPUTED again. SUM: kept with the bypasses' outputs added, as their
    gradients need only the sum. SIGN: gradients need only where it is positive, one bit each. UNUSED: no
    gradient depends on it, directly or through other activations."""

    KEPT = "kept"
    SUM = "sum"
    COMPUTED = "recomputed"
    SIGN = "sign"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Fates:
    """Fates of frozen linears' products by path and of attention by layer; those not named are `otherwise`.
    Layers below `lowest` have no backward, and keep nothing. `nbytes` is the bytes kept a row, beside layer
    inputs, keys and values."""

    products: Mapping[str, Fate] = field(default_factory=dict)
    attention: Mapping[int, Fate] = field(default_factory=dict)
    otherwise: Fate = Fate.COMPUTED
    lowest: int = 0
    nbytes: float = 0.0

    @property
    def keeps_products(self) -> bool:
        """Tells whether any product of a frozen linear is kept."""
        return bool({Fate.KEPT, Fate.SUM, Fate.SIGN} & {self.otherwise, *self.products.values()})

    def of(self, path: str) -> Fate:
        """Fate of the product of the frozen linear at `path`."""
        return self.products.get(path, self.otherwise)

    def of_attention(self, layer: int) -> Fate:
        """Fate of the output of a layer's attention: KEPT or COMPUTED."""
        return self.attention.get(layer, self.otherwise)


def save_policy(value: object) -> SavePolicySetting:
    """A setting from a file or a command line: a name, or bytes. Raises ConfigError."""
    if isinstance(value, SavePolicy):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNT:
        return value
    names = [keep.value for keep in SavePolicy]
    if isinstance(value, str) and value in names:
        return SavePolicy(value)
    raise ConfigError(f"training.keep is {', '.join(names)} or a number of bytes, not {shown(value)}")
