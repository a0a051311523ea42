"""A shard of a base's linears: some output features of each, so that several executors have one layer's
weights.

It is Symbiosis' placement of one layer over several devices, cut by columns of the product (Megatron-LM's
column-parallel linear): a client concatenates products, and sums gradients of the input.
"""

import re
from dataclasses import dataclass
from typing import Final

from coserve.errors import ConfigError
from coserve.split.messages import ShardShape

_FORM: Final = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`, from 1. Where outputs do not divide, the first parts have one more; of
    linears with fewer outputs than there are parts the last ones have none."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> "Shard | None":
        """None for an empty text. Raises ConfigError."""
        if not text:
            return None
        found = _FORM.fullmatch(text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"--shard {text!r} is not I/N with I from 1 to N, such as 1/2")
        return Shard(int(found[1]), int(found[2]))

    @property
    def shape(self) -> ShardShape:
        """The shard as clients are told of it."""
        return ShardShape(self.number, self.count)

    def rows(self, outputs: int) -> slice:
        """The rows of a weight [out, in] with so many outputs."""
        each, more = divmod(outputs, self.count)
        before = self.number - 1
        begin = before * each + min(before, more)
        return slice(begin, begin + each + (before < more))
