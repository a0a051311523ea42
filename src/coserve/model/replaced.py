"""Products of a step's rows where adapters have linears of their own.

Rows are grouped by the linear that they pass (BlockLLM 4.3): each is called once, with its own rows alone, so
the rows of a full fine-tune do not cost the base's product too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypass
from coserve.kernels.cpu import row_buckets
from coserve.kernels.rows import concat_rows, split_rows

# Multiply-adds, as if linears were square, that take as long as parting and joining rows, some 20 us. One
# thread, us saved for 16 rows of 32, 32 of 160 and 256 of 512, in bfloat16: width 256 -16, -19 and 86, 512 6,
# 22 and 461, 1024 107, 188 and 6,500; in float32 -7, 4 and 284, 44, 149 and 4,600, 404, 437 and 20,600.
WORTH: Final = 1 << 22
Linear = Callable[[Tensor], Tensor]  # [rows, in] to [rows, out]
AppliedRows = tuple[slice, Bypass]  # rows, and what is applied to them at a linear


def saves_rows(x: Tensor, replaced: Sequence[AppliedRows]) -> bool:
    """Tells whether the base's product of the other rows of x [rows, in], padded to one of the device's row
    buckets, takes less time than that of all: none are left, or so many fewer that it pays to part them."""
    others = len(x) - sum(rows.stop - rows.start for rows, _ in replaced)
    saved = len(x) - row_buckets(x.device).pad_rows(others)
    return bool(replaced) and (not others or saved * x.shape[-1] ** 2 >= WORTH)


def grouped_product(x: Tensor, base: Linear, replaced: Sequence[AppliedRows]) -> Tensor:
    """Products [rows, out] of x [rows, in]: of `replaced` rows, which are disjoint, by what replaces the
    linear, of others by `base`."""
    spans, members = list[slice](), dict[int, tuple[Linear, list[int]]]()
    for rows, bypass in _in_order(len(x), replaced):
        linear = base if bypass is None else bypass.instead
        members.setdefault(id(bypass), (linear, []))[1].append(len(spans))
        spans.append(rows)
    pieces: dict[int, Tensor] = {}
    for linear, places in members.values():
        own = [x[spans[place]] for place in places]
        products = _padded(linear, concat_rows(own), len(x))
        pieces |= zip(places, split_rows(products, [len(each) for each in own]), strict=True)
    return concat_rows([pieces[place] for place in range(len(spans))])


def _in_order(count: int, replaced: Sequence[AppliedRows]) -> Iterator[tuple[slice, Bypass | None]]:
    """All ranges of rows, those of the base between the others."""
    end = 0
    for rows, bypass in sorted(replaced, key=lambda pair: pair[0].start):
        if end < rows.start:
            yield slice(end, rows.start), None
        if rows.start < rows.stop:
            yield rows, bypass
        end = rows.stop
    if end < count:
        yield slice(end, count), None


def _padded(linear: Linear, x: Tensor, most: int) -> Tensor:
    """The linear's product of x [rows, in] in a row bucket, where that has less than `most` rows."""
    bucket = row_buckets(x.device).pad_rows(len(x))
    if not len(x) < bucket < most:
        return linear(x)
    return linear(F.pad(x, (0, 0, 0, bucket - len(x))))[: len(x)]
