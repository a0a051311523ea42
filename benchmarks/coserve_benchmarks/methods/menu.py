"""The adapter methods that are measured, as a request would ask for them."""

from collections.abc import Mapping
from typing import Final

from coserve.plan.recipes import METHODS as METHODS
from coserve.plan.recipes import Fields as Fields

# Peak learning rates of the order that is usual for each method on so small a model. Nothing was searched
# beyond raising those of the last three and IA3's once, whose losses fell slowly at 1e-2 and 3e-3.
RATES: Final[Mapping[str, float]] = {
    "lora": 3e-3,
    "dora": 3e-3,
    "ia3": 3e-2,
    "bottleneck": 3e-3,
    "bitfit": 1e-2,
    "ln_tuning": 1e-2,
    "prefix_tuning": 5e-2,
    "prompt_tuning": 1e-1,
    "p_tuning": 1e-2,
}
MIXED: Final = ("lora", "ia3", "bottleneck", "bitfit", "prefix_tuning", "prompt_tuning")
EACH: Final = 4  # adapters of each of these
