"""Save policies: which activations of a layer are kept, and how backward gets the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coserve.errors import ConfigError


class SavePolicy(Enum):
    """INPUTS keeps layer inputs and computes the rest again. PRUNED keeps what the adapter's gradients need
    and what is dear to compute. EVERYTHING keeps whatever a frozen linear or an attention gives."""

    INPUTS = "inputs"
    PRUNED = "pruned"
    EVERYTHING = "everything"


SavePolicySetting = (
    SavePolicy | int
)  # bytes that a micro-batch's activations may take, spent on what is dearest to compute again


class Fate(Enum):
    """Fate of an activation. KEPT, or COMPUTED again. SUM: kept with what a bypass adds, whose gradients need
    no more, so that this is not added again. SIGN: all that is asked of it is where it is positive,
    which takes a bit. UNUSED: no gradient depends on it, nor does anything that one depends on."""

    KEPT = "kept"
    SUM = "sum"
    COMPUTED = "recomputed"
    SIGN = "sign"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Fates:
    """Fates of frozen linears' products by path and of attention by layer; those not named are `otherwise`.
    Nothing goes back below layer `lowest`, so that nothing of those layers is kept. `nbytes` is what a row
    takes of what is kept of them, beside layer inputs, keys and values."""

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
    """A setting as a file or a command line has it: a name, or bytes. Raises ConfigError."""
    if isinstance(value, SavePolicy):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    names = [keep.value for keep in SavePolicy]
    if isinstance(value, str) and value in names:
        return SavePolicy(value)
    raise ConfigError(f"training.keep is {', '.join(names)} or a number of bytes, not {value!r}")
