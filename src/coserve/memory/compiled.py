"""Bounds what libraries keep for shapes of products that they have seen.

On a CPU torch hands bfloat16 products to oneDNN, which builds code for every new shape. Both remember what
was built, 1,024 shapes each unless they are told otherwise, and a server never stops bringing new ones: every
rank by every number of rows, every length that is attended to. A shape is 0.15 to 0.4 MB on a CPU without
bfloat16 units and 0.65 MB on one with them, so that a process grew for hundreds of jobs and by hundreds of
megabytes. In the mix of 20 jobs of random ranks beside answers 1.2 % of all products found no code with 256
shapes (0.4 % with 1,024, 2.1 % with 64); building it takes 0.2 to 0.5 ms.
"""

import os
from typing import Final

SHAPES: Final = 256
# Bytes that a budget counts for these and for all else that libraries build as they work, such as traces.
# After 64 prompts of 64 lengths, calibration and checks of four jobs a process of the embedded model held
# 127 MB that no account had.
BUILT_BYTES: Final = 128 << 20
_SETTINGS: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own, and torch's


def bound_compiled_shapes() -> None:
    """Has both remember `SHAPES` shapes, unless the environment says how many. Must run before the first
    product, as both read the environment then."""
    for name in _SETTINGS:
        os.environ.setdefault(name, str(SHAPES))
